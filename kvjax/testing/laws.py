"""The laws that every method obeys. Each is a function of a `Subject` that raises an AssertionError where it is broken."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.api.fork import fork
from kvjax.api.generate import generate
from kvjax.cache import LayerCache, PlainCache
from kvjax.cache.latent import LatentCache
from kvjax.decoding.decode import run_step
from kvjax.decoding.recurrent import row_bytes
from kvjax.protocol.method import Step, with_inner
from kvjax.protocol.typing import layer_recurrence, layer_windows, pytree, values_are_keys
from kvjax.rope import rotate
from kvjax.testing.layer import Drive, frequencies
from kvjax.testing.subject import LAYER_STEPS, LENGTHS, QUESTIONS, STEPS, Subject


def same(got: Drive, want: Drive, tolerance: float = 1e-5, lengths: Sequence[int] | np.ndarray = LENGTHS) -> None:
    """Assert that two runs of one layer agree; the padding of prompts is not compared."""
    for row, length in enumerate(lengths):
        _close(got.prompt[row, :, :, :length], want.prompt[row, :, :, :length], tolerance)
    _close(got.outputs, want.outputs, tolerance)
    np.testing.assert_array_equal(got.attended, want.attended)
    np.testing.assert_array_equal(got.kept, want.kept)


def _close(got: Any, want: Any, tolerance: float) -> None:
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=0)


def _must(holds: Any, message: str) -> None:
    if not holds:
        raise AssertionError(message)


# ---- one layer ----------------------------------------------------------------------------------------------------


def empty_slots_are_never_read(subject: Subject) -> None:
    """Check that NaN in empty slots changes nothing (0 * NaN is NaN, so weights of zero would not hide it)."""
    same(subject.drive(poison=True), subject.plain, tolerance=0, lengths=subject.lengths)


def rows_are_independent(subject: Subject) -> None:
    """Check that other tokens in the other rows change nothing in the first row."""
    changed = [x.copy() for x in subject.rows]
    for x in changed:
        x[1:] = x[1:][::-1] * 2 + 1
    q, k, v = changed
    got, want = subject.drive(q, k, v), subject.plain
    _close(got.outputs[:, 0], want.outputs[:, 0], 1e-6)
    np.testing.assert_array_equal(got.kept[:, 0], want.kept[:, 0])
    _must(not np.allclose(got.outputs[:, 1], want.outputs[:, 1]), "a row that was changed gave the same outputs")


def permuting_heads_permutes_the_output(subject: Subject) -> None:
    """Check that permuting heads permutes the output: no head is special, unless the knobs say so."""
    knobs = [value for method in with_inner(subject.method) for value in vars(method).values() if isinstance(value, tuple)]
    if any(not isinstance(entry, (int, float, jax.Array)) for value in knobs for entry in value):
        return  # a knob has an entry for each head: a table of scores, or several patterns
    q, k, v = (x[:, ::-1] for x in subject.rows)
    got, want = subject.drive(q, k, v), subject.plain
    _close(got.outputs[:, :, ::-1], want.outputs, 1e-5)
    np.testing.assert_array_equal(got.attended[:, :, ::-1], want.attended)


def equal_query_heads_attend_as_one(subject: Subject) -> None:
    """Check that equal query heads of a group give equal outputs, and that the newest token is always attended."""
    q = subject.rows[0].copy()
    q[:, :, 1] = q[:, :, 0]
    got = subject.drive(q)
    np.testing.assert_array_equal(got.outputs[..., 0, :], got.outputs[..., 1, :])
    for row, length in enumerate(subject.lengths):
        for step in range(LAYER_STEPS):
            seen = got.attended[step, row, :, length + step].all()
            _must(seen, f"row {row} does not attend to its newest token in step {step}: its slot or page must score inf")


def prompt_chunks_do_not_change_results(subject: Subject) -> None:
    """Check that a prompt prefilled in chunks gives the same results as a prompt prefilled at once."""
    own = subject.layer.max_tokens(in_prompt=True)
    same(subject.drive(chunk=7 if own is None else own), subject.plain, lengths=subject.lengths)


def scores_are_numbers(subject: Subject) -> None:
    """Check that no stored token scores NaN: every comparison with NaN is false, so NaN would choose tokens silently."""
    cls: Any = type(subject.layer)
    seen: list[Any] = []

    def score(self: Any, cache: Any, *arguments: Any) -> Any:
        made = cls.score(self, cache, *arguments)
        counts = cache.valid if isinstance(cache, LayerCache) and cache.valid.shape == made.shape else jnp.array(True)
        for mask in (x for x in arguments if isinstance(x, jax.Array) and x.dtype == bool):  # a scan's searched slots
            counts = mask if mask.ndim == made.ndim else mask[:, :, None]
        jax.debug.callback(seen.append, jnp.any(jnp.isnan(made) & counts))
        return made

    if getattr(cls, "score", None) is not None:
        watched = pytree(type(cls.__name__, (cls,), {"score": score, "__doc__": cls.__doc__}))
        subject.drive(method=watched(**vars(subject.layer)))
        jax.effects_barrier()
        _must(not any(seen), f"{cls.__name__}.score returned NaN for a stored token or page")


def outputs_are_attention_over_the_chosen(subject: Subject) -> None:
    """Check that a step gives float64 attention over the tokens that it chose, each once, for methods with plain logits."""
    layer: Any = subject.layer
    got, (q, k, v) = subject.plain, subject.rows
    if not layer.slotted or layer.packs or layer.extrapolates:
        return
    query, at = jnp.zeros((*q.shape[:3], 1, q.shape[4])), jnp.zeros((len(q), 1), jnp.int32)
    step = Step(query=query, position=at, tokens=at, shared=None, guess=query)
    chosen = jax.eval_shape(layer.select, got.state.cache, got.state.aux, step)
    if chosen is not None and (chosen.bias is not None or chosen.partials is not None):  # logits of its own
        return
    inv_freq, at = frequencies(q.shape[-1]), jnp.arange(q.shape[-2], dtype=jnp.int32)
    q, k = (np.asarray(rotate(jnp.asarray(x), at, inv_freq), np.float64) for x in (q, k))
    for step, row in np.ndindex(got.outputs.shape[:2]):
        logits = np.einsum("hgd,hsd->hgs", q[row, :, :, subject.lengths[row] + step], k[row]) / np.sqrt(q.shape[-1])
        logits = np.where(got.attended[step, row][:, None], logits, -np.inf)
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        want = np.einsum("hgs,hsd->hgd", weight / weight.sum(axis=-1, keepdims=True), v[row])
        _close(got.outputs[step, row], want, 1e-4)


def cost_counts_what_is_attended(subject: Subject) -> None:
    """Check that `Cost` describes the current state: tokens that the last step attended, less tokens that it then evicted."""
    cost = subject.layer.cost(subject.plain.state, None)
    np.testing.assert_allclose(cost.attended, seen_at_the_end(subject).mean(axis=1), rtol=1e-6)  # a mean in float32


def seen_at_the_end(subject: Subject) -> np.ndarray:
    """Count the tokens that the last step attended to and kept, [B, H]."""
    return (subject.plain.attended[-1] & subject.plain.kept[-1]).sum(axis=-1)


# ---- the whole model ----------------------------------------------------------------------------------------------


def everything_kept_equals_full(subject: Subject) -> None:
    """Check that a setting that keeps everything gives Full's tokens, and that the accounting equals Full's."""
    logits, full = subject.full.base
    cache = subject.read(subject.everything)
    _close(cache.logits, logits, 1e-4)
    got = subject.go_on(cache)
    np.testing.assert_array_equal(got.tokens, full.tokens)
    _close(got.cache.logits, full.cache.logits, 1e-4)
    said = got.stats.summary()
    _must(np.all(got.stats.is_no_op) and "no effect at this length in 3 of 3 rows" in said, f"the accounting says: {said}")
    np.testing.assert_array_equal(got.stats.attended, got.stats.visible)


def setting_does_something(subject: Subject) -> None:
    """Check that the setting under test leaves something out: a method that never does would obey the other laws too."""
    got, full = subject.base[1], subject.full.base[1]
    tokens = len(subject.prompts[0]) + STEPS
    told = f"the setting leaves nothing out of {tokens} tokens, so the laws show nothing: choose a smaller one"
    if not subject.method.extrapolates:  # other positions may be all that a method is about
        _must(not got.stats.is_no_op[0], told)
    _must(not np.array_equal(got.cache.logits[0], full.cache.logits[0]), f"Full's logits: {told}")


def ragged_rows_equal_alone(subject: Subject, rows: int | None = None) -> None:
    """Check that a row of a ragged batch gets the tokens that it gets alone, greedily.

    Args:
        subject: the method.
        rows: number of rows to compare; None compares all.
    """
    _, together = subject.base
    for row in range(len(subject.prompts[:rows])):
        alone = subject.go_on(subject.alone(row))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        _close(alone.cache.logits[0], together.cache.logits[row], 1e-4)
        np.testing.assert_array_equal(alone.stats.attended[0], together.stats.attended[row])


def generating_in_two_calls_equals_one(subject: Subject) -> None:
    """Check that generation continues exactly from the cache that `kvjax.generate` returns."""
    _, once = subject.base
    first, cache = subject.go_half(subject.read())
    second, cache = subject.go_half(cache)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), once.tokens)
    _close(cache.logits, once.cache.logits, 1e-5)


def second_call_does_not_retrace(subject: Subject) -> None:
    """Check that neither other tokens nor another value of a traced knob compiles again."""
    _, once = subject.base
    traces = len(subject.traces)
    cache = subject.read(subject.nearby, [row[::-1] for row in subject.prompts])
    subject.go_on(fork(subject.go_on(cache, subject.nearby).cache))
    _must(len(subject.traces) == traces, f"after {once!r} the model was traced again: {list(subject.traces[traces:])}")


def decoding_keeps_structure_shapes_and_dtypes(subject: Subject) -> None:
    """Check that the cache can be the carry of a loop, and that every leaf has axis B first."""
    rows = len(subject.prompts)
    cache = jax.eval_shape(subject.read)
    tokens, active = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1), bool)
    after = jax.eval_shape(lambda cache: run_step(subject.params, cache, tokens, active), cache)
    made, given = jax.tree.structure(after), jax.tree.structure(cache)
    _must(made == given, f"a decode step changed the structure of the cache from {given} to {made}")
    for (path, old), new in zip(jax.tree.leaves_with_path(cache), jax.tree.leaves(after), strict=True):
        kinds = [(x.shape, x.dtype, x.weak_type) for x in (old, new)]
        _must(kinds[0] == kinds[1], f"a decode step changed {jax.tree_util.keystr(path)} from {kinds[0]} to {kinds[1]}")
    for path, leaf in jax.tree.leaves_with_path((cache.layers, cache.shared, cache.length, cache.logits)):
        name = jax.tree_util.keystr(path)
        _must(leaf.shape[0] == rows, f"axis B must come first in every leaf, got {leaf.shape} in {name}")


def bfloat16_is_kept(subject: Subject) -> None:
    """Check that keys and values stay in the dtype of the model, and that logits are float32."""
    model = dataclasses.replace(subject.model, dtype="bfloat16")  # pyright: ignore[reportArgumentType]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), subject.params)

    def run() -> Any:
        cache = subject.read(config=model, params=params, max_new_tokens=8)
        return generate(params, cache, max_new_tokens=2, eos_token_ids=()).cache

    cache = jax.eval_shape(run)
    _must(cache.logits.dtype == jnp.float32, f"logits must be float32, got {cache.logits.dtype}")
    is_cache = lambda x: isinstance(x, (PlainCache, LatentCache))  # noqa: E731
    for x in filter(is_cache, jax.tree.leaves(cache.layers, is_leaf=is_cache)):
        kinds = x.key.dtype, x.value.dtype
        _must(set(kinds) == {jnp.dtype("bfloat16")}, f"keys and values must stay bfloat16, got {kinds}")


def resident_bytes_are_the_arrays(subject: Subject) -> None:
    """Check that the accounting states the allocated bytes, and the bytes that Full would read."""
    (_, got), model = subject.base, subject.model
    held = sum(x.nbytes for x in jax.tree.leaves((got.cache.layers, got.cache.shared)))
    np.testing.assert_array_equal(got.stats.resident_bytes, held)
    row = model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    length = np.asarray(got.stats.length)
    kinds = list(zip(layer_windows(model), layer_recurrence(model), strict=True))
    seen = sum(length if window is None else np.minimum(length, window) for window, state in kinds if state is None)
    kept = sum(row_bytes(state) for _, state in kinds if state is not None)
    stored = 1 if values_are_keys(model) else 2
    np.testing.assert_array_equal(got.stats.full_bytes_read, stored * row * seen + kept)
    np.testing.assert_array_equal(got.stats.length, np.array([len(x) for x in subject.prompts]) + STEPS)


def ragged_questions_equal_alone(subject: Subject, widths: Sequence[int] = (4, 4)) -> None:
    """Check that rows extended together by 4, 1 and 0 tokens continue as they would alone.

    Args:
        subject: the method.
        widths: columns of the questions that the first rows are asked alone.
    """
    together = subject.ask(subject.read())
    logits = np.asarray(together.logits)
    np.testing.assert_array_equal(together.length, [len(x) + len(q) for x, q in zip(subject.prompts, QUESTIONS, strict=True)])
    np.testing.assert_array_equal(logits[2], subject.base[0][2])
    for row, width in enumerate(widths):
        _close(subject.ask_alone(row, width).logits[0], logits[row], 1e-4)
