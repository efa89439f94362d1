"""kvjax: KV-cache methods for long-context decoding in pure functional JAX.

>>> cache = kvjax.prefill(params, tokens, config=config, method=kvjax.methods.Quest(budget=1024))
>>> out = kvjax.generate(params, cache, max_new_tokens=64)
"""

from kvjax import methods as methods
from kvjax.cache import Cache as Cache
from kvjax.cache import LayerCache as LayerCache
from kvjax.checkpoint import load_cache as load_cache
from kvjax.checkpoint import save_cache as save_cache
from kvjax.compose import DenseBelow as DenseBelow
from kvjax.compose import PerLayer as PerLayer
from kvjax.compose import Stages as Stages
from kvjax.fork import fork as fork
from kvjax.generate import Generation as Generation
from kvjax.generate import decode_step as decode_step
from kvjax.generate import extend as extend
from kvjax.generate import generate as generate
from kvjax.generate import stream as stream
from kvjax.head_scores import head_scores as head_scores
from kvjax.layer_budgets import LayerBudgets as LayerBudgets
from kvjax.layer_budgets import layer_shares as layer_shares
from kvjax.memory import memory_needed as memory_needed
from kvjax.memory import offload_share as offload_share
from kvjax.methods.chess.calibration import calibrate_chess as calibrate_chess
from kvjax.outside import register as register
from kvjax.patterns import Pattern as Pattern
from kvjax.patterns import patterns as patterns
from kvjax.periodic import Periodic as Periodic
from kvjax.prompts import pad_tokens as pad_tokens
from kvjax.prompts import prefill as prefill
from kvjax.prompts import prefill_each as prefill_each
from kvjax.registry import make as make
from kvjax.sparse_prefill import Prefill as Prefill
from kvjax.stats import Stats as Stats
from kvjax.sweep import SweepResult as SweepResult
from kvjax.sweep import sweep as sweep
from kvjax.twilight import Twilight as Twilight
from kvjax.version import __version__ as __version__
from pallas_kernels.dispatch import default_implementation as default_implementation
from pallas_kernels.dispatch import set_default_implementation as set_default_implementation
