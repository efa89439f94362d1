"""Full attention under other frequencies of RoPE, for texts longer than in training: the base class of `NTK` and `PI`."""

import abc
import dataclasses
from typing import Any

from jax import Array

from kvjax.cache import LayerSpec
from kvjax.methods.full import Full
from kvjax.protocol.fields import known
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.typing import pytree, traced

_FULL = Full()


@pytree
class Stretched(LayerMethod):
    """Every token stays and every query attends to all, as under `Full`. Write ``divisors``.

    The divisors apply on top of a rule that the model has itself, if that rule does not change with the length. Where it does
    (dynamic NTK, longrope), the model keeps the frequencies for short texts.

    The factor holds for every text. A text that fits the model's window needs 1, which changes nothing; a larger factor costs
    answers there. `kvjax eval` takes 1 within the window, and beyond it the length over the window. With a factor of 1 it can
    share its prefill with other methods (`kvjax.prefill_each`), unless the model's own frequencies change with the length.
    """

    factor: float | Array = traced("longest text over the text that the model was trained for", default=4.0, least=1)

    extrapolates = True
    lacks = ()
    common_prompt = True  # several methods share a prefill only where `dense_prompt` holds: then it stores what Full stores

    @property
    def dense_prompt(self) -> bool:
        """Whether the factor is known to be 1: then this is Full, and other methods can share its prefill."""
        factor = known(self.factor)
        return factor is not None and bool((factor == 1).all())

    @abc.abstractmethod
    def divisors(self, pairs: int) -> Array:
        """Compute what the frequency of each rotated pair is divided by: float32 [D/2], for ``pairs`` = D/2."""

    def init(self, spec: LayerSpec) -> Any:
        return _FULL.init(spec)

    def attend(self, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        return _FULL.attend(state, self._stretched(inputs))

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        return _FULL.finish(state, spec)

    def chosen(self, state: Any, inputs: Inputs) -> Array:
        return _FULL.chosen(state, self._stretched(inputs))

    def cost(self, state: Any, shared: Any) -> Cost:
        return _FULL.cost(state, shared)

    def room(self, state: Any) -> Array | None:
        return _FULL.room(state)

    def max_tokens(self, in_prompt: bool) -> int | None:
        return _FULL.max_tokens(in_prompt)

    def _stretched(self, inputs: Inputs) -> Inputs:
        return dataclasses.replace(inputs, inv_freq=inputs.inv_freq / self.divisors(inputs.inv_freq.shape[0]))
