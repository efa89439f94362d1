#!/usr/bin/env bash
# JAX: behind `jax.jit`, `jax.checkpoint` or a loop the rule of a `custom_jvp` runs after the `with` block around its call has
# ended, and so the value changes with the derivative
#
# One would guess: what a context manager inside a function sets holds for the calls in it, differentiated or not.
# What happens (JAX 0.12.0.1): the block is open while `jax.jit`, `jax.checkpoint` or `jax.lax.map` trace the function. The
# derivative of what they traced is made afterwards, and with it the rule is called, which computes the value, too. A function
# that scales 2 by a context's 3 has the value 6; `jax.jvp` of it gives 6 and 3, and of the same function under `jit`,
# `checkpoint` or `map` 2 and 1. `jit` around the derivative gives 6 and 3 again. Nothing is said.
# Source: seen; JAX's tutorial on custom derivatives speaks of Python control flow in rules, not of contexts.
# Why it matters to a KV cache: attention takes a model's soft cap, a mesh or its kernels from a context and has rules of its
# own for derivatives, and layers and chunks of a prompt run in loops. Hand such values to the function as arguments.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import contextlib
import contextvars

import jax
import jax.numpy as jnp

FACTOR = contextvars.ContextVar("factor", default=1.0)


@contextlib.contextmanager
def factor(value):
    token = FACTOR.set(value)
    try:
        yield
    finally:
        FACTOR.reset(token)


@jax.custom_jvp
def scale(x):
    return FACTOR.get() * x


@scale.defjvp
def _(primals, tangents):
    return FACTOR.get() * primals[0], FACTOR.get() * tangents[0]


def plain(x):
    with factor(3.0):
        return scale(x)


def slope(f):
    return [float(x) for x in jax.jvp(f, (2.0,), (1.0,))]


ways = {
    "plain": plain,
    "jit": jax.jit(plain),
    "checkpoint": jax.checkpoint(plain),
    "map": lambda x: jax.lax.map(plain, jnp.stack([x])).sum(),
}
seen = {name: (float(f(2.0)), *slope(f)) for name, f in ways.items()}
inside = jax.jit(lambda x: jax.jvp(plain, (x,), (1.0,)))(2.0)
seen["jit around it"] = (float(plain(2.0)), *map(float, inside))
print("jax", jax.__version__, "(value; value and slope by jvp):", seen)
late = (6.0, 2.0, 1.0)
assert seen == {"plain": (6.0, 6.0, 3.0), "jit": late, "checkpoint": late, "map": late, "jit around it": (6.0, 6.0, 3.0)}, seen
PY
