"""The shape at which `choice` is timed: both stages of ParisKV at 128K tokens."""

import dataclasses

from pallas_kernels.choose.pariskv.collision import timed as votes
from pallas_kernels.choose.pariskv.rerank import timed as best

TIMED = dataclasses.replace(
    best.TIMED,
    sizes=best.TIMED.sizes | votes.TIMED.sizes,
    tiny={**best.TIMED.tiny, **votes.TIMED.tiny},
    arrays={x: y for x, y in {**best.TIMED.arrays, **votes.TIMED.arrays}.items() if x not in ("slots", "count")},
    options=lambda n: best.TIMED.options(n) | votes.TIMED.options(n),
    reads=lambda n: best.TIMED.reads(n) + votes.TIMED.reads(n),
)
