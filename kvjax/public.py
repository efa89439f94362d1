"""What `kvjax` exports: `kvjax.NAME` is NAME here, and the first one asked for imports them all."""

from kvjax import methods, models
from kvjax.accounting.memory import memory_needed, offload_share
from kvjax.accounting.stats import Stats
from kvjax.api.answer import Answers, answer
from kvjax.api.calibrate_chess import calibrate_chess
from kvjax.api.checkpoint import load_cache, save_cache
from kvjax.api.evaluate import Table, evaluate
from kvjax.api.fork import fork
from kvjax.api.generate import Generation, decode_step, extend, generate, stream
from kvjax.api.prefill import pad_tokens, prefill, prefill_each
from kvjax.api.sweep import SweepResult, sweep
from kvjax.attention.patterns import Pattern, patterns
from kvjax.cache import Cache, LayerCache
from kvjax.exact.from_judge import FromJudge
from kvjax.exact.verified import Verified
from kvjax.methods.head_scores import head_scores
from kvjax.plugins import register
from kvjax.protocol.fields import share
from kvjax.registry import make
from kvjax.version import __version__
from kvjax.wrappers.compose import DenseBelow, PerLayer, Stages
from kvjax.wrappers.layer_budgets import LayerBudgets, layer_shares
from kvjax.wrappers.periodic import Periodic
from kvjax.wrappers.sparse_prefill import Prefill
from kvjax.wrappers.twilight import Twilight
from pallas_kernels.dispatch import default_implementation, set_default_implementation

__all__ = [
    "Answers",
    "Cache",
    "DenseBelow",
    "FromJudge",
    "Generation",
    "LayerBudgets",
    "LayerCache",
    "Pattern",
    "PerLayer",
    "Periodic",
    "Prefill",
    "Stages",
    "Stats",
    "SweepResult",
    "Table",
    "Twilight",
    "Verified",
    "answer",
    "calibrate_chess",
    "decode_step",
    "default_implementation",
    "evaluate",
    "extend",
    "fork",
    "generate",
    "head_scores",
    "layer_shares",
    "load_cache",
    "make",
    "memory_needed",
    "methods",
    "models",
    "offload_share",
    "pad_tokens",
    "patterns",
    "prefill",
    "prefill_each",
    "register",
    "save_cache",
    "set_default_implementation",
    "share",
    "stream",
    "sweep",
    "__version__",
]
