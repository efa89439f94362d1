"""Retrieval: by default each of `tests.harness.SCANS`, `PAGES` and `GUESSED` meets its oracle here, all in one program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.over_cache import attend_selected, masked_attention
from kvjax.cache import PlainCache
from kvjax.cache.offload import offload
from kvjax.methods import SOCKET, InfiniGen, MagicPIG, PQCache, RetrievalAttention
from kvjax.methods.pqcache.product_codes import kmeans
from kvjax.protocol.method import LayerSpec, Prompt, Step, settle_due
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import EMPTY
from kvjax.testing.model import TinyModel
from pallas_kernels.formats import bit_codes
from tests.harness import GUESSED, PAGES, SCANS, example, oracle, random_tokens, small

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPT, STEPS, DIM = 40, 6, 8
LENGTHS = np.array([1, 7, 13, PROMPT])


@functools.partial(jax.jit, static_argnames="modes")
def decode(methods, q, guess, k, v, modes):
    """Steps after the prompts, without rotation: outputs [N, B, H, G, D] under each way to attend, positions, cost, counters.

    ``guess`` has the guesses of the queries q.
    """
    at = jnp.arange(PROMPT + STEPS, dtype=jnp.int32)[None, None]
    stored = jnp.broadcast_to(at < LENGTHS[:, None, None], k.shape[:3])
    first = PlainCache(
        key=jnp.where(stored[..., None], k, jnp.nan),
        value=jnp.where(stored[..., None], v, jnp.nan),
        position=jnp.where(stored, at, EMPTY),
        cursor=jnp.asarray(LENGTHS, jnp.int32),
    )
    none = jnp.zeros((*k.shape[:2], 0), jnp.float32)
    asked = jnp.asarray(LENGTHS, jnp.int32)[:, None] + jnp.arange(-PROMPT, 0, dtype=jnp.int32)[None]
    prompt = Prompt(
        query=jnp.take_along_axis(q, jnp.maximum(asked, 0)[:, None, None, :, None], axis=3),
        query_position=jnp.maximum(asked, EMPTY), mass=none, tokens=jnp.zeros((len(k), 0), jnp.int32),
    )  # fmt: skip

    def run(method, modes):
        def step(carry, number):
            cache, aux = carry
            position = (LENGTHS + number).astype(jnp.int32)[:, None]
            query, guessed, key, value = (
                jnp.take_along_axis(x, position.reshape(-1, *(1,) * (x.ndim - 1)), axis=-2) for x in (q, guess, k, v)
            )
            cache = cache.append(key, value, position)
            given = Step(query=query, position=position, tokens=position, shared=None, guess=guessed)
            chosen = method.select(cache, aux, given)
            outs = []
            for masked in modes:
                with masked_attention() if masked else contextlib.nullcontext():
                    outs.append(attend_selected(query[..., 0, :], cache, chosen)[0])
            slots, mask = chosen.tokens(cache)
            attended = jnp.where(mask, jnp.take_along_axis(cache.position, slots, axis=2), EMPTY)
            _, aux = method.update(cache, aux, dataclasses.replace(given, select_aux=chosen.select_aux), None)
            (state,) = settle_due((method,), (SlotState(cache=cache, aux=aux),))
            return (state.cache, state.aux), (outs, attended)

        cache, aux = method.compress(first, prompt, STEPS)
        if method.offload:  # copies of all tokens that the steps store, so nothing must be written to host memory
            cache = offload(cache, method.near(cache.num_slots, STEPS), values_only=method.keys_stay)
        end, found = jax.lax.scan(step, (cache, aux), jnp.arange(STEPS, dtype=jnp.int32))
        return *found, method.count(*end, None), method.counters(end[1], None)

    return [run(method, ways) for method, ways in zip(methods, modes, strict=True)]


@pytest.mark.slow
def test_they_attend_to_what_the_oracles_attend_to():
    """NaN in empty slots and rows shorter than every region; on the device and, of two methods, in host memory too.

    One method whose lists are attended to shows it for all that have lists, and that a mask gives the same; test_oracles.py
    and test_contract.py do so for each. test_offload.py has all methods in host memory.
    """
    q, k, v = random_tokens(3, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM)
    guess = random_tokens(4, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM)[0]
    names = *SCANS, *PAGES, *GUESSED, "magicpig", "retroinfer", "retrievalattention"
    away = {"offload": True}
    changed = [{}] * (len(names) - 3) + [{"capacity": None}, away, away]
    ways = {"retrievalattention": (False, True), "magicpig": (False, True), "retroinfer": (False,)}
    modes = tuple((False,) if change == away else ways.get(name, ()) for name, change in zip(names, changed, strict=True))
    methods = [example(name, **knobs) for name, knobs in zip(names, changed, strict=True)]
    found = decode(methods, q, guess, k, v, modes)
    sampled = {}
    for name, change, (outs, attended, cost, counters) in zip(names, changed, found, strict=True):
        left_out = 0
        change = {knob: 1 << 20 for knob in change if knob != "offload"}
        for row, length in enumerate(LENGTHS.tolist()):
            parts = (x[row, ..., : length + STEPS, :] for x in (q, k, v))
            knobs = {**oracle(name).KNOBS, **change}
            knobs |= {"guess": guess[row, :, :, : length + STEPS]} if name in GUESSED else {}
            want = oracle(name).run(*parts, length, np.zeros(DIM // 2), **knobs)
            for step in range(STEPS):
                label = f"{name}: prompt {length}, step {step}"
                got = [x[x >= 0].tolist() for x in np.asarray(attended[step, row])]
                assert [set(x) for x in got] == want.attended[step], label
                assert [len(x) for x in got] == [len(set(x)) for x in got], f"{label}: a slot twice"
                left_out += length + step + 1 - min(map(len, got))
                for out in outs:
                    np.testing.assert_allclose(out[step, row], want.outputs[step], atol=1e-4, rtol=0, err_msg=label)
            np.testing.assert_array_equal(cost[0][row], [len(x) for x in want.attended[-1]])
            if name == "magicpig":
                sampled[row, not change] = [[len(x) for x in each] for each in want.attended], counters
        assert left_out > 0, name
    for row in range(len(LENGTHS)):  # a step that samples more than there is room for is counted, and no other
        (every, none), (kept, counters) = (sampled[row, capped] for capped in (False, True))
        assert not none
        np.testing.assert_allclose(counters["overflowed"][row], (np.array(every) > np.array(kept)).mean(), rtol=1e-6)
    assert 0 < counters["overflowed"][-1] < 1


def test_packed_codes_are_read_back():
    """Whether they were packed together or came one by one; padding, behind the last slot, changes nothing."""
    codes = np.random.default_rng(0).integers(0, 1 << 16, (2, 1, 21))

    @jax.jit
    def both(codes):
        found = []
        for bits in (5, 12):
            code = codes & ((1 << bits) - 1)
            packed = bit_codes.pack(jnp.where(jnp.arange(21)[None, None] < 13, code, 0), bits)
            slot = jnp.asarray([[13, 14, 15, 16, 17, 18, 19, 20, 21]] * 2, jnp.int32)
            new = jnp.where(slot < 21, jnp.take_along_axis(code[:, 0], jnp.minimum(slot, 20), axis=1), 0)
            made = bit_codes.add(packed, new[:, None], slot, bits)
            found.append((code, bit_codes.unpack(bit_codes.pack(code, bits), 21, bits), bit_codes.unpack(made, 21, bits)))
        return found

    for want, together, added in both(jnp.asarray(codes, jnp.int32)):
        np.testing.assert_array_equal(together, want)
        np.testing.assert_array_equal(added, want)


def state_of(method, head_dim=128, slots=4096):
    spec = LayerSpec(
        batch=1, num_kv_heads=2, group_size=4, head_dim=head_dim, dtype="bfloat16", prompt_slots=slots - 64,
        max_new_tokens=64,
    )  # fmt: skip
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


@pytest.mark.parametrize(
    "method, per_token, more",
    [
        (RetrievalAttention(), 0, 4 + 2 * 4),  # the slot where the prompt's last tokens begin; what was found
        (PQCache(), 1.5, 4 + 2 * (2 * 64 * 64 * 4)),  # the prompt's tokens; codebooks
        (InfiniGen(), 50, 2 * (128 * 25 * 4 + 4 * 128 * 2)),  # the matrix; the last guesses
        (SOCKET(), 60 + 2, 0),
        (SOCKET(num_bits=10), 120 + 2, 0),
        (MagicPIG(), 300, 4 + 4 + 2 * (128 * 4 + 2 * 4 - 64 * 300)),  # no bucket of later tokens; the mean key, counts
    ],
    ids=lambda x: type(x).__name__,
)
def test_codes_take_their_bytes_per_token(method, per_token, more):
    """Per token and KV head, in bfloat16 at the methods' own sizes; and what does not grow."""
    found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_of(method).aux))
    assert found == per_token * 2 * 4096 + more


def test_what_cannot_be_cut_or_clustered_is_refused():
    with pytest.raises(ValueError, match="PQCache: num_subvectors must divide head_dim=16, got 3"):
        state_of(PQCache(num_subvectors=3, num_centroids=16), head_dim=16)
    with pytest.raises(ValueError, match="PQCache: a key must have at most 16 bits, got num_subvectors=4 .*=64.* are 24"):
        PQCache(num_subvectors=4)
    key, used = jax.ShapeDtypeStruct((1, 1, 10, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1, 10), bool)
    for parts, count, said in ((2, 11, "got 10 keys and 11 centroids"), (3, 4, "multiple of the 3 parts .* head_dim=8")):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(functools.partial(kmeans, parts=parts, count=count, iterations=1), key, used)


def test_the_structure_of_a_state_does_not_depend_on_sizes():
    """A saved cache is loaded into the structure of another prompt; this one has fewer slots than centroids."""
    for method in (RetrievalAttention(), PQCache(num_centroids=256), SOCKET(), MagicPIG(), InfiniGen()):
        assert jax.tree.structure(state_of(method, slots=65)) == jax.tree.structure(state_of(method))


def test_some_layers_of_magicpig_are_dense():
    layers = [type(MagicPIG().for_layer(layer, 40)).__name__ for layer in range(40)]
    assert [layer for layer, name in enumerate(layers) if name == "Full"] == [0, 16, 32]
    assert set(layers) == {"Full", "MagicPIG"}
    assert {type(small(MagicPIG, dense_every=0).for_layer(layer, 40)).__name__ for layer in range(40)} == {"MagicPIG"}


def test_memory_needed_counts_the_codes():
    sizes = {"batch": 1, "prompt_slots": 4096, "max_new_tokens": 64, "chunk_size": 4096}
    tiny = TinyModel(num_layers=1)
    full, socket = (kvjax.memory_needed(name, tiny, **sizes).device for name in ("full", "socket"))
    each = 60 + jnp.dtype(tiny.dtype).itemsize
    assert socket - full == tiny.num_kv_heads * (4096 + 64) * each
