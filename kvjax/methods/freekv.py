"""FreeKV: attend to the pages that the previous query selects; KV heads whose query has turned away use their own query.

Stored: all keys and values; for each page of ``page_size`` tokens, the minimum and maximum of the rotated keys per channel;
and the last token's rotated queries.

A step attends to the first ``num_sink`` tokens, to the newest tokens and, per KV head, to the ``budget / page_size`` best
pages between. The newest tokens are some whole pages and the incomplete page behind them, ``num_local`` tokens to the nearest
page. Rows that are not longer than the sum of these parts attend to all tokens. With u Quest's upper bound of q.k over a
page, the score of page p at step t is::

    a[h] = q_t[h]      if  mean over g of  cos(q_t[h, g], q_(t-1)[h, g])  <  tau     (correction)
           q_(t-1)[h]  otherwise                                                     (speculation)
    u[h, g, p] = sum over c of  max(a[h, g, c] * min[h, p, c], a[h, g, c] * max[h, p, c])
    s[h, p]    = mean over g of  softmax over p of u[h, g, p]                        no 1/sqrt(D)

The first step after the prompt has no previous query, so all its KV heads use their own. After several tokens at once
(`extend`) the previous query is the query of the last token. Layers below ``num_dense_layers`` attend to all tokens. The
counter ``corrected`` is the share of KV heads that were corrected, in the steps that could speculate and had pages to leave
out.
The code has ``tau=0.8`` for long inputs and 0.9 for long answers.

**Source**: Liu et al., "FreeKV: Boosting KV Cache Retrieval for Efficient LLM Inference" (arXiv:2505.13109);
rooikeee/FreeKV 074f14d, a copy of the released code, for the sizes, the softmax without a scale and the newest pages.

**Departures**: pages are scored when they are attended, as in the accuracy code. The system code scores and fetches them one
step before, when the newest page to select from may still be among the newest tokens. The first step selects as in the
system code; the accuracy code takes whatever its memory holds for the previous query there. Pages begin at the first token,
so ``num_sink`` is a multiple of ``page_size``; in the accuracy code they begin behind the first ``num_sink`` tokens. The
option to bound a page by its centre and mean deviation is left out. With ``offload`` keys and values are in host memory, as
in the system code, but a step reads its pages where they are: nothing is fetched ahead, so speculation saves no time here.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.offload import Near
from kvjax.methods.budgets import SHARE, ends
from kvjax.methods.full import Full
from kvjax.methods.quest import Box, Quest
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.slots import SlotMethod, check_budget, count_all, newest_query
from kvjax.protocol.typing import pytree, static, traced
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.numerics import group_share
from pallas_kernels.score.page_score import page_score


@pytree
class Speculation:
    """The bounds of all pages, and what one step leaves for the next."""

    box: Box
    query: Array  # [B, H, G, D], of the last token after the prompt, rotated
    known: Array  # bool [B], whether there is one
    compared: Array  # int32 [B], steps that could speculate and had pages to leave out
    corrected: Array  # int32 [B, H], how many of these steps selected by their own query


@pytree
class FreeKV(SlotMethod):
    """Page retrieval by the previous query, corrected per KV head; see the module docstring."""

    budget: int | Array = traced("tokens found, besides both ends, in whole pages", default=1024, least=1, within="capacity")
    capacity: int = static("tokens allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always attended, in whole pages", default=512, least=0)
    num_local: int = static("newest tokens, always attended, in whole pages", default=512, least=1)
    page_size: int = static("slots per page", default=32, least=2)
    tau: float | Array = traced(
        "least cosine with which a KV head keeps to the previous query, traced; above 1 = never", default=0.8
    )
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2505.13109"
    num_dense_layers = 1  # first layers, which attend to all tokens

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        total, sinks, local = ends(length, 512, 512)
        page = max(size for size in (4, 8, 16, 32) if size == 4 or 3 * size <= total)  # one at each end, and a found one
        sinks, local = sinks // page * page, max(local // page, 1) * page
        note = f"1/{SHARE} of the context, sinks and recent tokens too"
        note += f"; pages of {page} tokens" if page < 32 else ""
        return {"num_sink": sinks, "num_local": local, "budget": total - sinks - local, "page_size": page}, note

    def check(self) -> None:
        check_budget(self, self.page_size, f"one page of page_size={self.page_size}")
        for name, value in (("num_sink", self.num_sink), ("num_local", self.num_local)):
            if value % self.page_size:
                raise ValueError(f"FreeKV: {name} must be a multiple of page_size={self.page_size}, got {value}")

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if layer < self.num_dense_layers else self

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=self.num_local + self.page_size)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Speculation]:
        batch, heads, group = prompt.query.shape[:3]
        return cache, Speculation(
            box=self._pages.index(cache),
            query=jnp.zeros((batch, heads, group, cache.key.shape[3]), prompt.query.dtype),
            known=jnp.zeros((batch,), bool),
            compared=jnp.zeros((batch,), jnp.int32),
            corrected=jnp.zeros((batch, heads), jnp.int32),
        )

    def select(self, cache: LayerStorage, aux: Speculation, step: Step) -> Selection:
        size, near, query = self.page_size, self._near(cache), step.query[..., 0, :]
        turned = self._turned(aux, query)
        asked = jnp.where(turned[..., None, None], query, aux.query)
        bound = page_score(asked, aux.box.low, aux.box.high, near * size, page_size=size, reduce="each")
        # The last pages are always among the newest, whatever is stored: a shorter row is searched faster.
        bound = bound[..., : max(bound.shape[3] - self.num_local // size + 1, 1)]
        page = jnp.arange(bound.shape[3], dtype=jnp.int32)[None, None]
        between = (page >= self.num_sink // size) & (page < near[:, None, None])
        score = group_share(bound, jnp.broadcast_to(between, (*bound.shape[:2], bound.shape[3])))
        best, found = kth_select_mask(score, self.budget // size, self.capacity // size)
        sinks = jnp.arange(self.num_sink // size, dtype=jnp.int32)[None, None]
        newest = jnp.arange(self.num_local // size + 1, dtype=jnp.int32)[None, None] + near[:, None, None]
        parts = [jnp.broadcast_to(x, (*best.shape[:2], x.shape[2])) for x in (sinks, best, newest)]
        pages = jnp.concatenate(parts, axis=2)
        listed = jnp.concatenate([jnp.ones_like(parts[0], bool), found, jnp.ones_like(parts[2], bool)], axis=2)
        listed = listed & (pages * size < cache.cursor[:, None, None])
        return Selection(slots=jnp.where(listed, pages, 0), mask=listed, page_size=size, select_aux=turned)

    def update(
        self, cache: LayerStorage, aux: Speculation, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, Speculation]:
        real = jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)
        query = newest_query(step, aux.query)
        compared, corrected = aux.compared, aux.corrected
        if step.position.shape[1] == 1:  # more tokens attend to all
            between = self._near(cache) - self.num_sink // self.page_size
            counts = (real > 0) & aux.known & (between > self.budget // self.page_size)
            # `select` has compared the queries already, unless the step attended to all.
            turned = self._turned(aux, query) if step.select_aux is None else step.select_aux
            compared = compared + counts.astype(jnp.int32)
            corrected = corrected + (counts[:, None] & turned).astype(jnp.int32)
        _, box = self._pages.update(cache, aux.box, step, mass)
        return cache, Speculation(box=box, query=query, known=aux.known | (real > 0), compared=compared, corrected=corrected)

    def count(self, cache: LayerStorage, aux: Speculation, shared: Any) -> tuple[Array, Array]:
        """Count exactly if all pages but the newest are full; give an upper bound if an eviction left holes."""
        stored, _ = count_all(cache)
        near = self._near(cache)
        found = self.budget // self.page_size * self.page_size
        attended = self.num_sink + found + cache.cursor - near * self.page_size
        per_page = sum(x.dtype.itemsize * x[0, 0, 0].size for x in jax.tree.leaves(aux.box))
        scanned = jnp.broadcast_to((near * per_page)[:, None], stored.shape)
        return jnp.minimum(stored, attended[:, None].astype(jnp.int32)), scanned.astype(jnp.float32)

    def counters(self, aux: Speculation, shared: Any) -> dict[str, Array]:
        steps = jnp.maximum(aux.compared, 1).astype(jnp.float32)
        return {"corrected": aux.corrected.astype(jnp.float32).mean(axis=1) / steps}

    @property
    def _pages(self) -> Quest:
        """The method whose index is the bounds of pages."""
        return Quest(budget=self.page_size, page_size=self.page_size)

    def _near(self, cache: LayerStorage) -> Array:
        """Find the first page that is always attended because it is new: int32 [B]."""
        behind = cache.cursor - self.num_sink
        whole, rest = behind // self.page_size, behind % self.page_size
        newest = self.num_local // self.page_size - (rest > self.page_size // 2).astype(jnp.int32)
        return jnp.maximum(whole - newest, 0) + self.num_sink // self.page_size

    def _turned(self, aux: Speculation, query: Array) -> Array:
        """Decide whether each KV head selects by its own ``query`` [B, H, G, D]: bool [B, H]."""
        one, other = (lax.stop_gradient(x.astype(jnp.float32)) for x in (query, aux.query))  # a decision has no slope
        # One reduction of three products is one kernel; the mean, head by head, fuses with the code that uses it.
        products = lax.reduce((one * other, one * one, other * other), (jnp.float32(0),) * 3, _sums, (3,))
        group = zip(*(jnp.unstack(x, axis=2) for x in products), strict=True)
        cosine = sum(_ratio(product, jnp.sqrt(own * others)) for product, own, others in group) / query.shape[2]
        return (cosine < self.tau) | ~aux.known[:, None]


def _sums(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(one, other, strict=True))


def _ratio(product: Array, norm: Array) -> Array:
    """Divide: ``product / norm``, 0 where the norm is 0."""
    return jnp.where(norm > 0, product / jnp.where(norm > 0, norm, 1), 0)
