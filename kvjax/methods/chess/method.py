"""Chess: one page list for the whole model, with the pages most similar to the newest; renewed when the model is unsure.

Stored: all keys and values; one vector for each complete page of ``page_size`` tokens, with the mean keys of all layers and
KV heads side by side, from before their rotation; the means of these vectors per chunk and per grid; the list of active
pages. Keys themselves are stored rotated. The anchor is the mean of the vectors of the last ``anchor_pages`` pages. No
query is involved::

    score[node] = (anchor - mean of all page vectors) . vector[node]       for grids, chunks and pages in one product

The pages between the first ``num_sink_pages`` and the last ``window`` are candidates. From the top down, the method keeps a
share of the grids with candidates, of these grids' chunks, and of these chunks' pages (``ratios``). Every layer and head
attends to these pages, to the first and the last pages, and to the open page. A finished page joins the list. At the end of
a page of generated tokens the list can be rebuilt (a "reconstruction"): if over the page the entropy of the next-token
distribution had a mean above ``tau_entropy`` and a variance above ``tau_varentropy``. With ``trigger="or"`` one of the two
is enough; ``"fixed"`` rebuilds every ``interval`` pages, and ``"never"`` does not rebuild.

**Source**: CHESS (arXiv:2602.20732), sections 3 and 4; no code is public. Its base engine, nano-vllm bb823b3, stores
rotated keys.

**Departures**: the printed algorithm gives children of dropped parents a score of zero and takes quantiles over all nodes,
which keeps ten times the stated budgets. Here each cut counts only the children of kept parents, as the paper's prose and
tables say. The last chunk and grid are means of the members they have. An unfinished newest page counts in the anchor. All
pages are active while there are at most sink + window + 1 pages.

The default reads the paper otherwise at four points: page vectors are means of keys before rotation, scores are centred
(the mean page vector is subtracted from the anchor), the anchor has two pages, and sinks and window, which are active
anyway, do not compete. ``Chess(**PRINTED)`` is the printed form: equation 4 over rotated keys, with the window as anchor,
and all pages compete. ``hierarchy=False`` ranks pages alone, which leaves the paper's central idea. Models whose RoPE
frequencies change with the length need ``page_vec_rope="post"``. Why, and what other readings score:
docs/notebook/readings.md.
"""

import dataclasses
import functools
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import Cache, LayerCache, LayerSpec, LayerStorage
from kvjax.cache.divided import here
from kvjax.cache.offload import Near
from kvjax.methods.chess import page_tree
from kvjax.methods.chess.state import Pages, note_entropy
from kvjax.protocol.fields import check_within
from kvjax.protocol.method import LayerMethod, Method, Prompt, Step
from kvjax.protocol.slots import SlotMethod
from kvjax.protocol.typing import layer_ropes, method_layers, not_none, pytree, static, traced
from kvjax.rope import depends_on_length, frequencies
from kvjax.selection import compact

PRESETS = {"conservative": (0.9, 0.9, 0.9), "moderate": (0.8, 0.7, 0.7), "aggressive": (0.5, 0.2, 0.1)}
# The paper's equation 4 as it is printed, over keys as its engine stores them: `Chess(**PRINTED)`.
PRINTED: dict[str, Any] = {"page_vec_rope": "post", "centred": False, "candidates": "all", "anchor_pages": None}


@pytree
class ChessLayer(SlotMethod):
    """One layer of `Chess`: exact attention over the active pages of the shared state, and the open page."""

    page_size: int = static(least=1)
    offload: bool | float = static(default=False, least=0, most=1)
    copies: Near = static(default=Near())

    spans_layers = True

    @property
    def slot_block(self) -> int:
        return self.page_size

    def near(self, slots: int, room: int) -> Near:
        return self.copies

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache, None

    def select(self, cache: LayerStorage, aux: None, step: Step) -> Selection:
        """Select from the shared state alone, so a compiler computes the selection once for all layers."""
        shared = step.shared
        newest = lax.div(jnp.maximum(step.position, 0), self.page_size)  # a slot is a position
        # The newest page stands first, so that all used entries stand before all unused ones. Concatenations would be two
        # launches, a selection is one.
        entry = jnp.arange(shared.active.shape[1] + 1, dtype=jnp.int32)[None]
        listed = jnp.pad(shared.active, ((0, 0), (1, 0)))
        pages = jnp.where(entry == 0, newest, listed)
        used = (entry == 0) | ((entry <= shared.count[:, None]) & (listed != newest))
        pages, used = here(pages, used, cache, self.page_size)
        return Selection(slots=pages[:, None], mask=used[:, None], page_size=self.page_size)

    def update(self, cache: LayerStorage, aux: None, step: Step, mass: Array | None) -> tuple[LayerStorage, None]:
        return cache, None

    def count(self, cache: LayerStorage, aux: None, shared: Pages) -> tuple[Array, Array]:
        """Count the metadata that an average step so far has read: only reconstructions read them."""
        tokens = shared.count * self.page_size + cache.cursor % self.page_size
        nodes = jnp.sum(shared.tree.mean_keys.any(axis=2), axis=1).astype(jnp.float32)
        if shared.centred:
            nodes = nodes + shared.complete.astype(jnp.float32)
        often = shared.reconstructions.astype(jnp.float32) / jnp.maximum(shared.steps, 1).astype(jnp.float32)
        vectors = shared.tree.mean_keys
        per_head = vectors.shape[2] * vectors.dtype.itemsize / (shared.num_layers * cache.key.shape[1])
        heads = (1, cache.key.shape[1])
        return jnp.tile(tokens[:, None], heads), jnp.tile((nodes * often * per_head)[:, None], heads)

    def counters(self, aux: None, shared: Pages) -> dict[str, Array]:
        count = shared.reconstructions.astype(jnp.float32)
        between = shared.generated.astype(jnp.float32) / jnp.maximum(count, 1.0)
        return {"reconstructions": count, "pages_between": between, "active_pages": shared.count.astype(jnp.float32)}


@pytree
class Chess(Method):
    """Context-aware hierarchical page selection for the whole model; see the module docstring."""

    ratios: page_tree.Triple | str = traced(
        "shares of grids, chunks and pages to keep; or the name of a preset",
        default=PRESETS["aggressive"],
        above=0,
        most=1,
        choices=tuple(PRESETS),
    )
    capacity: tuple[float, float, float] = static("the largest ratios", default=None, above=0, most=1)
    page_size: int = static("tokens per page", default=32, least=1)
    pages_per_chunk: int = static("pages in a chunk", default=8, least=1)
    chunks_per_grid: int = static("chunks in a grid", default=8, least=1)
    num_sink_pages: int = static("first pages, always active", default=1, least=0)
    window: int = static("last pages, always active", default=8, least=1)
    anchor_pages: int | None = static("last pages whose mean is the anchor; None is `window`", default=2, least=1)
    centred: bool = static("whether the mean of all page vectors is subtracted from the anchor", default=True)
    hierarchy: bool = static("False: pages are ranked without grids and chunks", default=True)
    candidates: str = static(
        'pages to rank: the "history" between the sink pages and the window, or "all"',
        default="history",
        choices=("history", "all"),
    )
    trigger: str = static(
        '"and" or "or" (of the two thresholds), "fixed" (every `interval` pages) or "never"',
        default="and",
        choices=("and", "or", "fixed", "never"),
    )
    interval: int | Array = traced('pages between reconstructions under trigger="fixed"', default=6, least=1)
    tau_entropy: float | Array | None = traced(
        "threshold of a page's mean entropy in nats, traced; see `calibrate_chess`", default=None
    )
    tau_varentropy: float | Array | None = traced("threshold of the variance of this entropy, traced", default=None)
    page_vec_rope: str = static(
        'averaged keys: "pre" (rotation undone) or "post" (rotated)', default="pre", choices=("pre", "post")
    )
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2602.20732"
    TITLE: ClassVar[str] = "CHESS"

    dense_prompt = True
    spans_layers = True
    lacks = ()

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        window = 8
        while window > 1 and 2 * (1 + window) * 32 > length:
            window //= 2
        note = f"window of {window} pages, 8 would be more than half of {length} tokens" if window < 8 else ""
        return {"ratios": "aggressive", "trigger": "and", "window": window}, note

    def check(self) -> None:
        if isinstance(self.ratios, str):
            object.__setattr__(self, "ratios", PRESETS[self.ratios])
        check_within(self, "ratios", "capacity")

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return ChessLayer(
            page_size=self.page_size,
            offload=self.offload,
            copies=Near(first=self.num_sink_pages * self.page_size, newest=(self.window + 1) * self.page_size),
        )

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Pages:
        missing = [name for name in ("tau_entropy", "tau_varentropy") if vars(self)[name] is None]
        if self.trigger in ("and", "or") and missing:
            raise ValueError(
                f"Chess: {missing[0]} is not calibrated, trigger={self.trigger!r} needs it: pass a number, use "
                "kvjax.api.calibrate_chess.calibrate_chess, or trigger='fixed' or 'never'"
            )
        first, batch = specs[0], specs[0].batch
        slots = first.prompt_slots + first.max_new_tokens
        grown = -(-first.max_new_tokens // self.page_size) + 1
        most = page_tree.most_pages(slots, self._shape, self.capacity)
        listed = min(most + self.num_sink_pages + self.window + 1 + grown, self._shape.counts(slots)[0])
        whole, real = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.float32)
        return Pages(
            nodes=None, active=jnp.zeros((batch, listed), jnp.int32), count=whole, complete=whole, seen=whole, tokens=whole,
            mean=real, square=real, since=whole, steps=whole, generated=whole, reconstructions=whole, num_layers=len(specs),
            centred=self.centred,
        )  # fmt: skip

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        pages = cache.shared
        if pages.nodes is None:
            complete = cache.length // self.page_size
            nodes = page_tree.build(_stored(cache), self._shape, complete, self._unrotate(cache))
            pages = dataclasses.replace(pages, nodes=nodes, complete=complete, seen=cache.length)
            pages = self._reconstruct(pages, cache, jnp.ones(complete.shape, bool))
            return dataclasses.replace(cache, shared=pages)
        fresh = cache.length > pages.seen
        if decoding:
            pages = note_entropy(pages, cache.logits, fresh)
        seen = jnp.where(cache.length > 0, cache.length, pages.seen)  # the length; but XLA would copy a value with two places
        pages = dataclasses.replace(pages, seen=seen)
        if decoding:  # one token completes at most one page
            return dataclasses.replace(cache, shared=self._complete(pages, cache, decoding))
        pages = lax.while_loop(
            lambda pages: (pages.complete < cache.length // self.page_size).any(),
            lambda pages: self._complete(pages, cache, decoding),
            pages,
        )
        return dataclasses.replace(cache, shared=self._reconstruct(pages, cache, fresh))

    @property
    def _shape(self) -> page_tree.Shape:
        fan = (self.pages_per_chunk, self.chunks_per_grid) if self.hierarchy else None
        return page_tree.Shape(page_size=self.page_size, fan=fan)

    def _unrotate(self, cache: Cache) -> list[Array] | None:
        """Return the frequencies of each layer of ``cache``, whose layers are the model's that run the method."""
        if self.page_vec_rope == "post":
            return None
        model = cache.model
        each = layer_ropes(model)
        ropes = [each[layer] for layer in method_layers(model)]
        changing = [rope.scaling for rope in ropes if depends_on_length(rope.scaling)]
        if changing:
            raise ValueError(
                "Chess: page_vec_rope='pre' needs frequencies that do not change with the length, "
                f"got rope_type {changing[0].rope_type!r}, expected page_vec_rope='post'"
            )
        made = {rope: jnp.asarray(frequencies(rope, model.head_dim)) for rope in ropes}
        return [made[rope] for rope in ropes]

    def _complete(self, pages: Pages, cache: Cache, decoding: bool) -> Pages:
        """Add the next page, in rows where it is complete: its vector joins the tree, and it may trigger a new list."""
        ready = pages.complete < cache.length // self.page_size
        complete, count = (old + ready.astype(jnp.int32) for old in (pages.complete, pages.count))
        # Behind a barrier XLA computes them once. Otherwise it does so wherever they are used, from copies of old counts.
        ready, page = lax.optimization_barrier((ready, jnp.maximum(complete - 1, 0)))

        # Conditionals are here, once per step, and not in every layer. They return small arrays, so nothing large is copied.
        def vectors() -> Array:
            own = page_tree.page_vectors(_stored(cache), page[:, None], self.page_size, self._unrotate(cache))
            return page_tree.with_parents(pages.tree, page, own[:, 0])

        stored, levels = pages.tree.mean_keys, 1 + len(self._shape.fan or ())
        none = functools.partial(jnp.zeros, (len(page), levels, stored.shape[2]), stored.dtype)
        added = lax.cond(ready.any(), vectors, none)
        since = pages.since + ready.astype(jnp.int32)
        triggered = ready & decoding & self._triggered(dataclasses.replace(pages, since=since))
        row = jnp.arange(page.shape[0])
        at = jnp.where(ready, count - 1, pages.active.shape[1])
        blank = jnp.zeros_like(pages.mean)
        pages = dataclasses.replace(
            pages, nodes=page_tree.put_page(pages.tree, page, added, ready),
            active=pages.active.at[row, at].set(page, mode="drop"), count=count, complete=complete,
            tokens=jnp.where(ready, 0, pages.tokens), mean=jnp.where(ready, blank, pages.mean),
            square=jnp.where(ready, blank, pages.square), since=jnp.where(triggered, 0, since),
            generated=pages.generated + (ready & decoding).astype(jnp.int32),
            reconstructions=pages.reconstructions + triggered.astype(jnp.int32),
        )  # fmt: skip
        if self.trigger == "never":
            return pages
        active, count = lax.cond(
            triggered.any(), lambda: self._listed(pages, cache, triggered), lambda: (pages.active, pages.count)
        )
        return dataclasses.replace(pages, active=active, count=count)

    def _triggered(self, pages: Pages) -> Array:
        """Decide whether the page that ends now triggers a reconstruction: bool [B]."""
        if self.trigger == "never":
            return jnp.zeros(pages.since.shape, bool)
        if self.trigger == "fixed":
            return pages.since >= self.interval
        unsure = pages.mean > not_none("tau_entropy", self.tau_entropy)
        variance = pages.square / jnp.maximum(pages.tokens, 1).astype(jnp.float32)
        uneven = variance > not_none("tau_varentropy", self.tau_varentropy)
        return unsure & uneven if self.trigger == "and" else unsure | uneven

    def _reconstruct(self, pages: Pages, cache: Cache, when: Array) -> Pages:
        """Select the active pages again, in rows where ``when`` bool [B] is True."""
        active, count = self._listed(pages, cache, when)
        return dataclasses.replace(pages, active=active, count=count, since=jnp.where(when, 0, pages.since))

    def _listed(self, pages: Pages, cache: Cache, when: Array) -> tuple[Array, Array]:
        """Compute the fields ``active`` and ``count`` of `_reconstruct`."""
        total = -(-cache.length // self.page_size)
        by_page, by_chunk, by_grid = page_tree.score_nodes(pages.tree, self._anchor(pages, cache, total))
        page = jnp.arange(by_page.shape[1], dtype=jnp.int32)[None]
        exists = page < pages.complete[:, None]
        kept = (page < self.num_sink_pages) | (page >= total[:, None] - self.window)
        candidate = exists & ~kept if self.candidates == "history" else exists
        ratios = cast("page_tree.Triple", self.ratios)  # the name of a preset was replaced by its numbers
        if self.hierarchy:
            best = page_tree.cascade(
                by_grid, by_chunk, by_page, candidate, ratios, self.pages_per_chunk, self.chunks_per_grid
            )
        else:
            best = page_tree.best_pages(by_page, candidate, ratios)
        few = (total <= self.num_sink_pages + self.window + 1) | (pages.complete < 2)
        best = (best | kept | few[:, None]) & exists
        active, listed = compact(best, pages.active.shape[1])
        count = jnp.sum(listed, axis=1, dtype=jnp.int32)
        return jnp.where(when[:, None], active, pages.active), jnp.where(when, count, pages.count)

    def _anchor(self, pages: Pages, cache: Cache, total: Array) -> Array:
        """Compute the anchor float32 [B, N] from rows of ``total`` int32 [B] pages, an incomplete one included."""
        number = self.window if self.anchor_pages is None else self.anchor_pages
        last = total[:, None] - number + jnp.arange(number, dtype=jnp.int32)[None]
        vectors = jnp.take_along_axis(pages.tree.pages, jnp.maximum(last, 0)[..., None], axis=1)
        newest = jnp.maximum(total - 1, 0)[:, None]
        fresh = page_tree.page_vectors(_stored(cache), newest, self.page_size, self._unrotate(cache))
        vectors = jnp.where((last == newest)[..., None], fresh, vectors.astype(jnp.float32))
        exists = (last >= 0)[..., None]
        anchor = jnp.where(exists, vectors, 0).sum(axis=1) / jnp.maximum(jnp.sum(exists, axis=1), 1).astype(jnp.float32)
        return anchor - page_tree.mean_page(pages.tree, pages.complete) if self.centred else anchor


def _stored(cache: Cache) -> list[LayerCache]:
    return [state.cache for state in cache.layers]
