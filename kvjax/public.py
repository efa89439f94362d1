"""What `kvjax` exports: `kvjax.NAME` is NAME here, and the first one asked for imports them all."""

from kvjax import methods, models, wrappers
from kvjax.accounting.memory import memory_needed, offload_share
from kvjax.accounting.stats import Stats
from kvjax.api.answer import answer
from kvjax.api.checkpoint import load_cache, save_cache
from kvjax.api.evaluate import evaluate
from kvjax.api.fork import fork
from kvjax.api.generate import Generation, decode_step, extend, generate, stream
from kvjax.api.prefill import pad_tokens, prefill, prefill_each
from kvjax.api.score import score
from kvjax.api.sweep import sweep
from kvjax.cache import Cache
from kvjax.exact import Verified
from kvjax.methods.head_scores import head_scores
from kvjax.plugins import register
from kvjax.protocol.fields import share
from kvjax.registry import make
from kvjax.version import __version__
from pallas_kernels.dispatch import default_implementation, set_default_implementation

__all__ = [
    "Cache", "Generation", "Stats", "Verified", "answer", "decode_step", "default_implementation", "evaluate", "extend",
    "fork", "generate", "head_scores", "load_cache", "make", "memory_needed", "methods", "models", "offload_share",
    "pad_tokens", "prefill", "prefill_each", "register", "save_cache", "score", "set_default_implementation", "share",
    "stream", "sweep", "wrappers", "__version__",
]  # fmt: skip
