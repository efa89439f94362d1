"""Top-p over the selection of another method: `Twilight` keeps the fewest tokens that have most of the attention."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache.storage import LayerCache, LayerStorage, put_tokens
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.scan import by_blocks
from kvjax.protocol.slots import SlotMethod, new_slots, newest_query
from kvjax.protocol.typing import pytree, traced
from kvjax.selection import top_mass
from kvjax.wrappers.compose import Around, answers, inner_of_layer, passes, slot_method
from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped

_LARGEST = 15  # the largest code of 4 bits


@pytree
class FourBitKeys:
    """Keys in 4 bits: channel c of key i is ``low[i] + step[i] * code[i, c]``. All are 0 for empty slots."""

    # uint8 [B, H, S, D/2]: byte c has the code of channel c in its lower bits, the code of channel c + D/2 in its upper.
    codes: Array
    low: Array  # [B, H, S], the smallest channel, in the dtype of the keys
    step: Array  # [B, H, S], the range of the channels divided by 15, in the dtype of the keys


@pytree
class Pruned:
    """The state that `Twilight` keeps in addition to the cache."""

    keys: FourBitKeys
    query: Array  # [B, H, G, D], the row's newest rotated query, by which accounting counts
    inner: Any  # the metadata of the inner method


@answers("method")
@pytree
class Twilight(Around):
    """Attend to the tokens with most of the attention among those that ``method`` selects.

    Example: ``Twilight(method=Quest(budget=8192), mass=0.85)``.

    ``method`` selects candidates with a generous budget. Each KV head attends to the fewest of them that have the share
    ``mass`` of the attention, so their number depends on the head and the step. The shares are estimated by a copy of
    all keys in 4 bits, uint8 [B, H, S, D/2], with two values [B, H, S] in the dtype of the keys. For token i, whose key
    is k_i, and query head (h, g)::

        step_i = (max k_i - min k_i) / 15        code_i = round((k_i - min k_i) / step_i)
        e[h, g, i] = q[h, g] . (min k_i + step_i * code_i) / sqrt(D)
        share[h, g, i] = softmax_i(e[h, g]), i among the selected tokens

    A query head needs the smallest set of tokens whose shares add up to ``mass``, and tokens whose shares equal the
    smallest in the set. A KV head attends to the tokens that any of its query heads needs, and to the step's own token if
    it is selected. Where the query heads of ``method`` choose for themselves (`RetrievalAttention`), the candidates are the
    tokens that any head of the group chose. The estimates only select: attention uses the exact keys. ``mass=1`` keeps
    all candidates. Where the budget of ``method`` has room for all stored tokens, all of them are candidates. Layers that
    ``method`` leaves dense, as `Quest` does the first two, stay dense.

    ``method`` is one that selects slots in each step: `Quest`, `ParisKV`, `RetrievalAttention`, `PQCache`, `SOCKET`,
    `InfiniGen`, `SentenceKV`, `Stages`, `DenseBelow`, or one of your own. Other methods are refused when the
    wrapper is made (ValueError): methods that attend to all they keep (`Full`, `SnapKV`, `H2O`), and methods that do not
    choose slots of a `LayerCache`, or that weigh the chosen tokens (`TokenSelect`, `Chess`, `MagicPIG`).

    The accounting describes a step with the query of the newest token, which is an estimate where the next token can
    change the selection of ``method`` (`SentenceKV`). It counts the kept tokens as attended. As metadata it counts the
    metadata of ``method``, and the 4-bit keys of the tokens that ``method`` selects.

    **Source**: Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning" (arXiv:2502.02770);
    tsinghua-ideal/Twilight 843ebcc for the quantisation, the estimate, the threshold and the default of ``mass``.

    **Departures**: each KV head has one list (the union over the group, as a kernel needs it); the accuracy code
    repeats the keys, and prunes for every query head. The code leaves the first two layers dense under every selector;
    here the layers are dense that ``method`` leaves dense: two under `Quest`, none under most other methods
    (`PerLayer` can add them). The step's own token is attended even where its share is small. The threshold is
    exact, from sorted shares; the code searches for it. The code quantises in each step; here a key is quantised when it
    arrives, and its step has the dtype of the keys. The code's Quest rounds the number of pages up and does not force the
    newest page; here `Quest` follows its own page.
    """

    PAPER: ClassVar[str] = "arXiv:2502.02770"

    mass: float | Array = traced("share of the estimated attention to keep", default=0.85, above=0, most=1)

    keeps = "what `method` keeps"
    slot_block = None  # the share is of the attention to the slots of all devices

    reread_tokens = passes("method", SlotMethod.reread_tokens)
    reread = passes("method", SlotMethod.reread)

    def check(self) -> None:
        method = slot_method("Twilight: method", self.method)
        if not method.selects:
            raise ValueError(
                f"Twilight: method must select slots in each step, but {type(method).__name__} attends to all that it keeps"
            )
        if method.moves_slots:
            raise ValueError(
                f"Twilight: {type(method).__name__} moves slots while decoding, which would leave the 4-bit keys "
                "stale; method must leave them where they are"
            )

    @property
    def obs_window(self) -> int:
        return max(1, self.method.obs_window)  # the accounting predicts the first step from the last query

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        inner = inner_of_layer(self.method, layer, num_layers)
        if not inner.selects:  # a layer that the method leaves dense
            return inner
        return Twilight(method=inner, mass=self.mass)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Pruned]:
        cache, inner = self.method.compress(cache, prompt, room)
        four_bits, valid = by_blocks(four_bit_keys, cache.resident().key), cache.valid  # `method` may have packed them
        keys = FourBitKeys(
            codes=jnp.where(valid[..., None], four_bits.codes, 0),
            low=jnp.where(valid, four_bits.low, 0),
            step=jnp.where(valid, four_bits.step, 0),
        )
        return cache, Pruned(keys=keys, query=prompt.query[..., -1, :], inner=inner)

    def select(self, cache: LayerStorage, aux: Pruned, step: Step) -> Selection:
        slots, _, kept = self._chosen(cache, aux, step)
        return Selection(slots=slots, mask=kept)

    def update(self, cache: LayerStorage, aux: Pruned, step: Step, mass: Array | None) -> tuple[LayerStorage, Pruned]:
        slot = new_slots(cache, step.position)
        new = four_bit_keys(cache.keys_at(jnp.where(slot < cache.num_slots, slot, 0)))
        keys = jax.tree.map(lambda old, x: put_tokens(old, x, slot, None), aux.keys, new)
        query = newest_query(step, aux.query)
        cache, inner = self.method.update(cache, aux.inner, step, mass)
        return cache, Pruned(keys=keys, query=query, inner=inner)

    def count(self, cache: LayerStorage, aux: Pruned, shared: Any) -> tuple[Array, Array]:
        """Count what a step with the newest query would keep, and bytes for all candidates of that step."""
        # The next token is not known: 0 stands for it where the inner method asks.
        newest = cache.position.max(axis=(1, 2))[:, None]
        step = Step(query=aux.query[..., None, :], position=newest, tokens=jnp.zeros_like(newest), shared=shared)
        _, candidates, kept = self._chosen(cache, aux, step)
        _, metadata = self.method.count(cache, aux.inner, shared)
        per_token = sum(x.dtype.itemsize * math.prod(x.shape[3:]) for x in jax.tree.leaves(aux.keys))
        estimated = jnp.sum(candidates, axis=2, dtype=jnp.float32) * per_token
        return jnp.sum(kept, axis=2, dtype=jnp.int32), metadata + estimated

    def counters(self, aux: Pruned, shared: Any) -> dict[str, Array]:
        return self.method.counters(aux.inner, shared)

    def _chosen(self, cache: LayerStorage, aux: Pruned, step: Step) -> tuple[Array, Array, Array]:
        """Select slots int32 [B, H, K]; with bool [B, H, K]: the inner method selects the slot; `Twilight` keeps it."""
        chosen = self.method.select(cache, aux.inner, step)
        if chosen is None:
            slots = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
            slots, mask, keys = jnp.broadcast_to(slots, cache.position.shape), cache.valid, aux.keys
        else:
            slots, mask = chosen.tokens(cache)
            index = {3: slots, 4: slots[..., None]}
            keys = jax.tree.map(lambda x: jnp.take_along_axis(x, index[x.ndim], axis=2, mode="clip"), aux.keys)
        query = step.query[..., 0, :]
        # The step's own token joins the 4-bit keys only in `update`.
        newest = jnp.maximum(cache.cursor - 1, 0)[:, None]
        own = estimates(query, four_bit_keys(cache.keys_at(newest)))
        newest = slots == newest[..., None]
        logits = capped(jnp.where(newest[:, :, None], own, estimates(query, keys)))
        needed = top_mass(jnp.where(mask[:, :, None], logits, -jnp.inf), self.mass).any(axis=2)
        return slots, mask, mask & (needed | newest)


def four_bit_keys(key: Array) -> FourBitKeys:
    """Quantise keys [B, H, N, D] to 4 bits, each with its own range; D is even."""
    low, high = (x.astype(jnp.float32) for x in (key.min(axis=3), key.max(axis=3)))
    step = ((high - low) / _LARGEST).astype(key.dtype)
    size = step.astype(jnp.float32)[..., None]  # 0 if all channels are equal
    code = jnp.round((key.astype(jnp.float32) - low[..., None]) / jnp.where(size > 0, size, 1))
    first, second = jnp.split(jnp.clip(code, 0, _LARGEST).astype(jnp.uint8), 2, axis=3)
    return FourBitKeys(codes=first | second << 4, low=low.astype(key.dtype), step=step)


def estimates(query: Array, keys: FourBitKeys) -> Array:
    """Estimate the logits q.k / sqrt(D) by keys in 4 bits.

    Args:
        query: [B, H, G, D], rotated.

    Returns:
        float32 [B, H, G, K].
    """
    query, exact = query.astype(jnp.float32), product_precision(jnp.float32)
    codes = (keys.codes & _LARGEST).astype(jnp.float32), (keys.codes >> 4).astype(jnp.float32)
    halves = zip(jnp.split(query, 2, axis=3), codes, strict=True)
    products = [jnp.einsum("bhgd,bhkd->bhgk", half, code, precision=exact) for half, code in halves]
    low, step = (x.astype(jnp.float32)[:, :, None] for x in (keys.low, keys.step))
    return (low * query.sum(axis=3, keepdims=True) + step * (products[0] + products[1])) / math.sqrt(query.shape[3])
