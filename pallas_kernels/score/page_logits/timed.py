"""The shape at which `page_logits` is timed: ShadowKV's N chunks of 8 tokens at 128K tokens."""

import jax

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, normal

TIMED = Timed(
    label="{N} pages per KV head",
    sizes={"N": CONTEXT // 8},
    tiny={"N": few},
    arrays={"query": normal("B H G D"), "vector": normal("B H N D"), "limit": full("B", "N")},
    options=lambda n: {"scale": n.scale},
    reads=("vector",),
    # Implementations divide the pages into different parts.
    defined=lambda result, n: (result[0], jax.nn.logsumexp(result[1], axis=2)),
)
