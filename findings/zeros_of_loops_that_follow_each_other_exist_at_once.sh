#!/usr/bin/env bash
# jax.jit: arrays of zeros that loops fill one after the other are all in memory at once
#
# One would guess: a program that makes an array of zeros, fills it in a loop, reduces it to a number, and does so again eight
# times needs memory for one array, because no two of them are alive together.
# What happens (JAX 0.12.0.1, CPU; the same in programs compiled for an H100): equal constants are one constant, of which every
# loop gets a copy of its own, and the copies are made at the start of the program. So all eight are in memory. An
# optimization_barrier that orders loop and zeros brings it to two. Zeros that are computed from the result of the loop before
# take one.
# Source: seen, by the program's own memory_analysis.
# Why it matters to a KV cache: a prompt is read layer by layer so that the keys of one layer exist at a time. The storage of each
# layer begins as zeros, and the memory of all layers was back.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax import lax

SLOTS, LAYERS = 1 << 22, 8


def layers(zeros):
    def run(x):
        for _ in range(LAYERS):
            x, cache = zeros(x)
            write = lambda i, cache, x=x: lax.dynamic_update_slice(cache, jnp.full(16, x + i), (i * 16,))
            x = x + jnp.sum(lax.fori_loop(0, 64, write, cache)[:1024])
        return x

    return run


KINDS = {
    "plain": lambda x: (x, jnp.zeros(SLOTS)),
    "behind a barrier": lambda x: lax.optimization_barrier((x, jnp.zeros(SLOTS))),
    "computed from the loop before": lambda x: (x, jnp.full(SLOTS, jnp.where(x == x, 0.0, 1.0))),
}
arrays = {}
for kind, zeros in KINDS.items():
    memory = jax.jit(layers(zeros)).lower(jnp.float32(1)).compile().memory_analysis()
    arrays[kind] = round(memory.temp_size_in_bytes / (4 * SLOTS), 1)
print("jax", jax.__version__, "arrays in memory:", arrays)
assert list(arrays.values()) == [8.0, 2.0, 1.0], arrays
PY
