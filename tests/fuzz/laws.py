"""Random configurations against the laws: the laws of `kvjax.testing`, and some laws that need draws.

A case is a structure, whose programs are compiled once, and some draws of it: weights, prompts, and the traced values of the
method. A draw is checked by every law that applies. hypothesis draws a number, which seeds both: it could not make a case
smaller in the time that programs take to compile.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import kvjax
from kvjax.cache.quantised import KV_DTYPES
from kvjax.decoding.decode import padding_token
from kvjax.decoding.layers import layer_methods
from kvjax.methods import Full
from kvjax.protocol.describe import describe
from kvjax.protocol.method import Method
from kvjax.testing import laws
from kvjax.testing.layer import random_tokens
from kvjax.testing.subject import LAYER_STEPS, ROOM, STEPS, Subject, padded
from tests.fuzz.structures import covering, fitted, names, params_of, random_method, random_model, redraw, resident
from tests.fuzz.verdicts import Broken

DRAWS = 24  # of one structure
NUMBERS = st.integers(0, 2**32 - 1).filter(bool)  # of structures; hypothesis begins with 0, whatever the seed
_LAYER_ROWS, _LONGEST = 4, 40


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is compiled: a method with its static fields, a model, and sizes."""

    number: int
    method: Method
    model: Any
    chunk_size: int

    @classmethod
    def random(cls, number: int) -> Structure:
        """The structure of a number."""
        rng = np.random.default_rng([number, 1])
        name, model = str(rng.choice(names())), random_model(rng)
        while name == "perlayer" and model.num_layers == 1:
            model = random_model(rng)
        return cls(number, _fitting(name, model, rng), model, int(rng.choice((8, 16, 24))))


def _fitting(name: str, model: Any, rng: np.random.Generator) -> Method:
    """A random method that takes the model's sizes: some refuse a head_dim when they see it."""
    while True:
        try:
            method = fitted(random_method(name, rng), model, rng)
            kvjax.memory_needed(method, model, batch=3, prompt_slots=_LONGEST, max_new_tokens=ROOM)
        except ValueError:
            continue
        return method


class Draw(Subject):
    """A structure with numbers: random weights, prompts, rows of a layer, and traced knobs."""

    def __init__(self, structure: Structure, number: int) -> None:
        rng = np.random.default_rng([structure.number, 2, number])
        model, self.structure = structure.model, structure
        method = structure.method if number == 0 else redraw(structure.method, rng)
        params = params_of(model, int(rng.integers(1 << 30)))
        lengths = [int(rng.choice((1, 2, 39, 40)) if rng.random() < 0.2 else rng.integers(1, _LONGEST + 1)) for _ in range(3)]
        prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
        options = {"prompts": prompts}
        super().__init__(
            method,
            model,
            params,
            full=Subject(Full(), model, params, **options),
            everything=covering(method),
            nearby=redraw(structure.method, rng),
            traces=getattr(model, "traces", ()),
            rows=_rows(model, int(rng.integers(1 << 30))),
            lengths=rng.integers(1, _LONGEST + 1, _LAYER_ROWS),
            **options,
        )
        self.rng = rng

    def about(self) -> str:
        """The draw in words."""
        model = self.model
        sizes = f"{model.num_layers} layers, {model.num_kv_heads} of {model.num_q_heads} heads, dim {model.head_dim}"
        return f"{describe(self.method)}, {type(model).__name__} of {sizes}, prompts {[len(row) for row in self.prompts]}"


def _rows(model: Any, seed: int) -> tuple[np.ndarray, ...]:
    heads, group = model.num_kv_heads, model.num_q_heads // model.num_kv_heads
    return random_tokens(seed, _LAYER_ROWS, heads, group, _LONGEST + LAYER_STEPS, model.head_dim)


def _same(got: kvjax.Generation, want: kvjax.Generation, rows: Any = slice(None)) -> None:
    """Assert that two runs have the same tokens and counts; ``rows`` are those of ``want``."""
    np.testing.assert_array_equal(got.tokens, np.asarray(want.tokens)[rows])
    np.testing.assert_array_equal(got.stats.attended, np.asarray(want.stats.attended)[rows])


# ---- laws of draws ------------------------------------------------------------------------------------------------


def cost_counts_what_is_attended(draw: Draw) -> None:
    """The law of `kvjax.testing`, in rows whose last token closed no buffer and ended no sentence.

    All tokens of a buffer are attended to. When it closes, they become tokens like others, of which only some are selected.
    A step that ends a sentence attends to all that is stored.
    """
    cost = np.asarray(draw.layer.cost(draw.plain.state, None).attended)
    seen = laws.seen_at_the_end(draw).mean(axis=1)
    knobs, closed = vars(draw.layer), np.zeros(len(seen), bool)
    if knobs.get("buffer"):
        closed = draw.plain.kept[-1].sum(axis=-1).max(axis=1) % knobs["buffer"] == 0
    if "boundary" in knobs:
        closed = np.asarray(draw.plain.state.aux.length)[:, 0] == 0
    np.testing.assert_allclose(cost[~closed], seen[~closed], rtol=1e-6)  # a mean in float32


def padding_is_never_read(draw: Draw) -> None:
    """Other ids behind the ends of the prompts change nothing."""
    tokens, lengths = padded(draw.prompts)
    padding = np.arange(tokens.shape[1])[None] >= lengths[:, None]
    tokens = np.where(padding, draw.rng.integers(0, draw.model.vocab_size, tokens.shape), tokens).astype(np.int32)
    options = {"config": draw.model, "method": draw.method, "max_new_tokens": ROOM, "pad_multiple": 1}
    cache = kvjax.prefill(draw.params, tokens, lengths=lengths, **options)
    np.testing.assert_array_equal(cache.logits, draw.base[0])
    np.testing.assert_array_equal(draw.go_on(cache).tokens, draw.base[1].tokens)


def order_of_rows_does_not_matter(draw: Draw) -> None:
    """Prompts in another order give the same tokens in that order."""
    order = draw.rng.permutation(len(draw.prompts))
    _same(draw.go_on(draw.read(rows=[draw.prompts[row] for row in order])), draw.base[1], order)


def limits_cut_rows(draw: Draw) -> None:
    """A row with a limit has the first tokens of the row without, and its cache is as long as that."""
    limits = draw.rng.integers(0, STEPS + 1, len(draw.prompts))
    out = kvjax.generate(draw.params, draw.read(), max_new_tokens=STEPS, eos_token_ids=(), limits=limits)
    want = np.where(np.arange(STEPS)[None] < limits[:, None], draw.base[1].tokens, padding_token(draw.model))
    np.testing.assert_array_equal(out.tokens, want)
    np.testing.assert_array_equal(out.cache.length, [len(x) + n for x, n in zip(draw.prompts, limits, strict=True)])


def forks_are_independent(draw: Draw) -> None:
    """A fork goes on as the cache does, which was consumed before."""
    cache = draw.read()
    other = kvjax.fork(cache)
    first, second = draw.go_on(cache), draw.go_on(other)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.cache.logits, second.cache.logits)


def steps_equal_generate(draw: Draw) -> None:
    """Feeding the most probable token step by step is what `kvjax.generate` does."""
    cache = draw.read()
    for step in range(4):
        tokens = np.asarray(cache.logits).argmax(axis=1)
        np.testing.assert_array_equal(tokens, np.asarray(draw.base[1].tokens)[:, step])
        cache = kvjax.decode_step(draw.params, cache, tokens)


def inactive_rows_do_not_change(draw: Draw) -> None:
    """A row that sits out a step goes on as if the step had not been."""
    active = draw.rng.random(len(draw.prompts)) < 0.5
    cache = kvjax.decode_step(draw.params, draw.read(), np.asarray(draw.base[0]).argmax(axis=1), active=active)
    np.testing.assert_array_equal(np.asarray(cache.logits)[~active], draw.base[0][~active])
    got = np.asarray(draw.go_on(cache).tokens)
    np.testing.assert_array_equal(got[~active], np.asarray(draw.base[1].tokens)[~active])
    np.testing.assert_array_equal(got[active, :-1], np.asarray(draw.base[1].tokens)[active, 1:])


def chunk_size_does_not_change_results(draw: Draw) -> None:
    """A prompt that the model reads in chunks gives what it gives at once."""
    cache = draw.read(chunk_size=draw.structure.chunk_size)
    np.testing.assert_allclose(cache.logits, draw.base[0], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(draw.go_on(cache).tokens, draw.base[1].tokens)


def _consistent(out: kvjax.Generation, draw: Draw) -> None:
    length = [len(row) + STEPS for row in draw.prompts]
    np.testing.assert_array_equal(out.stats.length, length)
    np.testing.assert_array_less(0, out.stats.attended)
    np.testing.assert_array_less(out.stats.attended, np.asarray(length) + 0.5)
    np.testing.assert_array_less(-1, out.tokens)
    np.testing.assert_array_less(out.tokens, draw.model.vocab_size)
    np.testing.assert_array_equal(np.isfinite(out.cache.logits), True)


def accounting_is_consistent(draw: Draw) -> None:
    """At least one token and at most all are attended, logits are finite, tokens are of the vocabulary."""
    _consistent(draw.base[1], draw)


def everything_extended_equals_full(draw: Draw) -> None:
    """Questions after a prompt of which everything is kept get Full's logits."""
    got, want = draw.ask(draw.read(draw.everything)), draw.full.ask(draw.full.read())
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4, rtol=0)


def offloaded_equals_resident(draw: Draw) -> None:
    """Where the cache is does not change tokens or counts."""
    _same(draw.go_on(draw.read(resident(draw.method))), draw.base[1])


def offloaded_equals_resident_as_codes(draw: Draw) -> None:
    """The same where keys and values are codes."""
    kind = str(np.random.default_rng([draw.structure.number, 4]).choice(sorted(KV_DTYPES)))
    _same(*(draw.go_on(draw.read(x, kv_dtype=kind)) for x in (draw.method, resident(draw.method))))


def saved_equals_loaded(draw: Draw) -> None:
    """A cache on disk is the cache, bit for bit, whatever its folder is called."""
    cache, name = draw.read(), "".join(draw.rng.choice(list("ab []{}*?\\:!%#~ü日'\"\n"), 8))
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save_cache(Path(folder) / name, cache)
        back = kvjax.load_cache(Path(folder) / name, config=draw.model, method=draw.method)
    assert jax.tree.structure(back) == jax.tree.structure(cache), "another structure"
    jax.tree.map(np.testing.assert_array_equal, back, cache)


def sweep_equals_generate(draw: Draw) -> None:
    """Two settings in one program give what each gives alone."""
    tokens, lengths = padded(draw.prompts)
    options = {"config": draw.model, "lengths": lengths, "max_new_tokens": STEPS, "eos_token_ids": ()}
    settings = [draw.method, draw.nearby]
    for setting, got in zip(settings, kvjax.sweep(draw.params, tokens, settings, **options), strict=True):
        _same(got, draw.go_on(draw.read(setting)))


def drafts_give_fulls_tokens(draw: Draw) -> None:
    """As a draft of `kvjax.Verified`, the method gives Full's tokens and logits; a method that cannot draft is refused."""
    draft, depth = resident(draw.method), int(draw.rng.integers(1, 5))
    try:
        method = kvjax.Verified(draft=draft, depth=depth, worth=None if draw.rng.random() < 0.5 else 0.5)
        kvjax.memory_needed(method, draw.model, batch=3, prompt_slots=_LONGEST, max_new_tokens=ROOM)
    except ValueError:
        return
    got, want = draw.go_on(draw.read(method)), draw.full.base[1]
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.cache.logits, want.cache.logits, atol=1e-4, rtol=0)


@functools.partial(jax.jit, static_argnums=0)
def _budgeted(model: Any, params: Any, tokens: Any, lengths: Any, method: Any, budget: Any) -> kvjax.Generation:
    method, options = dataclasses.replace(method, budget=budget), {"max_new_tokens": STEPS, "pad_multiple": 1}
    cache = kvjax.prefill(params, tokens, config=model, lengths=lengths, method=method, **options)
    return kvjax.generate(params, cache, max_new_tokens=STEPS, eos_token_ids=())


def budgets_out_of_range_are_clamped(draw: Draw) -> None:
    """Under a traced budget out of range, logits are finite, and one to all tokens are attended to."""
    budget = np.int32(draw.rng.choice((0, 1, -5, 3, 10**6, 2**31 - 1)))
    _consistent(_budgeted(draw.model, draw.params, *padded(draw.prompts), draw.method, budget), draw)


_LAYER = (
    laws.empty_slots_are_never_read, laws.scores_are_numbers, laws.rows_are_independent,
    laws.permuting_heads_permutes_the_output, laws.outputs_are_attention_over_the_chosen, cost_counts_what_is_attended,
)  # fmt: skip
_MODEL = (
    accounting_is_consistent, laws.generating_in_two_calls_equals_one, laws.ragged_rows_equal_alone,
    laws.resident_bytes_are_the_arrays, padding_is_never_read, order_of_rows_does_not_matter, limits_cut_rows,
    forks_are_independent, laws.second_call_does_not_retrace,
)  # fmt: skip
_ONCE = (
    laws.decoding_keeps_structure_shapes_and_dtypes,
    laws.bfloat16_is_kept,
    saved_equals_loaded,
    drafts_give_fulls_tokens,
)


def laws_of(draw: Draw, number: int) -> list[Callable[[Any], None]]:
    """The laws that apply to a draw. A structure has only some of those that need programs of their own."""
    rng = np.random.default_rng([draw.structure.number, 3])
    stepped, asked, chunked, layered, budgeted, pieced, covered = (rng.random(7) < 0.5).tolist()
    swept = rng.random() < 0.1
    chosen: list[Callable[[Any], None]] = [*_MODEL]
    chosen += [steps_equal_generate, inactive_rows_do_not_change] * stepped
    chosen += [laws.ragged_questions_equal_alone] * asked
    # The first layer's keys of equal tokens are equally long, so rounding decides which Knorm keeps.
    chosen += [chunk_size_does_not_change_results] * (chunked and "Knorm" not in draw.about())
    if layered and not draw.method.spans_layers and not draw.method.offload:
        chosen += _LAYER
        chosen += [laws.equal_query_heads_attend_as_one] * (draw.model.num_q_heads > draw.model.num_kv_heads)
        chosen += [laws.prompt_chunks_do_not_change_results] * pieced
    if draw.everything is not None:
        chosen += [laws.everything_kept_equals_full] + [everything_extended_equals_full] * (asked and covered)
    if draw.method.offload:
        chosen.append(offloaded_equals_resident)
        if not any("codes" in layer.lacks for layer in layer_methods(draw.method, draw.model)):
            chosen.append(offloaded_equals_resident_as_codes)
    if number == 0:
        chosen += [*_ONCE, *[sweep_equals_generate] * (swept and not draw.method.offload)]
    if budgeted and not draw.method.offload and isinstance(vars(draw.method).get("budget"), (int, jax.Array)):
        chosen.append(budgets_out_of_range_are_clamped)
    return chosen


def check(data: st.DataObject, folder: Path) -> Iterator[None]:
    """Check the laws on the draws of one structure; the programs of other structures are forgotten."""
    structure = Structure.random(data.draw(NUMBERS))
    jax.clear_caches()
    for number in range(DRAWS):
        draw = Draw(structure, number)
        for law in laws_of(draw, number):
            about = f"{law.__name__}: {draw.about()}"
            try:
                law(draw)
            except AssertionError as error:
                raise Broken(f"wrong: {about}: {error}") from error
            except Exception as error:  # whatever a law runs into
                raise Broken(f"raw: {about}: {type(error).__name__}: {error}") from error
            yield
