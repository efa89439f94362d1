"""Cases that several files of tests/kvjax share: the standard run of the tiny model, and rows compared with an oracle.

A test that needs tokens of a method should go through `base`, `ask` and `go_on`. All tests then use the same few compiled
programs of each method: a prompt of 3 ragged rows with room for 24 tokens, a question of at most 4 tokens, 10 new tokens.
A test of one layer should take the sizes of `drive_alike`. A new setting of static fields or sizes costs a program, 3 to 8
seconds of a processor; other traced numbers, lengths and tokens cost nothing.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import registry
from kvjax.decoding.decode import padding_token
from kvjax.protocol.method import Inputs, LayerSpec
from kvjax.protocol.typing import EMPTY
from kvjax.testing.subject import LENGTHS, Subject, tokens_of_layer
from kvjax.testing.subject import QUESTIONS as QUESTIONS
from kvjax.testing.subject import STEPS as N
from tests import harness

STEPS = 10  # decode steps of one layer behind the rows of `batch`


def go_on(cache: kvjax.Cache, ends: tuple[int, ...] = ()) -> kvjax.Generation:
    """N greedy tokens per row, or fewer where a row meets one of ``ends``; consumes the cache.

    Limits are given, as `Subject` gives them, so that these are programs of the contract.
    """
    return kvjax.generate(harness.tiny_params(), cache, max_new_tokens=N, eos_token_ids=ends, limits=[N] * cache.batch)


def ask(cache: kvjax.Cache, questions: Any = QUESTIONS) -> kvjax.Cache:
    """`kvjax.extend` of the tiny model; consumes the cache."""
    return kvjax.extend(harness.tiny_params(), cache, questions)


ONE = dataclasses.replace(harness.TINY, num_layers=1)  # its parameters are those of `TINY`, of which it takes the first layer


def model(name: str) -> Any:
    """The tiny model of `subject`: one layer, which halves its programs, but for those that treat layers differently."""
    cls = registry.builtin().get(name)
    known = cls is not None and (cls.spans_layers or cls.needs_guess or "scores" in harness.oracle(name).KNOBS)
    return harness.TINY if known or name in ("per_layer", "layer_budgets", "reuse") else ONE


@functools.cache
def subject(name: str, copies: int | None = None, config: Any = None) -> Subject:
    """An example under test, in its tiny `model`, or in the model ``config``.

    A row alone is ``copies`` times in its batch. None: as often as there are prompts, in their programs.
    """
    knobs = harness.oracle(name).KNOBS if name in harness.NAMES else {}
    config = model(name) if config is None else config
    return Subject(
        harness.any_example(name),
        config,
        harness.tiny_params(),
        full=None if name == "full" else subject("full", config=config),
        everything=harness.generous(name),
        nearby=harness.example(name, capacity=knobs["budget"], budget=knobs["budget"] - 1) if "budget" in knobs else None,
        traces=harness.TRACES,
        prompts=harness.prompts(),
        copies=copies,
    )


def base(name: str) -> tuple[np.ndarray, kvjax.Generation]:
    """(logits after the prompt, `go_on`) of an example on the ragged prompts; its cache must not be consumed."""
    return subject(name).base


def ended(free: Any, ends: Any) -> tuple[np.ndarray, list[int]]:
    """Tokens [B, T] of a run that nothing ends, cut behind the first of ``ends`` in each row, and how many are left."""
    tokens, counts = np.array(free), []
    for row in tokens:
        count = next((at + 1 for at, token in enumerate(row.tolist()) if token in ends), len(row))
        row[count:] = padding_token(harness.TINY)
        counts.append(count)
    return tokens, counts


def layer_inputs(rows: Any, at: Any, position: Any, start: Any = None, shared: Any = None) -> Inputs:
    """What a layer gets of the tokens ``at`` int32 [B, T] of ``rows``: q [B, H, G, N, D], k, v and RoPE frequencies."""
    *qkv, inv_freq = rows
    q, k, v = (jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 3), -1, 1), axis=-2) for x in qkv)
    return Inputs(
        query=q, key=k, value=v, position=position, tokens=at, inv_freq=inv_freq, shared=shared, start=start
    )  # fmt: skip


def batch(name: str, heads: int, groups: int, dim: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v and lengths of random rows at every edge length of the method, with room for the decode steps."""
    lengths = np.array(harness.oracle(name).LENGTHS)
    q, k, v = harness.random_tokens(seed, len(lengths), heads, groups, lengths.max() + STEPS, dim)
    return q, k, v, lengths


def edges(name: str, seed: int) -> tuple[np.ndarray, ...]:
    """q, k, v and lengths of random rows as in `batch`, of the heads and the dimension of `subject`: see `run_in_fours`."""
    lengths = np.array(harness.oracle(name).LENGTHS)
    batch, heads, groups, total, dim = tokens_of_layer()[0].shape
    return *harness.random_tokens(seed, len(lengths), heads, groups, total, dim), lengths


def drive_alike(method: Any, q: Any, k: Any, v: Any, lengths: Any, inv_freq: Any = None, **options: Any) -> harness.Drive:
    """`harness.drive` of at most four rows in the program that `subject` runs: as many rows, tokens and prompt slots.

    A method's own tests that take these sizes compile nothing for the settings that other tests have run.
    """
    rows = np.minimum(np.arange(len(LENGTHS)), len(lengths) - 1)  # the last row again where there are fewer
    missing = tokens_of_layer()[1].shape[2] - k.shape[2]
    q, k, v = (np.pad(x[rows], [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) for x in (q, k, v))
    return harness.drive(method, q, k, v, np.array(lengths)[rows], prompt=int(LENGTHS.max()), inv_freq=inv_freq, **options)


def of_state(module: Any, state: Any, row: int) -> dict[str, np.ndarray]:
    """What an oracle is given of a row's state, see `tests.oracles`."""
    return {name: np.asarray(operator.attrgetter(at)(state)[row]) for name, at in vars(module).get("STATE", {}).items()}


def compare(
    name: str, knobs: Any, q: Any, k: Any, v: Any, lengths: Any, inv_freq: Any, got: harness.Drive, tolerance: float = 1e-4
) -> list[Any]:
    """Assert that each row of a `harness.Drive` is what the oracle says; returns the oracle's traces."""
    module, traces = harness.oracle(name), []
    steps, heads = len(got.outputs), k.shape[1]
    for row, length in enumerate(lengths):
        end = length + steps
        given = of_state(module, got.state, row)
        want = module.run(q[row, :, :, :end], k[row, :, :end], v[row, :, :end], int(length), inv_freq, **knobs, **given)
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want.prompt, atol=tolerance, rtol=0)
        for step in range(steps):
            label = f"{name}: row {row} (prompt {length}), step {step}"
            for h in range(heads):
                attended = set(np.flatnonzero(got.attended[step, row, h]).tolist())
                kept = set(np.flatnonzero(got.kept[step, row, h]).tolist())
                assert attended == want.attended[step][h], f"{label}, head {h}: attended"
                assert kept == want.kept[step][h], f"{label}, head {h}: kept"
            np.testing.assert_allclose(got.outputs[step, row], want.outputs[step], atol=tolerance, rtol=0, err_msg=label)
        traces.append(want)
    return traces


def against_oracle(
    name: str, data: Any, lengths: Any, inv_freq: Any = None, fields: Any = None, **knobs: Any
) -> tuple[harness.Drive, list[Any]]:
    """Drive the example with some knobs changed through q, k and v, and `compare` it: the drive and the oracle's traces.

    ``fields`` are knobs that the oracle does not have. Rows of the sizes of `drive_alike` share its program.
    """
    (q, k, v), knobs = data, {**harness.oracle(name).KNOBS, **knobs}
    inv_freq, most = harness.frequencies(q.shape[-1]) if inv_freq is None else inv_freq, int(max(lengths))
    method = harness.example(name, **knobs, **(fields or {}))
    sizes = *q.shape[1:3], q.shape[4], q.shape[3] - most
    if len(lengths) <= len(LENGTHS) and most <= LENGTHS.max() and sizes == (2, 2, 16, STEPS):
        got = drive_alike(method, q, k, v, lengths, inv_freq)
    else:
        got = harness.drive(method, q, k, v, lengths, prompt=most, inv_freq=inv_freq)
    return got, compare(name, knobs, q, k, v, lengths, inv_freq, got)


def run(name: str, knobs: Any, q: Any, k: Any, v: Any, lengths: Any, inv_freq: Any, **options: Any) -> int:
    """Drive the example with ``knobs`` through the rows and `compare` it with its oracle.

    ``options`` go to `harness.drive`, except ``fields``: fields of the method that the oracle does not have.
    """
    method = harness.example(name, **options.pop("fields", {}), **knobs)
    got = harness.drive(method, q, k, v, lengths, prompt=int(max(lengths)), inv_freq=inv_freq, **options)
    return sum(len(trace.outputs) for trace in compare(name, knobs, q, k, v, lengths, inv_freq, got))


def run_in_fours(name: str, knobs: Any, q: Any, k: Any, v: Any, lengths: Any, inv_freq: Any, fields: Any = None) -> int:
    """`run` by `drive_alike`, four rows at a time; returns the number of steps compared."""
    method, compared = harness.example(name, **(fields or {}), **knobs), 0
    for first in range(0, len(lengths), len(LENGTHS)):
        four = [x[first : first + len(LENGTHS)] for x in (q, k, v, lengths)]
        traces = compare(name, knobs, *four, inv_freq, drive_alike(method, *four, inv_freq))
        compared += sum(len(trace.outputs) for trace in traces)
    return compared


@functools.partial(jax.jit, static_argnames=("prompt", "room"))
def prefill_layer(method: Any, data: Any, lengths: Any, ids: Any = None, *, prompt: int, room: int) -> Any:
    """The state of one layer after the first ``lengths`` [B] of the tokens q [B, H, G, T, D], k and v [B, H, T, D].

    ``ids`` are the ids of positions; None: positions are ids. ``prompt`` is the padded length of the prompts.
    """
    batch, heads, groups, _, dim = data[0].shape
    sizes = {"batch": batch, "num_kv_heads": heads, "group_size": groups, "head_dim": dim, "dtype": "float32"}
    spec = LayerSpec(**sizes, prompt_slots=prompt, max_new_tokens=room)
    at = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32)[None], (batch, prompt))
    position = jnp.where(at < jnp.asarray(lengths)[:, None], at, EMPTY)
    _, state = method.attend(method.init(spec), _inputs(data, position, ids, 0))
    return method.finish(state, spec)


@jax.jit
def feed_layer(method: Any, state: Any, data: Any, position: Any, ids: Any = None) -> tuple[Any, Any]:
    """Output and state after one call with the tokens at ``position`` [B, T], of which empty ones are padding."""
    return method.attend(state, _inputs(data, jnp.asarray(position, jnp.int32), ids))


def _inputs(data: Any, position: Any, ids: Any, start: int | None = None) -> Inputs:
    at, rows = jnp.maximum(position, 0), (*map(jnp.asarray, data), jnp.asarray(harness.frequencies(data[0].shape[-1])))
    given = layer_inputs(rows, at, position, start)
    return given if ids is None else dataclasses.replace(given, tokens=jnp.asarray(ids)[at])
