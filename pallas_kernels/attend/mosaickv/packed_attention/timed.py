"""The shape at which `packed_attention` is timed: MosaicKV with 10 % of its blocks at 128K tokens.

K of N blocks of 8 tokens, with a quarter of their channels, R; M whole tokens; P bases of a head.
"""

import math
from typing import Any

from pallas_kernels.formats.shapes import (
    CONTEXT,
    Drawing,
    Sizes,
    Timed,
    counted,
    few,
    full,
    lists,
    normal,
    orthogonal,
    packed,
)
from pallas_kernels.query.mosaickv.project_query import project_query


def parts(d: Drawing) -> Any:
    """Project the query on bases."""
    return project_query(d.arrays["query"], orthogonal("B H P D D")(d), dtype=d.dtype, implementation="xla")


def listed_bytes(n: Sizes) -> int:
    """Count the bytes of the listed packed keys and values, and of the whole ones."""
    return 2 * n.H * (n.K * 8 * (n.R * 2 + n.D // 8) + n.M * n.D * 2)


TIMED = Timed(
    label="{K} of {N} blocks of 8",
    sizes={"S": CONTEXT, "P": 2, "M": 64}
    | {"N": lambda n: n.S // 8, "K": lambda n: math.ceil(n.N / 10), "R": lambda n: n.D // 4},
    tiny={"S": few},
    arrays={
        "query": normal("B H G D"),
        "parts": parts,
        "key": packed("B H S", "R"),
        "value": packed("B H S", "R"),
        "basis": orthogonal("B H P D D"),
        "blocks": lists("B H K", "N"),
        "count": full("B H", "K"),
        "last": full("B", lambda n: n.P - 1),
        "recent": lambda d: (normal("B H M D")(d), normal("B H M D")(d), counted("B H M")(d)),
    },
    options=lambda n: {"scale": n.scale, "granule": 8, "span": n.N // n.P},
    reads=listed_bytes,
    chained="parts",
    float32=False,
)
