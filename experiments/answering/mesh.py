"""The devices of a command's ``--mesh``: the axes that its text names, and JAX's mesh with these axes."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from pallas_kernels.axes import DATA, MODEL, SLOTS

_AXES = (DATA, MODEL, SLOTS)


def mesh_axes(text: str | None) -> dict[str, int]:
    """Parse the sizes of the axes in a text such as "data=2,model=4", by name; no axes if there is no text.

    The result always has the axes data and model. It has the axis slots, which few methods can use, if the text names it.
    """
    if text is None:
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"a mesh is written {DATA}=2,{MODEL}=4, got {text!r}")
        if name not in _AXES:
            raise ValueError(f"the axes of a mesh are {', '.join(_AXES[:-1])} and {_AXES[-1]}, got {name!r} in {text!r}")
        if name in sizes:
            raise ValueError(f"a mesh has each axis once, got {name!r} twice in {text!r}")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"the size of an axis must be a whole number of at least 1, got {size!r} for {name!r}")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in _AXES if name in sizes or name != SLOTS}


def mesh_text(axes: Mapping[str, int]) -> str | None:
    """Write the axes' sizes as text, for records; None if there are no axes."""
    return ",".join(f"{name}={size}" for name, size in axes.items()) or None


def make_mesh(text: str | None) -> Mesh | None:
    """Make the mesh that a text describes, of the first devices; None if there is no text.

    Raises:
        ValueError: see `mesh_axes`; or the mesh needs more devices than there are.
    """
    axes = mesh_axes(text)
    if not axes:
        return None
    needed, devices = math.prod(axes.values()), jax.devices()
    if needed > len(devices):
        raise ValueError(f"a mesh of {mesh_text(axes)} needs {needed} devices, got {len(devices)} ({devices[0].device_kind})")
    # With Explicit axes, code that reads a row of a result would have to name the row's sharding.
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices[:needed])


def groups_of(mesh: Mesh | None) -> int:
    """Count the parts into which a mesh divides the rows of a batch; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape.get(DATA, 1)


def equal_rows(rows: int, groups: int) -> int:
    """Round a number of rows up to a multiple of ``groups``."""
    return -(-rows // groups) * groups
