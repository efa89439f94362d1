#!/usr/bin/env bash
# Pallas Triton, interpreted: a masked store writes its hidden lanes, too, with what stood there before
#
# One would guess: a lane of `plt.store(ref.at[index], x, mask=...)` whose mask is False touches nothing, interpreted as on a GPU.
# What happens (JAX 0.12.0.1): the interpreter reads the old values at all indices, replaces those of the shown lanes, and writes
# all of them. If a hidden lane has the index of a shown one, the old value is written over the new one. A kernel that hides
# lanes by the mask alone, and leaves their index where it is or clamps it, is right on a GPU and wrong interpreted.
# Source: seen; no page of JAX says how the interpreter treats a mask.
# Why it matters to a KV cache: kernels that append, evict or compact clamp the slots of hidden rows into the cache, where they meet
# the slot that is written. Tests without a card then fail for a right kernel.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def run(hidden_index):
    def store(token_ref, cache_ref):
        lane = jnp.arange(4)
        shown = lane % 2 == 0
        cache_ref[...] = jnp.zeros(4)
        plt.store(cache_ref.at[jnp.where(shown, lane // 2, hidden_index(lane))], token_ref[...], mask=shown)

    tokens = jnp.arange(1.0, 5.0)
    return pl.pallas_call(store, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)(tokens).tolist()


shared, apart = run(lambda lane: lane // 2), run(lambda lane: 3)
print("jax", jax.__version__, "hidden lanes at the index of a shown one:", shared, "elsewhere:", apart)
assert apart == [1.0, 3.0, 0.0, 0.0], apart
assert shared == [0.0, 0.0, 0.0, 0.0], shared
PY
