#!/usr/bin/env bash
# jnp.asarray(x) and jnp.asarray(x, x.dtype) lie on different devices' shardings under jax.set_mesh
#
# One would guess: naming the dtype that a NumPy array has anyway changes nothing.
# What happens (JAX 0.12.0.1, CPU): under `jax.set_mesh` with an axis of type Explicit, jnp.asarray(x) and jnp.zeros give an array
# on the mesh, whose type names the mesh; jnp.asarray(x, x.dtype) and jax.device_put(x) give one on a single device, whose type
# names no mesh. dynamic_update_slice of the second into an array of zeros then raises ShardingTypeError; addition of the two does
# not.
# Source: seen. JAX's page "Explicit sharding" says that arrays made under a mesh have it in their type, not which calls make such.
# Why it matters to a KV cache: a cache begins as zeros and is filled by dynamic_update_slice of tokens that come from NumPy. A
# conversion to int32 on the way then breaks prefill, but only for users who set a mesh.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
"$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

tokens = np.ones((2, 3), np.int32)
with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))):
    cache = jnp.zeros((2, 8), jnp.int32)
    plain, named, placed = jnp.asarray(tokens), jnp.asarray(tokens, jnp.int32), jax.device_put(tokens)
    on_mesh = [isinstance(x.sharding, NamedSharding) for x in (cache, plain, named, placed)]
    print("jax", jax.__version__, "on the mesh: zeros, asarray(x), asarray(x, dtype), device_put(x):", on_mesh)
    assert on_mesh == [True, True, False, False], on_mesh
    written = []
    for x in (plain, named, placed):
        cache[:, :3] + x  # raises for none of them
        try:
            lax.dynamic_update_slice_in_dim(cache, x, 0, 1)
            written.append(True)
        except Exception as error:
            assert type(error).__name__ == "ShardingTypeError", error
            written.append(False)
    print("written into zeros:", written)
    assert written == [True, False, False], written
PY
