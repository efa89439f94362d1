"""The shape at which `compact` is timed: a threshold that keeps nine tenths of K = 2048 of 128K slots."""

from pallas_kernels.formats.shapes import CONTEXT, Timed, few

TIMED = Timed(
    label="{K} of [{H}, {S}]",
    sizes={"S": CONTEXT, "K": 2048},
    tiny={"S": few, "K": few},
    arrays={"mask": lambda d: d.random.uniform(next(d.keys), d.along("B H S")) < 0.9 * d.K / d.S},
    options=lambda n: {"capacity": n.K},
    reads=("mask",),
    chained=None,
)
