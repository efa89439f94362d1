"""Copy a cache, to ask several questions about one context."""

from kvjax.api.programs import repeat_program
from kvjax.cache.whole_model import Cache, check_alive, repeat_rows
from kvjax.decoding.bits import in_32_bits
from kvjax.protocol.fields import positive_int


@in_32_bits
def fork(cache: Cache, copies: int = 1) -> Cache:
    """Copy ``cache`` with every row repeated ``copies`` times: row b becomes the rows b*copies to (b+1)*copies - 1.

    Prefill a context once, fork it, and ask each copy another question with `extend`. `extend` and `generate` consume
    (donate) their cache, so fork a cache first if you want to use it again.
    """
    count = positive_int("copies", copies)
    check_alive(cache)
    if cache.plan is None:
        return repeat_rows(cache, count)
    return repeat_program(cache, copies=count)
