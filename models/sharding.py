"""Where parameters are on a mesh of devices: what reads the residual stream is split by columns, what writes into it by rows.

So a device computes its KV heads and its part of F from the whole stream, and what it adds to the stream is summed with what
the others add. The tables of the vocabulary are split by rows. All else (norms, the router) is on every device. Only the axis
"model" splits parameters; along "data" they are replicated.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MODEL = "model"

_SPLIT = {  # the dimension that is split, from the end: gate_up and down may have a leading axis of experts
    "qkv/kernel": -1,
    "qkv/bias": -1,
    "out/kernel": -2,
    "gate_up/kernel": -1,
    "down/kernel": -2,
    "embed/embedding": -2,
    "lm_head/embedding": -2,
}


def param_spec(path: str, ndim: int) -> PartitionSpec:
    """How the parameter at ``path`` ('a/b/c') of ``ndim`` dimensions is split: one dimension over "model", or none."""
    dim = _SPLIT.get("/".join(path.split("/")[-2:]))
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*(MODEL if i == ndim + dim else None for i in range(ndim)))


def param_specs(params: Any) -> Any:
    """A tree like ``params`` (arrays, or their shapes) with a `jax.sharding.PartitionSpec` at each leaf; see `param_spec`."""
    return jax.tree.map_with_path(lambda path, leaf: param_spec("/".join(key.key for key in path), leaf.ndim), params)


def param_sharding(path: str, ndim: int, mesh: Mesh) -> NamedSharding:
    """The sharding of the parameter at ``path`` on ``mesh``; on a mesh without the axis "model" nothing is split."""
    return NamedSharding(mesh, param_spec(path, ndim) if MODEL in mesh.axis_names else PartitionSpec())


def shard_params(params: Any, mesh: Mesh) -> Any:
    """The parameters, moved to ``mesh``. They are whole somewhere before; `from_pretrained` with a mesh does without."""
    specs = jax.tree.map_with_path(
        lambda path, leaf: param_sharding("/".join(key.key for key in path), leaf.ndim, mesh), params
    )
    return jax.device_put(params, specs)
