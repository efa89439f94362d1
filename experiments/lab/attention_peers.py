"""Times one call of decode attention in kvjax or in FlashInfer: `python -m experiments.lab.attention_peers --side kvjax`.

Both sides get random keys and values in the same shapes: bfloat16, 8 KV heads of 4 query heads, 128 channels. Several layers
run in turn, so that nothing of a layer is left in the chip's cache when its turn comes again. kvjax runs in a loop of one
jitted program, FlashInfer in a CUDA graph. The sides run one after the other, because each takes the card's memory, and add
their rows to one record. FlashInfer has no jitted form here, and needs torch and nvcc.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.cli import Job, Settings, option, record_path
from experiments.records import Results
from experiments.speed.settings import Output

HEADS, GROUP, DIM = 8, 4, 128
SCALE = 1 / math.sqrt(DIM)
REPEATS, ITERATIONS = 7, 30


class Work(NamedTuple):
    """What is attended: all of ``slots`` in each of ``rows``, or ``listed`` pages of ``page`` tokens of each KV head."""

    rows: int
    slots: int
    listed: int | None = None
    page: int = 16

    @property
    def tokens(self) -> int:
        return self.slots if self.listed is None else self.listed * self.page

    @property
    def layers(self) -> int:
        """Enough of them that they read more than the chip's cache holds."""
        return 4 if self.bytes_read > 1 << 26 else 8

    @property
    def bytes_read(self) -> int:
        """Of keys and values."""
        return 2 * 2 * self.rows * HEADS * self.tokens * DIM

    def lists(self, layer: int) -> np.ndarray:
        """Draw different pages of each head, int32 [B, H, K]."""
        rng, pages = np.random.default_rng(layer), self.slots // self.page
        heads = [rng.permutation(pages)[: self.listed or pages] for _ in range(self.rows * HEADS)]
        return np.stack(heads).reshape(self.rows, HEADS, -1).astype(np.int32)


WORK = {
    "all tokens, 1 row of 131,072": Work(1, 131072),
    "all tokens, 8 rows of 32,768": Work(8, 32768),
    "512 pages of 16 tokens a head, of 131,072": Work(1, 131072, 512),
    "128 pages of 16, 16 rows of 32,768": Work(16, 32768, 128),
    "2,048 single tokens a head, of 131,072": Work(1, 131072, 2048, 1),
    "16,384 single tokens a head, of 131,072": Work(1, 131072, 16384, 1),
    "2,048 single tokens a head, 16 rows of 32,768": Work(16, 32768, 2048, 1),
}


def time_kvjax(work: Work) -> tuple[list[float], float]:
    """Return seconds of a call, one for each repeat, and the relative error of the first layer."""
    import jax
    import jax.numpy as jnp

    from experiments.speed.device_time import loop_seconds
    from pallas_kernels.attend.dense_decode import dense_decode
    from pallas_kernels.attend.gather_attention import gather_attention

    shape = (work.rows, HEADS, work.slots, DIM)
    position = jnp.broadcast_to(jnp.arange(work.slots, dtype=jnp.int32), shape[:3])
    limit, mask = jnp.full((work.rows,), work.slots, jnp.int32), jnp.ones((work.rows, HEADS, work.listed or 0), bool)

    def attend(query: jax.Array, layer: tuple) -> jax.Array:
        key, value, listed = layer
        if work.listed is None:
            return dense_decode(query, key, value, position=position, limit=limit, scale=SCALE)[0]
        return gather_attention(query, key, value, listed, mask, scale=SCALE, page_size=work.page)[0]

    def run(query: jax.Array, layers: list[tuple]) -> jax.Array:
        for layer in layers:
            query = query + attend(query, layer) * jnp.bfloat16(1e-8)
        return query

    keys = jax.random.split(jax.random.key(0), 2 * work.layers + 1)
    query = jax.random.normal(keys[-1], (work.rows, HEADS, GROUP, DIM), jnp.bfloat16)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    layers = [(draw(keys[2 * i]), draw(keys[2 * i + 1]), jnp.asarray(work.lists(i))) for i in range(work.layers)]
    key, value, listed = layers[0]
    if work.listed is not None:
        slots = listed[..., None] * work.page + jnp.arange(work.page)[None, None, None]
        slots = slots.reshape(*listed.shape[:2], -1, 1)
        key, value = (jnp.take_along_axis(x, slots, axis=2) for x in (key, value))
    logits = SCALE * jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), key.astype(jnp.float32))
    want = jnp.einsum("bhgs,bhsd->bhgd", jax.nn.softmax(logits), value.astype(jnp.float32))
    off = jnp.linalg.norm(attend(query, layers[0]).astype(jnp.float32) - want) / jnp.linalg.norm(want)
    took = loop_seconds(run, query, layers, chain=1, iterations=ITERATIONS, repeats=REPEATS)
    return [x / work.layers for x in (took.least, took.median, took.most)], float(off)


def time_flashinfer(work: Work) -> tuple[list[float], float]:
    """Return the same of FlashInfer, of the faster of its kernels with and without tensor cores."""
    import flashinfer
    import torch

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    lists, best, off = work.rows * HEADS, [math.inf] * 3, math.inf
    query = draw(lists, GROUP, DIM)  # of each row and KV head: the lists of heads differ, as those of requests do
    pages, count = work.slots // work.page, work.tokens // work.page
    layers = []
    for layer in range(work.layers):
        index = torch.from_numpy(work.lists(layer).reshape(lists, -1)).cuda()
        index = (index + torch.arange(lists, device="cuda", dtype=torch.int32)[:, None] * pages).reshape(-1).int()
        layers.append((draw(lists * pages, 1, work.page, DIM), draw(lists * pages, 1, work.page, DIM), index))
    begin = torch.arange(lists + 1, device="cuda", dtype=torch.int32) * count
    last = torch.full((lists,), work.page, device="cuda", dtype=torch.int32)
    key, value = (x[layers[0][2].long()].reshape(lists, -1, DIM).float() for x in layers[0][:2])
    want = (SCALE * query.float() @ key.mT).softmax(-1) @ value
    del key, value
    for cores in (True, False):
        calls = []
        for key, value, index in layers:
            space = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
            call = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=cores,
                paged_kv_indptr_buffer=begin.clone(),
                paged_kv_indices_buffer=index.clone(),
                paged_kv_last_page_len_buffer=last.clone(),
            )
            kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            call.plan(begin, index, last, GROUP, 1, DIM, work.page, **kinds)
            calls.append(lambda call=call, key=key, value=value: call.run(query, (key, value)))
        error = float((calls[0]().float() - want).norm() / want.norm())
        if (spans := _graph_seconds(torch, calls))[1] < best[1]:
            best, off = spans, error
    if work.listed is None and work.rows == 1:  # one request of all heads has a kernel of its own
        key, value = (x.reshape(HEADS, work.slots, DIM) for x in layers[0][:2])
        whole = [tuple(x.reshape(HEADS, work.slots, DIM) for x in layer[:2]) for layer in layers]
        for cores in (True, False):
            alone = [
                lambda k=k, v=v, cores=cores: flashinfer.single_decode_with_kv_cache(
                    query.reshape(HEADS * GROUP, DIM), k, v, kv_layout="HND", use_tensor_cores=cores
                )
                for k, v in whole
            ]
            error = float((alone[0]().reshape(want.shape).float() - want).norm() / want.norm())
            if (spans := _graph_seconds(torch, alone))[1] < best[1]:
                best, off = spans, error
    return best, off


def _graph_seconds(torch: Any, calls: list[Callable[[], Any]]) -> list[float]:
    """Time calls as one CUDA graph: the least, median and largest seconds of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    spans = []
    for _ in range(REPEATS + 1):  # the first warms up
        first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(ITERATIONS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(first.elapsed_time(end) / 1e3 / ITERATIONS / len(calls))
    return [min(spans[1:]), statistics.median(spans[1:]), max(spans[1:])]


@dataclasses.dataclass(frozen=True)
class PeerSettings(Settings):
    """The settings of `experiments.lab.attention_peers`.

    Attributes:
        side: whose kernels run
    """

    side: str = option("kvjax", choices=("kvjax", "flashinfer"))


@dataclasses.dataclass(frozen=True)
class PeerOutput(Output):
    """Where `experiments.lab.attention_peers` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/attention-peers.json"), read=record_path)


def _compare(settings: PeerSettings, output: PeerOutput) -> None:
    device, measure = None, time_kvjax
    if settings.side == "flashinfer":
        import torch

        device = {"platform": "gpu", "kind": torch.cuda.get_device_name(), "count": 1}
        measure = time_flashinfer
    shapes = {"heads": HEADS, "group": GROUP, "dim": DIM, "dtype": "bfloat16", "iterations": ITERATIONS, "repeats": REPEATS}
    packages = ("torch", "flashinfer-python", "jax")
    results = Results(output.out, "attention_peers", shapes, device=device, packages=packages)
    for name, work in WORK.items():
        (least, median, most), error = measure(work)
        row = {"name": "attention", "work": name, "side": settings.side, "value": median, "unit": "s"}
        row |= {"least": least, "most": most, "bytes_read": work.bytes_read, "relative_error": error, "layers": work.layers}
        results.add(row, {"work": name, "side": settings.side})
        line = f"{median * 1e6:8.1f} us {work.bytes_read / median / 1e12:6.2f} TB/s {error:.1e}"
        print(f"{name:46s} {settings.side:10s} {line}", flush=True)


main = Job(_compare, PeerSettings, PeerOutput)


if __name__ == "__main__":
    raise SystemExit(main())
