"""The jitted token loop that is timed: compiled for a filled cache, and run again and again on its own result."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from experiments.speed.filled_cache import filled_cache
from kvjax.api import shard_map
from kvjax.decoding.layers import fingerprint
from kvjax.decoding.sampling import Sampler
from kvjax.mesh.sharding import place_rows, plan_of
from kvjax.protocol.method import Method
from models import ModelConfig


def compiled(run: Callable[..., Any], *args: Any, **jit: Any) -> tuple[Compiled, float]:
    """Compile a program for its arguments, with the arguments ``jit`` of `jax.jit`; return the seconds that it took, too."""
    begun = time.perf_counter()
    return jax.jit(run, **jit).lower(*args).compile(), time.perf_counter() - begun


class TokenLoop:
    """Decode steps of one method on a cache of random keys and values.

    Args:
        params: parameters of the model; the loop runs on their devices.
        model: sizes.
        method: the method under which tokens are decoded.
        length: tokens stored.
        batch: rows.
        steps: tokens of a run.
        room: tokens that may follow the prompt, of all runs together.
        kv_dtype: dtype of the stored keys and values.

    Attributes:
        program: the compiled loop.
        compile_seconds: seconds until the loop was ready.
        cache: the cache as the last run left it.
        plan: the devices, or None for one device.
    """

    def __init__(
        self,
        params: Any,
        model: ModelConfig,
        method: Method,
        *,
        length: int,
        batch: int,
        steps: int,
        room: int,
        kv_dtype: str | None = None,
    ) -> None:
        self.plan, self._params, self._steps = plan_of(params), params, steps
        sizes = {"length": length, "batch": batch, "max_new_tokens": room, "kv_dtype": kv_dtype}
        self.cache = filled_cache(method, model, weights=fingerprint(params), plan=self.plan, **sizes)
        done = place_rows(self.plan, jnp.zeros((batch,), bool))
        self._rest = (Sampler(), None, jnp.zeros((0,), jnp.int32), *done)
        loop = functools.partial(shard_map.decode, steps=steps, stop_early=False)
        self.program, self.compile_seconds = compiled(loop, params, self.cache, *self._rest, donate_argnums=1)

    def run(self) -> float:
        """Measure the seconds per token of one more run.

        Raises:
            FloatingPointError: logits were not finite.
        """
        begun = time.perf_counter()
        end = jax.block_until_ready(self.program(self._params, self.cache, *self._rest))
        seconds = (time.perf_counter() - begun) / self._steps
        self.cache = end.cache
        if (end.bad_step >= 0).any():
            raise FloatingPointError("logits were not finite")
        return seconds
