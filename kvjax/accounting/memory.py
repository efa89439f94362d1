"""The device and host memory that a cache needs, checked before prefill.

Host memory here is pinned: the GPU reads it over the bus. JAX takes it from a pool, whose size has a limit of its own.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.accounting.phases import Phases, add_parts, gib
from kvjax.accounting.reading import Reading
from kvjax.cache.quantised import check_kv_dtype
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.checks import check_model, check_sizes, has_no_limit
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.reading_order import By, check_order, chosen_order
from kvjax.decoding.shared_storage import stored_alone
from kvjax.mesh.processes import least
from kvjax.mesh.sharding import Plan, bytes_on_device, check_axes, device_of, plan_of, shapes_on_device
from kvjax.protocol.fields import positive_int
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, not_none
from kvjax.registry import classes, resolve, resolve_each, without_text
from pallas_kernels.host import to_device, to_host

_LEAST = 1 << 20  # bytes of a piece if the device is almost full
_SIZES = ("batch", "prompt_slots", "max_new_tokens", "chunk_size")  # the sizes that `memory_needed` takes
_PIECE = 1 << 30  # the most bytes of pinned memory requested at once, because each piece is made on the device


@dataclasses.dataclass(frozen=True)
class Needed:
    """The bytes that a cache needs at least, per device on a mesh.

    Attributes:
        device: bytes of all layers on the device, during or after prefill, whichever is larger.
        host: bytes of all layers in pinned host memory, during or after prefill, whichever is larger.
        staged: further bytes on the device while a prompt is read: hidden states that wait for the next layer, and what a
            pass takes, or the end of a layer's prompt, whichever is larger. A pass takes a layer's keys and values where they
            are offloaded or stored as codes, the row that it takes out of the storage of all rows, and activations. This part
            is an estimate (`kvjax.accounting.temporaries`).
        weights: bytes of the parameters on the device; 0 if none were given.
        after: the part of `device` that the cache still takes after prefill.
        beyond: tokens of prompt and answer past the model's positions, which `kvjax.prefill` refuses; 0 if all fit.
    """

    device: int
    host: int
    staged: int
    weights: int = 0
    after: int = 0
    beyond: int = 0

    @property
    def peak(self) -> int:
        """The bytes on the device at the peak, without weights."""
        return self.device + self.staged

    @property
    def brief(self) -> str:
        """The bytes of the cache in words: on the device, and in host memory if there are any."""
        return gib(self.device) + (f" and {gib(self.host)} of host memory" if self.host else "")

    def __str__(self) -> str:
        after = f" at the peak ({gib(self.after)} after the prompt)" if self.after < self.device else ""
        device = f"{gib(self.device)} of device memory{after} and {gib(self.staged)} besides while the prompt is read"
        weights = f", {gib(self.weights)} of weights" if self.weights else ""
        beyond = f"; {self.beyond} tokens are beyond the model's positions: add YaRN to its config" if self.beyond else ""
        return f"{device}, {gib(self.host)} of host memory{weights}{beyond}"


@in_32_bits
def memory_needed(
    method: Method | str | Sequence[Method | str],
    config: Model,
    *,
    batch: int,
    prompt_slots: int,
    max_new_tokens: int,
    chunk_size: int = 8192,
    mesh: Mesh | AbstractMesh | None = None,
    kv_dtype: str | None = None,
    share_storage: bool = False,
    params: Any = None,
    order: By | None = None,
) -> Needed:
    """Compute from shapes alone the memory that prefill and decode need; printed, the result says the peak and what remains.

    Without ``params`` no activations count but those of attention, and no second reading of a prompt. No method needs a
    tokenizer here.

    Args:
        method: any method, or its name; or several in a list, whose caches exist together (`kvjax.prefill_each`).
        config: the model's description.
        batch: rows.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        chunk_size: as in `kvjax.prefill`.
        mesh: the devices over which the parameters are spread; None means one device.
        kv_dtype: as in `kvjax.prefill`.
        share_storage: as in `kvjax.prefill_each`; what several caches share counts once.
        params: the parameters, or their shapes (`models.param_shapes`), if they are to be counted too.
        order: as in `kvjax.prefill`.

    Raises:
        TypeError: ``mesh`` is no mesh.
        ValueError: an unknown name, a size below 1, or a ``kv_dtype`` on which the method cannot run. Or a mesh with other
            axes than ``data``, ``model`` and ``slots``, or over which the model or the rows cannot be divided.
    """
    check_model(config)
    each = method if isinstance(method, Sequence) and not isinstance(method, str) else [method]
    methods = [without_text(one, config.vocab_size) for one in resolve_each(cast("Any", each), prompt_slots)]
    sizes = {"batch": batch, "prompt_slots": prompt_slots, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size}
    needed = needed_together(needed_each(methods, config, mesh, kv_dtype, sizes, share_storage, params, order))
    beyond = prompt_slots + max_new_tokens - config.max_position_embeddings
    beyond = 0 if all(has_no_limit(method, config) for method in methods) else max(beyond, 0)
    return dataclasses.replace(needed, weights=bytes_on_device(params), beyond=beyond)


def needed_together(each: Sequence[Phases]) -> Needed:
    """Add up what caches need that exist together. Their layers are staged one after the other."""
    reading, after = add_parts(x.reading for x in each), add_parts(x.after for x in each)
    device, host = max(reading.alone, after.alone), max(reading.host, after.host)
    staged = reading.alone + max(x.staged for x in each) - device  # some of it where layers wait in host memory meanwhile
    return Needed(device=device, host=host, staged=max(staged, 0), after=after.alone)


def needed_each(
    every: Sequence[Method],
    config: Model,
    mesh: Mesh | AbstractMesh | None,
    kv_dtype: str | None,
    sizes: dict[str, int],
    share: bool,
    params: Any = None,
    order: By | None = None,
) -> list[Phases]:
    """Compute what each method needs when all methods share one prefill; arguments as in `memory_needed`.

    Args:
        every: the methods.
        config: the model's description.
        mesh: the devices; None means one device.
        kv_dtype: dtype of the stored keys and values.
        sizes: the sizes that `memory_needed` takes, by their names.
        share: whether the methods may share storage.
        params: the parameters, or their shapes.
        order: of layers and chunks.
    """
    batch, prompt_slots, max_new_tokens, chunk_size = (positive_int(name, sizes[name]) for name in _SIZES)
    for method in every:
        check_sizes(method, config)
    check_order(order, every, config, prompt_slots)
    check_kv_dtype(kv_dtype)
    parts = 1
    check_axes(mesh)
    if mesh is not None:
        plan = Plan(mesh=cast("Mesh", mesh))
        plan.check_rows(batch)
        batch, config, parts = batch // plan.groups, plan.part(config), plan.parts
    each = [layer_methods(method, config) for method in every]
    given = {"max_new_tokens": max_new_tokens, "parts": parts, "kv_dtype": kv_dtype}
    chosen = chosen_order(every, each, config, batch, prompt_slots, **given, chunk_size=chunk_size, order=order, mesh=mesh)
    whole = mesh is not None and plan_of(params) is None  # shapes of a model that nobody has spread over the mesh
    reading = Reading(config, chosen, batch, tuple(given.values()), mesh, None if whole else shapes_on_device(params))
    shares = [share and mesh is None and not stored_alone(method, prompt_slots) for method in every]
    return [reading.phases(*one) for one in zip(every, each, shares, strict=True)]


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
    mesh: Mesh | AbstractMesh | None = None,
    kv_dtype: str | None = None,
) -> float:
    """Find the smallest ``offload`` with which a cache fits the device. A layer decodes faster if it stays on the device.

    Call it when the parameters are on the device, for example: ``ParisKV(offload=offload_share("pariskv", config, batch=1,
    prompt_slots=393216, max_new_tokens=256))``.

    Args:
        method: a method with a field ``offload``, whose value does not matter; or its name. Or a wrapper around such a
            method: the share is then for the field of the inner method.
        config: the model's description.
        batch: rows.
        prompt_slots: tokens of the padded prompt.
        max_new_tokens: tokens that may follow.
        chunk_size: as in `kvjax.prefill`.
        device_bytes: bytes of a device that the cache may use; None means all that are free now.
        spare: bytes of these to leave for what is not counted.
        mesh: as in `memory_needed`.
        kv_dtype: as in `kvjax.prefill`.

    Returns:
        A share of the layers: 0 if all layers fit, 1 if every layer must be offloaded. ``method.offloaded(share)`` has it.

    Raises:
        ValueError: neither the method nor an inner method has ``offload``, or ``device_bytes`` is None and the device does
            not report free memory.
        MemoryError: the cache does not fit even if all layers are offloaded.
    """
    method = resolve(method, prompt_slots)
    name = type(method).__name__
    if method.offloaded(True) is None:
        known = ", ".join(cls.__name__ for cls in classes().values() if "offload" in cls.__dataclass_fields__)
        raise ValueError(
            f"offload_share: expected a method with a field offload, or a wrapper around one, got {name}; these have the "
            f"field: {known}"
        )
    if device_bytes is None:
        device_bytes = free_bytes(mesh)
    if device_bytes is None:
        raise ValueError("offload_share: this device does not say how much memory is free: pass device_bytes")
    sizes: dict[str, Any] = {
        "batch": batch, "prompt_slots": prompt_slots, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size,
        "kv_dtype": kv_dtype,
    }  # fmt: skip

    def needed(layers: int) -> Needed:
        share = not_none("offloaded", method.offloaded(layers / config.num_layers))
        return memory_needed(share, config, mesh=mesh, **sizes)

    def fits(layers: int) -> bool:
        bytes_of = needed(layers)
        return bytes_of.peak + spare <= device_bytes

    if fits(0):
        return 0.0
    layers = 1 + bisect.bisect_left(range(1, config.num_layers + 1), True, key=fits)
    if layers > config.num_layers:
        raise MemoryError(
            f"{name} with offload=True needs {needed(config.num_layers)}, and {gib(spare)} to spare, got "
            f"{gib(device_bytes)} of device memory; shorten the prompt or take fewer rows"
        )
    return layers / config.num_layers


def free_bytes(mesh: Mesh | AbstractMesh | None = None) -> int | None:
    """Count the bytes of device memory that JAX may still allocate; None if the device does not report them.

    Args:
        mesh: of its devices the one with the fewest free bytes counts; None means the device where JAX puts arrays.
    """
    check_axes(mesh)
    if isinstance(mesh, AbstractMesh):
        return None
    devices = [device_of()] if mesh is None else mesh.local_devices
    every = [device.memory_stats() for device in devices]
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in every if stats and "bytes_limit" in stats]
    return least(mesh, min(free, default=None))


def check_memory(
    methods: Sequence[Method],
    config: Model,
    mesh: Mesh | None,
    kv_dtype: str | None,
    sizes: dict[str, int],
    share: bool = False,
    params: Any = None,
    order: By | None = None,
) -> None:
    """Refuse caches that cannot fit together, and make pinned memory ready.

    It does nothing if the device does not report its memory.

    Args:
        methods: one method, or several that share one prefill.
        config: the model's description.
        mesh: see `memory_needed`.
        kv_dtype: see `memory_needed`.
        sizes: the sizes that `memory_needed` takes, by their names.
        share: ``share_storage`` of `memory_needed`.
        params: the parameters, which are on the device already.
        order: see `memory_needed`.

    Raises:
        MemoryError: there is too little memory. The message has the bytes needed, the bytes available, and remedies.
    """
    free = free_bytes(mesh)
    if free is None:
        return
    given = methods, config, mesh, kv_dtype, sizes
    each = needed_each(*given, False, params, order)
    needed = needed_together(needed_each(*given, share, params, order) if share else each)
    names = [type(method).__name__ for method in methods]
    where = "" if mesh is None else f" on each of {mesh.size} devices"
    said, fewer = f"{names[0]}{where} needs {needed}", ""
    if len(methods) > 1:
        alone = "; ".join(f"{name} {needed_together([one]).brief}" for name, one in zip(names, each, strict=True))
        said = f"{len(methods)} methods that share one prefill{where} need {needed} ({alone})"
        fewer = "prefill fewer methods at once, "
    if needed.peak > free:
        raise MemoryError(
            f"{said}, got {gib(free)} of free device memory; {fewer}shorten the prompt, take fewer "
            "rows, offload more of the layers if some stay (kvjax.offload_share), or give JAX more of the device "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION, set before jax is imported)"
        )
    devices = 1 if mesh is None else len(mesh.local_devices)  # they share the memory of their host
    got = not_none("got", least(mesh, pin_host(needed.host * devices, free // 4) // devices))
    if got < needed.host:
        raise MemoryError(
            f"{said}, got {gib(got)} of pinned host memory; {fewer}shorten the prompt, take fewer "
            "rows, offload no more layers than must be (kvjax.offload_share), or raise the pool's limit "
            "(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 by default, set before jax is imported)"
        )


def pin_host(size: int, free: int = _PIECE) -> int:
    """Allocate up to ``size`` bytes of pinned host memory, free them, and return how many bytes were allocated.

    They go back to JAX's pool, which keeps them pinned. Pinning takes most of a second per GiB; later allocations from the
    pool cost nothing.

    Args:
        size: bytes.
        free: bytes of device memory that may be used for a moment.
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
    """Measure bytes per second from pinned host memory to the device: the best of ``repeats`` copies of ``size`` bytes."""
    there = jax.block_until_ready(jax.jit(lambda: to_host(jnp.zeros((size,), jnp.uint8)))())
    copy = jax.jit(to_device)
    spans = []
    for _ in range(repeats + 1):  # the first repeat compiles
        begun = time.perf_counter()
        jax.block_until_ready(copy(there))
        spans.append(time.perf_counter() - begun)
    return size / min(spans[1:])
