"""Measure what the next decode step of a cache costs."""

from typing import Any

from kvjax.accounting.stats import Stats, with_bytes
from kvjax.api.programs import cost_program
from kvjax.cache import Cache
from kvjax.decoding.bits import in_32_bits
from kvjax.mesh.sharding import readable


@in_32_bits
def measure(cache: Cache, params: Any = None) -> Stats:
    """Compute the cost of the next decode step; the model's ``params`` are needed for `Stats.weight_bytes` only."""
    return with_bytes(readable(cache.plan, cost_program(cache)), cache, params)
