"""The shape at which `low_rank_attention` is timed: ShadowKV's attention at 128K tokens.

L of S tokens are listed in K of N chunks of P; the keys have rank R.
"""

import math

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, frequencies, full, lists, normal

TIMED = Timed(
    label="{K} pages of {P} per KV head of {S} tokens, rank {R}",
    sizes={"S": CONTEXT, "R": 160, "L": 2048, "P": 8, "K": lambda n: n.L // n.P, "N": lambda n: n.S // n.P},
    tiny={"S": few, "R": 16, "L": few},
    arrays={
        "query": normal("B H G D"),
        "left": normal("B S R"),
        "right": lambda d: normal("B H R D")(d) / math.sqrt(d.R),
        "value": normal("B H S D"),
        "pages": lists("B H K", "N"),
        "mask": full("B H K", True, bool),
        "inv_freq": frequencies,
    },
    options=lambda n: {"page_size": n.P, "scale": n.scale},
    reads=lambda n: 2 * n.H * n.K * n.P * (n.R + n.D),  # the listed rows of `left` and of `value`
)
