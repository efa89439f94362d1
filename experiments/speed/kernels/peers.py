"""One call of decode attention beside FlashInfer's, on the same card: `python -m kvjax kernels --peer flashinfer`.

Both get random keys and values of the same shapes: bfloat16, 8 KV heads of 4 query heads, 128 channels. Several layers run in
turn, so that nothing of a layer is left in the chip's cache when its turn comes again. kvjax runs in a loop of one jitted
program, FlashInfer in a CUDA graph, one after the other for each work. FlashInfer has no jitted form here.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.records import Results
from experiments.speed.device_time import loop_seconds
from experiments.speed.kernels.report import line
from experiments.speed.roofline import Bandwidth
from pallas_kernels.attend.dense_decode import DENSE_DECODE, dense_decode
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION, gather_attention

HEADS, GROUP, DIM = 8, 4, 128
_SCALE = 1 / math.sqrt(DIM)
_ITERATIONS = 30
_TOLERANCE = 1e-2  # of the result's norm
_PACKAGES = ("torch", "flashinfer-python")


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


def time_kvjax(work: Work, repeats: int) -> tuple[str, tuple[float, ...], float]:
    """Return what ran, least, median and most seconds of a call over ``repeats``, and the first layer's relative error."""
    shape = (work.rows, HEADS, work.slots, DIM)
    position = jnp.broadcast_to(jnp.arange(work.slots, dtype=jnp.int32), shape[:3])
    limit, mask = jnp.full((work.rows,), work.slots, jnp.int32), jnp.ones((work.rows, HEADS, work.listed or 0), bool)

    def call(query: jax.Array, layer: tuple, dense: Callable[..., Any], lists: Callable[..., Any], **more: Any) -> Any:
        key, value, listed = layer
        if work.listed is None:
            return dense(query, key, value, position=position, limit=limit, scale=_SCALE)
        return lists(query, key, value, listed, mask, scale=_SCALE, page_size=work.page, **more)

    def attend(query: jax.Array, layer: tuple) -> jax.Array:
        return call(query, layer, dense_decode, gather_attention)[0]

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
    logits = _SCALE * jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), key.astype(jnp.float32))
    want = jnp.einsum("bhgs,bhsd->bhgd", jax.nn.softmax(logits), value.astype(jnp.float32))
    off = jnp.linalg.norm(attend(query, layers[0]).astype(jnp.float32) - want) / jnp.linalg.norm(want)
    took = loop_seconds(run, query, layers, chain=1, iterations=_ITERATIONS, repeats=repeats)
    name = call(query, layers[0], DENSE_DECODE.resolve, GATHER_ATTENTION.resolve, position=None)
    return name, tuple(x / work.layers for x in (took.least, took.median, took.most)), float(off)


def time_flashinfer(work: Work, repeats: int) -> tuple[str, tuple[float, ...], float]:
    """Return the same of FlashInfer: of the fastest of its kernels with and without tensor cores, in pages or as one row."""
    import flashinfer
    import torch

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    lists = work.rows * HEADS
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
    want = (_SCALE * query.float() @ key.mT).softmax(-1) @ value
    del key, value

    def paged(key: Any, value: Any, index: Any, cores: bool) -> Callable[[], Any]:
        space = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        buffers = {"indptr": begin, "indices": index, "last_page_len": last}
        options = {f"paged_kv_{name}_buffer": x.clone() for name, x in buffers.items()}
        options |= {"use_cuda_graph": True, "use_tensor_cores": cores}
        call = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", **options)
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        call.plan(begin, index, last, GROUP, 1, DIM, work.page, **kinds)
        return lambda: call.run(query, (key, value))

    def whole(key: Any, value: Any, index: Any, cores: bool) -> Callable[[], Any]:
        """One request of all heads, which has a kernel of its own."""
        key, value = (x.reshape(HEADS, work.slots, DIM) for x in (key, value))
        how = {"kv_layout": "HND", "use_tensor_cores": cores}
        return lambda: flashinfer.single_decode_with_kv_cache(query.reshape(HEADS * GROUP, DIM), key, value, **how)

    forms = {"paged": paged} | ({"single": whole} if work.listed is None and work.rows == 1 else {})
    found = []
    for form, make in forms.items():
        for cores in (True, False):
            calls = [make(*layer, cores) for layer in layers]
            error = float((calls[0]().reshape(want.shape).float() - want).norm() / want.norm())
            name = f"flashinfer, {form}" + (", tensor cores" if cores else "")
            found.append((name, _graph_seconds(torch, calls, repeats), error))
    return min(found, key=lambda row: row[1][1])


def _graph_seconds(torch: Any, calls: list[Callable[[], Any]], repeats: int) -> tuple[float, ...]:
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
    for _ in range(repeats + 1):  # the first warms up
        first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_ITERATIONS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(first.elapsed_time(end) / 1e3 / _ITERATIONS / len(calls))
    return min(spans[1:]), statistics.median(spans[1:]), max(spans[1:])


PEERS: Mapping[str, Callable[[Work, int], tuple[str, tuple[float, ...], float]]] = {"flashinfer": time_flashinfer}


def check_peer(name: str) -> tuple[str, ...]:
    """Return the packages of a peer; raise ValueError where it cannot be imported."""
    try:
        __import__(name)
    except ImportError as error:
        raise ValueError(
            f"--peer {name}: expected it beside kvjax, got {error}. In an environment of its own, on a machine with nvcc: "
            "pip install 'kvjax[cuda13]' torch flashinfer-python ninja"
        ) from error
    return _PACKAGES


def run_peer(peer: str, results: Results, bandwidth: Bandwidth, run_name: str, repeats: int) -> int:
    """Time each work on both sides, one after the other, and add the rows; return the number of those that failed."""
    failed = 0
    for label, work in WORK.items():
        for measure in (time_kvjax, PEERS[peer]):
            identity = {"name": "attention", "shape": label, "side": peer if measure is PEERS[peer] else "kvjax"}
            row = identity | {"run": run_name, "bandwidth": bandwidth.bytes_per_second, "unit": "s", "layers": work.layers}
            try:
                name, (least, median, most), error = measure(work, repeats)
                row |= {"implementation": name, "value": median, "least": least, "most": most, "relative_error": error}
                floor = bandwidth.seconds(work.bytes_read)
                row |= {"bytes_read": work.bytes_read, "floor": floor, "ratio": median / floor, "error": None}
                row["passed"] = error <= _TOLERANCE
            except Exception as problem:  # the other rows are still wanted
                row |= {"implementation": identity["side"], "value": None, "passed": False}
                row["error"] = f"{type(problem).__name__}: {problem}"[:2000]
            failed += not row["passed"]
            results.add(row, identity)
            print(line(row), flush=True)
    return failed
