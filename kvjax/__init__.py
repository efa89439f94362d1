"""kvjax: KV-cache methods for long-context decoding in pure functional JAX.

>>> cache = kvjax.prefill(params, tokens, config=config, method=kvjax.methods.Quest(budget=1024))
>>> out = kvjax.generate(params, cache, max_new_tokens=64)
"""

from kvjax import methods as methods
from kvjax import models as models
from kvjax import moved as moved
from kvjax.accounting.memory import memory_needed as memory_needed
from kvjax.accounting.memory import offload_share as offload_share
from kvjax.accounting.stats import Stats as Stats
from kvjax.api.answer import Answers as Answers
from kvjax.api.answer import answer as answer
from kvjax.api.calibrate_chess import calibrate_chess as calibrate_chess
from kvjax.api.checkpoint import load_cache as load_cache
from kvjax.api.checkpoint import save_cache as save_cache
from kvjax.api.evaluate import Table as Table
from kvjax.api.evaluate import evaluate as evaluate
from kvjax.api.fork import fork as fork
from kvjax.api.generate import Generation as Generation
from kvjax.api.generate import decode_step as decode_step
from kvjax.api.generate import extend as extend
from kvjax.api.generate import generate as generate
from kvjax.api.generate import stream as stream
from kvjax.api.prefill import pad_tokens as pad_tokens
from kvjax.api.prefill import prefill as prefill
from kvjax.api.prefill import prefill_each as prefill_each
from kvjax.api.sweep import SweepResult as SweepResult
from kvjax.api.sweep import sweep as sweep
from kvjax.attention.patterns import Pattern as Pattern
from kvjax.attention.patterns import patterns as patterns
from kvjax.cache import Cache as Cache
from kvjax.cache import LayerCache as LayerCache
from kvjax.fields import share as share
from kvjax.methods.head_scores import head_scores as head_scores
from kvjax.plugins import register as register
from kvjax.registry import make as make
from kvjax.version import __version__ as __version__
from kvjax.wrappers.compose import DenseBelow as DenseBelow
from kvjax.wrappers.compose import PerLayer as PerLayer
from kvjax.wrappers.compose import Stages as Stages
from kvjax.wrappers.layer_budgets import LayerBudgets as LayerBudgets
from kvjax.wrappers.layer_budgets import layer_shares as layer_shares
from kvjax.wrappers.periodic import Periodic as Periodic
from kvjax.wrappers.sparse_prefill import Prefill as Prefill
from kvjax.wrappers.twilight import Twilight as Twilight
from pallas_kernels.dispatch import default_implementation as default_implementation
from pallas_kernels.dispatch import set_default_implementation as set_default_implementation
