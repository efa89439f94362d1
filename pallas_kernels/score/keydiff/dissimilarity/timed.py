"""The shape at which `dissimilarity` is timed: a cache of KeyDiff with 1,024 tokens and the newest token."""

from pallas_kernels.formats.shapes import Timed, counted, normal

TIMED = Timed(
    label="{S} tokens, 1 row",
    sizes={"S": 1025},
    tiny={"S": 17},
    arrays={"key": normal("B H S D"), "position": counted("B H S")},
    reads=("key", "position"),
    chained="key",
)
