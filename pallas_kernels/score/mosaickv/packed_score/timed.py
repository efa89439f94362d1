"""The shape at which `packed_score` is timed: MosaicKV's means of N blocks of 8 of the 128K tokens.

A mean has a quarter of its channels, R; a head has P bases.
"""

from typing import Any

from pallas_kernels.formats.shapes import CONTEXT, Drawing, Timed, few, full, normal, orthogonal, packed
from pallas_kernels.query.mosaickv.project_query import project_query


def parts(d: Drawing) -> Any:
    """Project a query on bases."""
    query, basis = normal("B H G D")(d), orthogonal("B H P D D")(d)
    return project_query(query, basis, dtype=d.dtype, implementation="xla")


TIMED = Timed(
    label="{N} blocks",
    sizes={"S": CONTEXT, "P": 2, "N": lambda n: n.S // 8, "R": lambda n: n.D // 4},
    tiny={"S": few},
    arrays={
        "parts": parts,
        "values": lambda d: packed("B H N", "R")(d)[0],
        "bitmap": lambda d: packed("B H N", "R")(d)[1],
        "count": full("B", "N"),
        "last": full("B", lambda n: n.P - 1),
    },
    options=lambda n: {"span": n.N // n.P},
    reads=lambda n: n.H * n.N * (n.R * 2 + n.D // 8),
    chained="parts",
    tolerance=1e-4,
    float32=False,
)
