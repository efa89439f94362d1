"""What a cache needs of device and host memory, said before a prompt is read and not in the middle of it.

Host memory here is pinned: the GPU reads it over the bus, and JAX takes it from a pool of a size of its own.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.method import LayerMethod, LayerSpec, Method
from kvjax.registry import resolve
from kvjax.step import layer_methods, layer_specs, prompt_blocks
from kvjax.typing import Model
from pallas_kernels.host import to_device, to_host

_LEAST = 1 << 20  # bytes of a piece where the device is all but full
_PIECE = 1 << 30  # bytes of pinned memory asked for at once, at most: each piece is made on the device


@dataclasses.dataclass(frozen=True)
class Needed:
    """Bytes that a cache takes at least.

    Attributes:
        device: of all layers, the larger of what they hold while the prompt is read and afterwards.
        host: likewise, in pinned host memory.
        staged: on the device besides, one layer's keys and values while a piece of the prompt attends to them.
    """

    device: int
    host: int
    staged: int

    def __str__(self) -> str:
        device = f"{_gib(self.device)} of device memory and {_gib(self.staged)} to stage a layer"
        return f"{device}, {_gib(self.host)} of host memory"


def memory_needed(
    method: Method | str, config: Model, *, batch: int, prompt_slots: int, max_new_tokens: int, chunk_size: int = 8192
) -> Needed:
    """What prefilling and decoding take, from shapes alone; activations and what layers share are not counted.

    Args:
        method: any, or its name.
        config: the model's description.
        batch: rows.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        chunk_size: as in `kvjax.prefill`.

    Raises:
        ValueError: unknown name, or a size below 1.
    """
    method = resolve(method)
    sizes = {"batch": batch, "prompt_slots": prompt_slots, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size}
    if small := [name for name, value in sizes.items() if value < 1]:
        raise ValueError(f"memory_needed: {small[0]} must be at least 1, got {sizes[small[0]]}")
    methods = layer_methods(method, config)
    chunk, chunks = prompt_blocks(methods, prompt_slots, chunk_size)
    before, after, known = [], [], {}
    for m, spec in zip(methods, layer_specs(methods, config, batch, chunk * chunks, max_new_tokens), strict=True):
        kind = jax.tree.structure(m), spec.offloaded
        if kind not in known:  # layers of one kind differ in their number only
            known[kind] = _bytes(m, spec, finished=False), _bytes(m, spec, finished=True)
        before.append(known[kind][0])
        after.append(known[kind][1])
    # Of a prompt in one piece, one layer is held at a time.
    reading = before if chunks > 1 else [tuple(max(x[at] for x in before) for at in (0, 1))]
    device, host = (max(sum(x[at] for x in reading), sum(x[at] for x in after)) for at in (0, 1))
    return Needed(device=device, host=host, staged=max(x[1] for x in before))


def offload_share(
    method: Method | str,
    config: Model,
    *,
    batch: int,
    prompt_slots: int,
    max_new_tokens: int,
    chunk_size: int = 8192,
    device_bytes: int | None = None,
    spare: int = 2 << 30,
) -> float:
    """The least ``offload`` with which a cache fits the device: the layers that need not leave it decode faster there.

    Example, once the parameters are on the device: ``ParisKV(offload=offload_share("pariskv", config, batch=1,
    prompt_slots=393216, max_new_tokens=256))``.

    Args:
        method: any that has ``offload``, whose value does not matter, or its name.
        config: the model's description.
        batch: rows.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        chunk_size: as in `kvjax.prefill`.
        device_bytes: what the cache may take of the device; None: what is free now.
        spare: bytes of them to leave for activations.

    Returns:
        A share of the layers: 0 if all of them fit, 1 if every one must leave.

    Raises:
        ValueError: the method has no ``offload``, or ``device_bytes`` is None and the device does not say what is free.
        MemoryError: it does not fit with all layers offloaded either.
    """
    method = resolve(method)
    name = type(method).__name__
    if not any(field.name == "offload" for field in dataclasses.fields(method)):
        raise ValueError(f"offload_share: expected a method with a field offload, got {name}")
    if device_bytes is None:
        device_bytes = free_bytes()
    if device_bytes is None:
        raise ValueError("offload_share: this device does not say how much memory is free: pass device_bytes")
    sizes = {"batch": batch, "prompt_slots": prompt_slots, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size}

    def needed(layers: int) -> Needed:
        return memory_needed(dataclasses.replace(method, offload=layers / config.num_layers), config, **sizes)

    def fits(layers: int) -> bool:
        found = needed(layers)
        return found.device + found.staged + spare <= device_bytes

    if fits(0):  # with nothing to stage
        return 0.0
    layers = 1 + bisect.bisect_left(range(1, config.num_layers + 1), True, key=fits)
    if layers > config.num_layers:
        raise MemoryError(
            f"{name} with offload=True needs {needed(config.num_layers)}, and {_gib(spare)} for activations, got "
            f"{_gib(device_bytes)} of device memory; shorten the prompt or take fewer rows"
        )
    return layers / config.num_layers


def free_bytes() -> int | None:
    """Device memory that JAX may still allocate; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def check_memory(method: Method, config: Model, **sizes: int) -> None:
    """Refuse what cannot fit, and have the pinned memory ready; does nothing where the device does not say what it has.

    Args:
        method: any.
        config: the model's description.
        **sizes: see `memory_needed`.

    Raises:
        MemoryError: with bytes needed, bytes available, and what to change.
    """
    free = free_bytes()
    if free is None:
        return
    needed = memory_needed(method, config, **sizes)
    if needed.device + needed.staged > free:
        raise MemoryError(
            f"{type(method).__name__} needs {needed}, got {_gib(free)} of free device memory; shorten the prompt, take fewer "
            "rows, offload more of the layers if some stay (kvjax.offload_share), or give JAX more of the device "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION, set before jax is imported)"
        )
    got = pin_host(needed.host, free // 4)
    if got < needed.host:
        raise MemoryError(
            f"{type(method).__name__} needs {needed}, got {_gib(got)} of pinned host memory; shorten the prompt, take fewer "
            "rows, offload no more layers than must be (kvjax.offload_share), or raise the pool's limit "
            "(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 by default, set before jax is imported)"
        )


def pin_host(size: int, free: int = _PIECE) -> int:
    """Bytes of pinned host memory out of ``size`` that can be had at once.

    They go back to JAX's pool, which keeps them pinned: the first time takes most of a second per GiB, and what is allocated
    afterwards nothing.

    Args:
        size: bytes asked for.
        free: bytes of device memory that may be taken for a moment.
    """
    piece = min(size, max(free, _LEAST), _PIECE)
    make = jax.jit(lambda: to_host(jnp.zeros((piece,), jnp.uint8)))
    held: list[jax.Array] = []
    try:
        while len(held) * piece < size:
            held.append(jax.block_until_ready(make()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return min(sum(x.size for x in held), size)


def link_bandwidth(size: int = 1 << 28, repeats: int = 3) -> float:
    """Bytes per second from pinned host memory to the device, the best of ``repeats`` copies of ``size`` bytes."""
    there = jax.block_until_ready(jax.jit(lambda: to_host(jnp.zeros((size,), jnp.uint8)))())
    copy = jax.jit(to_device)
    spans = []
    for _ in range(repeats + 1):  # the first one compiles
        begun = time.perf_counter()
        jax.block_until_ready(copy(there))
        spans.append(time.perf_counter() - begun)
    return size / min(spans[1:])


def placed_bytes(tree: Any) -> tuple[int, int]:
    """Bytes allocated by all arrays of ``tree`` on the device and in host memory."""
    sizes = [(jax.typeof(x), x.size * x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    host = sum(size for kind, size in sizes if kind.memory_space == jax.memory.Space.Host)
    return sum(size for _, size in sizes) - host, host


def _bytes(method: LayerMethod, spec: LayerSpec, finished: bool) -> tuple[int, int]:
    """Of one layer's state: device, host."""

    def make() -> list[jax.Array]:
        state = method.init(spec)
        return jax.tree.leaves(method.finish(state, spec) if finished else state)

    kinds = jax.make_jaxpr(make)().out_avals
    sizes = [(x.memory_space == jax.memory.Space.Host, x.size * x.dtype.itemsize) for x in kinds]
    return sum(size for host, size in sizes if not host), sum(size for host, size in sizes if host)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
