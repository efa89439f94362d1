#!/usr/bin/env bash
# Pallas Mosaic GPU: after jnp.where(condition, constant, integers) int32 is compared as if it had no sign
#
# One would guess: `jnp.where(x > 5, 0, x) < 1` and `jnp.where(x <= 5, x, 0) < 1` are the same for int32 x.
# What happens (JAX 0.11.2 and 0.12.0.1, lowering semantics Lane): the constant is a "splat", so the select is done in the layout of the
# condition and inherits the condition's sign, which a truth value does not have. The first array counts as unsigned from there
# on: < and maximum are unsigned, and negative numbers are the largest. Only a `lax.cond` whose branches then differ in the sign
# fails, with a bare AssertionError.
# Source: seen in lowering; the page of Pallas' Mosaic GPU back end does not mention signs.
# Why it matters to a KV cache: -1 marks empty slots, and searches compare int32 keys of negative scores: a top-k kernel is wrong
# for negative scores alone.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
signs = []


@plgpu.inline_mgpu(arg_types=(LAYOUT,))
def note(ctx, x):
    signs.append(x.is_signed)


def body(x_ref, out_ref):
    x = plgpu.load(x_ref, layout=LAYOUT, optimized=False)
    note(jnp.where(x > 5, 0, x))
    note(jnp.where(x <= 5, x, 0))
    out_ref[...] = x


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
    grid=(1,),
    grid_names=("x",),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
)
device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
    jax.jit(kernel).trace(jax.ShapeDtypeStruct((128,), jnp.int32)).lower(lowering_platforms=("cuda",))
print("jax", jax.__version__, "signed: constant first", signs[0], "constant last", signs[1])
assert signs[:2] == [False, True], signs
PY
