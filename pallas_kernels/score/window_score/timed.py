"""The shape at which `window_score` is timed: SnapKV's window of W queries at the end of a prompt of 128K tokens."""

from pallas_kernels.formats.shapes import CONTEXT, Timed, counted, few, normal

TIMED = Timed(
    label="{W} queries over {S} tokens",
    sizes={"S": CONTEXT, "W": 32},
    tiny={"S": few, "W": 8},
    arrays={
        "query": normal("B H G W D"),
        "key": normal("B H S D"),
        "query_position": counted("B W", lambda n: n.S - n.W),
        "key_position": counted("B H S"),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key",),
)
