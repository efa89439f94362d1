"""The shapes at which `dense_decode` is timed: full attention at up to 512K tokens, with one query per head or a few.

T: the newest tokens of a row, which attend at once; None for a decode step's one. ``kind``: the codes of keys and values.
"""

from pallas_kernels.formats.shapes import CONTEXT, Sizes, Timed, counted, few, full, normal, rounded


def label(n: Sizes) -> str:
    """Name a shape."""
    codes = "" if n.kind is None else f" in {n.kind}"
    return f"{n.S} tokens{codes}, {n.B} rows{'' if n.T is None else f', {n.T} queries'}"


TIMED = Timed(
    label=label,
    sizes={"S": CONTEXT, "T": None, "kind": None},
    shapes=(
        {},
        {"B": 8},
        {"S": 4 * CONTEXT},
        {"S": 1280},
        {"kind": "int8"},
        {"B": 8, "kind": "int8"},
        {"kind": "float8_e4m3fn"},
        {"B": 8, "S": CONTEXT // 4},
        {"T": 6},
        {"B": 8, "S": CONTEXT // 4, "T": 6},
        {"T": 6, "kind": "int8"},
    ),
    tiny={"S": few},
    arrays={
        "query": lambda d: normal("B H G D" if d.T is None else "B H G T D")(d),
        "key": rounded("B H S D"),
        "value": rounded("B H S D"),
        "position": counted("B H S"),
        "limit": full("B", "S"),
        "query_position": lambda d: None if d.T is None else counted("B T", d.S - d.T)(d),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key", "value"),
)
