#!/usr/bin/env bash
# donate_argnames names an argument that arrives by position through *args: nothing is donated, and nothing is said
#
# One would guess: `jax.jit(f, donate_argnames="cache")` donates the cache however it is passed, or complains that f has no such
# argument, as it does for `def f(params, kv)`.
# What happens (JAX 0.12.0.1, CPU): if f is `def f(*args, **kwargs)`, any name is accepted, because **kwargs could hold it. A cache
# that comes by position is then not donated: the program has no alias, the old array stays alive, and there is no warning. The same
# f with `functools.wraps(step)` donates, because JAX reads the signature of what is wrapped.
# Source: seen; JAX's page on buffer donation speaks of positional and keyword arguments, not of *args.
# Why it matters to a KV cache: a decorator without `wraps` around a decode step keeps two caches in memory and copies one a token.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax==0.12.0.1" "jaxlib==0.12.0.1"
"$folder/venv/bin/python" - <<'PY'
import functools
import warnings

import jax
import jax.numpy as jnp

warnings.simplefilter("error")


def step(params, cache):
    return cache + params


def behind(*args, **kwargs):
    return step(*args, **kwargs)


@functools.wraps(step)
def wrapped(*args, **kwargs):
    return step(*args, **kwargs)


def donated(function, by_name=False):
    cache = jnp.zeros(4096)
    program = jax.jit(function, donate_argnames="cache")
    program(jnp.ones(()), cache=cache) if by_name else program(jnp.ones(()), cache)
    return cache.is_deleted()


seen = {"step": donated(step), "behind": donated(behind), "behind, with functools.wraps": donated(wrapped)}
seen["behind, cache by name"] = donated(behind, by_name=True)
print(f"JAX {jax.__version__}: donated: {seen}")
expected = {"step": True, "behind": False, "behind, with functools.wraps": True, "behind, cache by name": True}
raise SystemExit(0 if seen == expected else f"changed: expected {expected}")
PY
