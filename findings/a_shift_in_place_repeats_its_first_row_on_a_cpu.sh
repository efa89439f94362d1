#!/usr/bin/env bash
# jax.jit: rows of an array that are moved down by one become copies of the first row, on a CPU
#
# One would guess: `dynamic_update_slice(x, x[:-1], (1, 0))` reads its operand before it writes, as all of JAX does, compiled or not.
# What happens (JAX 0.12.0.1, CPU): the compiled program updates in place, element after element, and reads what it has just
# written. The first row is repeated through the array, without an error. It takes a temporary that may be overwritten, and a
# reshape behind the update: without jit, and without the reshape, the result is right.
# Source: seen; reported upstream as openxla/xla#49176.
# Why it matters to a KV cache: what an eviction keeps is moved within the storage, by slices that overlap with where they were, and
# a reshape from pages to slots follows. A lossy method with wrong keys looks like a lossy method.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax import lax


def moved(shape):
    def move(cache):
        cache = cache + 1  # a temporary
        cache = lax.dynamic_update_slice(cache, cache[:3], (1, 0, 0))
        return cache if shape is None else cache.reshape(shape)

    return move


cache = jnp.arange(4).reshape(4, 1, 1)
with jax.disable_jit():
    right = moved((1, 4, 1))(cache).ravel().tolist()
jitted = jax.jit(moved((1, 4, 1)))(cache).ravel().tolist()
plain = jax.jit(moved(None))(cache).ravel().tolist()
print("jax", jax.__version__, "without jit:", right, "jitted:", jitted, "jitted without the reshape:", plain)
assert right == plain == [1, 1, 2, 3], (right, plain)
assert jitted == [1, 1, 1, 1], jitted
PY
