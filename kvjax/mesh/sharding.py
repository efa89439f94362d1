"""How parameters are spread over devices, derived from their shardings: the mesh, and the part of each device.

A mesh has up to three axes. Along ``data`` every device has different rows of the batch. Along ``model`` every device has
different KV heads, with the columns of the weights that belong to these heads. Along ``slots`` every device has different
slots of each row, and equal weights. `kvjax.api.shard_map` runs the programs.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.mesh import processes
from kvjax.protocol.describe import at_once, is_known
from kvjax.protocol.typing import Model
from pallas_kernels.axes import DATA, MODEL, NAMES, SLOTS, check_names


@dataclasses.dataclass(frozen=True)
class Plan:
    """The mesh of a run, and how its parameters are split.

    Attributes:
        mesh: has the axes ``data``, ``model`` and ``slots``, or some of them.
        params: the split of each parameter, in the order of ``jax.tree.leaves``.
    """

    mesh: Mesh
    params: tuple[PartitionSpec, ...] = ()

    @property
    def shards(self) -> int:
        """The number of devices that share the KV heads of a row."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def groups(self) -> int:
        """The number of parts into which the rows of a batch are divided."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def parts(self) -> int:
        """The number of devices over which the slots of a row are divided."""
        return self.mesh.shape.get(SLOTS, 1)

    @property
    def row(self) -> PartitionSpec:
        """The split of an array with axis B first."""
        return PartitionSpec(DATA) if self.groups > 1 else PartitionSpec()

    def part(self, model: Model) -> Model:
        """Return the description of one device's part of ``model``.

        Raises:
            ValueError: the model has no method ``local``, or cannot be divided over ``shards`` devices.
        """
        if self.shards == 1:
            return model
        if getattr(model, "local", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no method local(devices), which returns the description of one device's part; "
                f"without it the model cannot run over the {self.shards} devices of the mesh's axis {MODEL!r}"
            )
        return cast("Any", model).local(self.shards)

    def check_rows(self, batch: int) -> None:
        """Refuse a number of rows that cannot be divided equally."""
        if batch % self.groups:
            raise ValueError(
                f"the rows of a batch must be a multiple of the {self.groups} devices of the mesh's axis {DATA!r}, "
                f"got {batch} rows"
            )

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.mesh.shape.items())


def device_of(params: Any = None) -> Any:
    """Return the `jax.Device` of parameters, this process's first one of several; of None the one where JAX puts arrays."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and is_known(x)]  # none may be under `vmap`
    with at_once():
        return (arrays or [jax.device_put(0)])[0].addressable_shards[0].device


def check_axes(mesh: Mesh | AbstractMesh | None) -> None:
    """Refuse a mesh on which no plan's parameters can be; None is one device.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has other axes than ``data``, ``model`` and ``slots``.
    """
    if mesh is None:
        return
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}")
    check_names(mesh.axis_names)


def place_rows[X: Array | None](plan: Plan | None, *arrays: X) -> tuple[X, ...]:
    """Place each device's rows of arrays with axis B first on the device; without a plan do nothing. None stays None.

    Raises:
        ValueError: the rows cannot be divided equally. Or, with several processes, a process has no device of the mesh, or
            the processes pass different arrays.
    """
    if plan is None:
        return arrays
    for x in arrays:
        if x is not None:
            plan.check_rows(x.shape[0])
    sharding = NamedSharding(plan.mesh, plan.row)
    if not plan.mesh.is_multi_process or not is_known(arrays):
        return jax.device_put(arrays, sharding)
    processes.check_present(plan.mesh)
    processes.check_same(plan.mesh, arrays)
    return tuple(x if x is None else processes.put(x, sharding) for x in arrays)


def readable[X](plan: Plan | None, tree: X) -> X:
    """Run `kvjax.mesh.processes.readable` for arrays on the devices of a plan."""
    return tree if plan is None else processes.readable(plan.mesh, tree)


def on_each(mesh: Mesh | AbstractMesh, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run`` so that each device of a mesh runs it with the same arguments, to find the shapes of a device's result."""
    return jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def bytes_on_device(tree: Any) -> int:
    """Count the bytes on a device of the arrays or shapes of ``tree``; shapes without a sharding count whole."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes_on_device(tree)))


def shapes_on_device(tree: Any) -> Any:
    """Return the shapes on a device of the arrays or shapes of ``tree``; those without a sharding are whole."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(one, tree)


def plan_of(params: Any) -> Plan | None:
    """Derive the plan of parameters that are spread over a mesh with the axes ``data``, ``model`` and ``slots``, else None.

    Parameters on one device have no plan, unless they are on a mesh with Explicit axes: there JAX runs the program inside
    `jax.shard_map` alone. Parameters on a mesh with other axes have none either: if the axes are Auto, XLA's partitioner
    divides the programs. It cannot divide kernels, so on GPUs and TPUs such a mesh is refused: every step would
    gather the whole cache on each device, or would not compile.

    Args:
        params: a tree of arrays, or of `jax.ShapeDtypeStruct`; tracers have no plan.

    Raises:
        ValueError: the parameters are not all on one mesh, or are not split as the axes say; or the mesh has other axes of
            type Explicit, or they are tracers.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    if any(isinstance(x, Tracer) and any(jax.typeof(x).sharding.spec) for _, x in named):  # which only Explicit axes show
        raise ValueError(
            "parameters on a mesh with Explicit axes must be closed over by a function that is compiled, got them as its "
            "argument; for derivatives and for arguments make the mesh with Auto axes"
        )
    shardings = [x.sharding if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and is_known(x) else None for _, x in named]
    spread = [x for x in shardings if x is not None and (x.num_devices > 1 or _is_explicit(x))]
    if not spread:
        return None
    first = spread[0]
    if not isinstance(first, NamedSharding) or not NAMES.issuperset(first.mesh.axis_names):
        if first.num_devices > 1 and (platform := next(iter(first.device_set)).platform) in ("gpu", "tpu"):
            raise ValueError(
                f"parameters on several {platform.upper()}s must be on a mesh with the axes {DATA!r}, {MODEL!r} and "
                f"{SLOTS!r} (see models.sharding.shard_params), got {first}; XLA's partitioner cannot divide kernels"
            )
        if _is_explicit(first):
            raise ValueError(
                f"parameters on a mesh with Explicit axes must be on one with the axes {DATA!r}, {MODEL!r} and {SLOTS!r} "
                f"(see models.sharding.shard_params), or have Auto axes, got the axes {cast('Any', first).mesh.axis_names}"
            )
        return None
    mesh, specs = cast("Mesh", first.mesh), []
    for (path, _), sharding in zip(named, shardings, strict=True):
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise ValueError(
                f"all parameters must be on the mesh {_shape(mesh)}, got {jax.tree_util.keystr(path)} on {sharding}"
            )
        specs.append(sharding.spec)
    used = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    if {DATA, SLOTS} & used or (MODEL not in used and mesh.shape.get(MODEL, 1) > 1):
        got = ", ".join(map(repr, sorted(used - {None}))) or "no axis"
        raise ValueError(
            f"parameters must be split along {MODEL!r} and only there, as models.sharding.shard_params does it, "
            f"got parameters that are split along {got} of the mesh {_shape(mesh)}"
        )
    return Plan(mesh=mesh, params=tuple(specs))


def _is_explicit(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def check_plan(params: Any, plan: Plan | None) -> None:
    """Refuse parameters whose plan differs from the ``plan`` of a cache; tracers are not checked.

    Raises:
        ValueError: the parameters are on other devices than the cache, or are split in another way.
    """
    if not is_known(params):
        return
    if (got := plan_of(params)) != plan:
        expected, place = ("one device" if x is None else f"the mesh {x}" for x in (plan, got))
        if plan is not None and got is not None and expected == place:
            if plan.mesh == got.mesh:
                apart = [pair for pair in itertools.zip_longest(plan.params, got.params) if pair[0] != pair[1]]
                raise ValueError(
                    f"the parameters on {place} are split in another way than when they made this cache: {len(apart)} of "
                    f"them, the first one by {apart[0][1]}, expected {apart[0][0]}"
                )
            types_differ = plan.mesh.axis_types != got.mesh.axis_types
            differ = "meshes of different axis types" if types_differ else "different devices, or in a different device order"
            expected, place = (f"{x} with axes {y.mesh.axis_types}" for x, y in ((expected, plan), (place, got)))
            raise ValueError(f"cache and parameters are on {differ}: {expected} and {place}")
        raise ValueError(f"this cache is on {expected}, and the parameters are on {place}: both must be on the same devices")


def _shape(mesh: Mesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
