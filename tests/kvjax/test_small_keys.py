"""Keys of fewer numbers, `tests.harness.SMALL`: by default they meet their oracles here, both in one program."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import PlainCache
from kvjax.methods import ParisKV, Quest, ShadowKV, SnapKV, ThinK
from kvjax.methods.shadowkv.method import ShadowState
from kvjax.protocol.method import Inputs, LayerSpec, Prompt
from kvjax.protocol.slots import SlotState
from kvjax.testing.laws import same
from kvjax.testing.layer import drive
from kvjax.wrappers import DenseBelow, Periodic, Stages, Twilight
from models import shapes
from tests import goldens
from tests.harness import SMALL, example, frequencies, oracle, random_tokens
from tests.kvjax.cases import subject
from tests.oracles.plain import attend_to, best, rotate_all
from tests.oracles.quest import bound

pytestmark = pytest.mark.usefixtures("quick_compile")
LLAMA = dataclasses.replace(shapes.llama31_8b(), dtype="bfloat16")
SPEC = LayerSpec(
    batch=1, num_kv_heads=8, group_size=4, head_dim=128, dtype="bfloat16", prompt_slots=4096, max_new_tokens=64
)  # fmt: skip


PROMPT, STEPS, DIM = 30, 3, 8
LENGTHS = np.array([1, 7, 18, PROMPT], np.int32)
INV_FREQ = frequencies(DIM)


@jax.jit
def decode(states, q, k, v):
    """Steps after the prompts of ``states``: by the method's name, outputs, positions attended to, and the last state."""
    spec = LayerSpec(
        batch=len(LENGTHS), num_kv_heads=2, group_size=2, head_dim=DIM, dtype="float32", prompt_slots=PROMPT,
        max_new_tokens=STEPS,
    )  # fmt: skip

    def run(name, state):
        method = example(name)

        def step(state, number):
            at = (LENGTHS + number)[:, None]
            query, key, value = (jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=-2) for x in (q, k, v))
            given = Inputs(query=query, key=key, value=value, position=at, tokens=at, inv_freq=INV_FREQ, shared=None)
            attended = method.chosen(state, given)
            out, state = method.attend(state, given)
            return state, (out[..., 0, :], attended)

        state = method.finish(state, spec)
        state, found = jax.lax.scan(step, state, jnp.arange(STEPS, dtype=jnp.int32))
        return *found, state

    return {name: run(name, state) for name, state in states.items()}


def test_steps_equal_the_oracles():
    """NaN in empty slots; rows shorter than everything that stays whole; test_oracles.py also reads prompts."""
    q, k, v = random_tokens(3, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM)
    at = np.arange(PROMPT + STEPS)
    held = np.broadcast_to(at < LENGTHS[:, None, None], k.shape[:3])

    def stored(key):
        key, value = (np.where(held[..., None], x, np.nan) for x in (key, v))
        return PlainCache(key=key, value=value, position=np.where(held, at, -1).astype(np.int32), cursor=LENGTHS)

    window = LENGTHS[:, None] - oracle("think").KNOBS["obs_window"] + np.arange(oracle("think").KNOBS["obs_window"])
    turned = rotate_all(q, INV_FREQ).astype(np.float32)
    last = np.take_along_axis(turned, np.maximum(window, 0)[:, None, None, :, None], axis=3)
    none = np.zeros((len(k), 0), np.int32)
    prompt = Prompt(
        query=last, query_position=np.maximum(window, -1).astype(np.int32), mass=np.zeros((*k.shape[:2], 0), np.float32),
        tokens=none,
    )  # fmt: skip
    states = {
        "shadowkv": ShadowState(cache=stored(k), inv_freq=np.tile(INV_FREQ, (len(k), 1))),
        "think": SlotState(cache=stored(rotate_all(k, INV_FREQ).astype(np.float32)), prompt=prompt),
    }
    assert tuple(states) == SMALL
    for name, (outs, positions, state) in decode(states, q, k, v).items():
        module = oracle(name)
        for row, length in enumerate(LENGTHS.tolist()):
            parts = (x[row, ..., : length + STEPS, :] for x in (q, k, v))
            given = {field: np.asarray(getattr(state, field)[row]) for field in vars(module).get("STATE", ())}
            want = module.run(*parts, length, INV_FREQ, **module.KNOBS, **given)
            for step in range(STEPS):
                got = [x[x >= 0].tolist() for x in np.asarray(positions[step, row])]
                assert [sorted(x) for x in got] == [sorted(x) for x in want.attended[step]], f"{name}, row {row}, step {step}"
                np.testing.assert_allclose(outs[step, row], want.outputs[step], atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.thorough
def test_the_released_code_of_shadowkv_attends_alike():
    golden = json.loads((goldens.FOLDER / "kvjax" / "shadowkv.json").read_text())
    heads, group, total, dim = golden["sizes"]
    rng, prompt = np.random.default_rng(golden["seed"]), golden["prompt"]
    q, k, v = (rng.normal(size=(1, n, total, dim)).astype(np.float32) for n in (heads * group, heads, heads))
    inv_freq = (golden["base"] ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
    method = ShadowKV(**golden["knobs"])
    got = drive(method, q.reshape(1, heads, group, total, dim), k, v, [prompt], prompt=prompt, inv_freq=inv_freq)
    for step, (chosen, out) in enumerate(zip(golden["chosen"], golden["outputs"], strict=True)):
        np.testing.assert_array_equal(got.chosen[step, 0, :, -len(chosen[0]) :], chosen)
        np.testing.assert_allclose(got.outputs[step, 0], out, atol=1e-4, rtol=0)


def state_of(method, spec=SPEC):
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def holding(part, count):
    """The storage with its first slots in use."""
    at = np.arange(part.position.shape[2])
    position = np.broadcast_to(np.where(at < count, at, -1).astype(np.int32), part.position.shape)
    return dataclasses.replace(part, position=position)


def test_shadowkv_takes_72_bytes_per_token_and_kv_head():
    """Of a layer of Llama-3.1-8B: 40 + 32 bytes a token and KV head for keys and landmarks; values on the host."""
    shadow, tokens = state_of(ShadowKV()).shadow, 4096
    assert size(shadow.left) == tokens * 160 * 2 == tokens * 8 * 40
    assert size((shadow.landmark, shadow.right)) == 8 * (tokens * 32 + 160 * 128 * 2)
    unchanged = state_of(ShadowKV()).cache
    assert unchanged.num_slots == 48 * 8 + 5 * 8 - 1 + 64
    sizes = {"batch": 1, "prompt_slots": 131072, "max_new_tokens": 64}
    full, here, away = (
        kvjax.memory_needed(method, LLAMA, **sizes) for method in (kvjax.methods.Full(), ShadowKV(), ShadowKV(offload=True))
    )
    values = 32 * 8 * 131072 * 256
    assert away.host == 2 * values  # as long as the prompt is read, keys too
    assert here.device < full.device and away.device < full.device / 5


def test_think_takes_420_bytes_per_token_and_kv_head():
    """160 + 256 bytes a token and KV head, and its position; alone, and after an eviction."""
    whole = 32 + 64
    state = state_of(ThinK()).cache
    assert size(state.older) == 8 * (4096 * (160 + 256 + 4) + 77 * 4) + 4
    assert size((state.key, state.value)) == 8 * whole * 512
    stages = Stages(evict=SnapKV(budget=1024), retrieve=ThinK())
    thinner = state_of(stages).cache
    assert size(thinner.older) == 8 * (1024 * (160 + 256 + 4) + 77 * 4) + 4
    sizes = {"batch": 1, "prompt_slots": 8192, "max_new_tokens": 64}
    full, thin = (kvjax.memory_needed(method, LLAMA, **sizes).device for method in (kvjax.methods.Full(), ThinK()))
    assert 0.8 * full < thin < 0.83 * full


def test_shadowkv_counts_tokens_values_and_factors():
    """Unchanged tokens, the chosen tokens' values and rows of A, all of B. Landmarks and flags of chunks are metadata."""
    method = ShadowKV(budget=32, rank=12)
    spec = dataclasses.replace(SPEC, prompt_slots=1024)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    unchanged = np.where(np.arange(state.cache.num_slots) < 100, 0, -1).astype(np.int32)
    cache = dataclasses.replace(state.cache, position=np.broadcast_to(unchanged, state.cache.position.shape))
    cost = jax.jit(method.cost, static_argnums=1)
    for free, found in ((70, 32), (3, 24)):
        can_be = np.broadcast_to(np.arange(128) < free, state.shadow.open.shape)
        shadow = dataclasses.replace(state.shadow, open=can_be, chunks=np.array([118], np.int32))
        got = cost(dataclasses.replace(state, cache=cache, shadow=shadow), None)
        np.testing.assert_array_equal(got.attended, [100 + found])
        np.testing.assert_array_equal(got.kv_bytes, [8 * (100 * 512 + found * (256 + 24) + 12 * 256)])
        np.testing.assert_array_equal(got.metadata_bytes, [8 * 118 * 257])
        np.testing.assert_array_equal(got.bus_bytes, [0])


def test_think_counts_the_channels_that_a_step_reads():
    """A token of the prompt counts with what is stored of its key, and a step reads the numbers of the channels."""
    method, rows = example("think"), 2

    spec = LayerSpec(
        batch=rows, num_kv_heads=2, group_size=2, head_dim=64, dtype="float32", prompt_slots=20, max_new_tokens=4
    )
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    cache = state.cache

    cache = dataclasses.replace(cache, older=holding(cache.older, 14), newer=holding(cache.newer, 6))
    found = jax.jit(method.cost)(dataclasses.replace(state, cache=cache), None)
    np.testing.assert_array_equal(found.attended, [20] * rows)
    np.testing.assert_array_equal(found.kv_bytes, [2 * 4 * (14 * (48 + 64) + 6 * 128)] * rows)
    np.testing.assert_array_equal(found.metadata_bytes, [2 * 39 * 4] * rows)


def thin_pages(q, k, v, inv_freq, prompt, method):
    """ThinK and then Quest in float64, by their definitions: outputs and positions attended to, of each step.

    Tokens with whole keys begin a new page, behind the pages of tokens with thin keys.
    """
    evict, retrieve = method.evict, method.retrieve
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, total, dim = k.shape
    packed, size = max(prompt - evict.num_recent, 0), retrieve.page_size
    for h in range(heads):
        asked = (q[h, :, max(prompt - evict.obs_window, 0) : prompt] ** 2).mean(axis=(0, 1))
        score = dict(enumerate(asked * (k[h, :prompt] ** 2).mean(axis=0)))
        dropped = set(range(dim)) - best(score, dim - int(dim * (1 - evict.channels) + 1e-6))
        k[h, :packed, sorted(dropped)] = 0
    for t in range(prompt, total):
        chosen = []
        for h in range(heads):
            pages = [range(i, min(i + size, packed)) for i in range(0, packed, size)]
            pages += [range(i, min(i + size, t + 1)) for i in range(packed, t + 1, size)]
            score = {
                number: max(bound(q[h, g, t], k[h, page].min(axis=0), k[h, page].max(axis=0)) for g in range(q.shape[1]))
                for number, page in enumerate(pages[:-1])
            }
            picked = best(score, retrieve.budget // size - 1) | {len(pages) - 1}
            chosen.append(sorted(i for number in picked for i in pages[number]))
        yield attend_to(q, k, v, t, chosen), chosen


@pytest.mark.parametrize("num_recent", [6, pytest.param(0, marks=pytest.mark.thorough)])
def test_pages_of_packed_keys_are_chosen_as_the_loops_say(num_recent):
    """Quest sees a dropped channel as 0, as attention does; rows shorter than what stays whole, and with nothing whole."""
    under_test = subject("thin_pages")
    evict = dataclasses.replace(under_test.method.evict, num_recent=num_recent)
    method = dataclasses.replace(under_test.method, evict=evict)
    got, short = under_test.drive(method=method), 0
    for row, length in enumerate(under_test.lengths):
        parts = (x[row][..., : length + len(got.outputs), :] for x in under_test.rows)
        want = thin_pages(*parts, frequencies(16), length, method)
        for step, (out, chosen) in enumerate(want):
            attended = [np.flatnonzero(x).tolist() for x in got.attended[step, row]]
            assert attended == chosen, f"row {row}, step {step}"
            np.testing.assert_allclose(got.outputs[step, row], out, atol=1e-4, rtol=0)
            short += sum(length + step + 1 - len(x) for x in chosen)
    assert short > 100


@pytest.mark.parametrize("snap", [SnapKV(budget=20, obs_window=5), pytest.param(None, marks=pytest.mark.thorough)])
@pytest.mark.slow
def test_every_page_of_packed_keys_is_think_alone(snap):
    """Copies of all rows give what the packed keys give as they are; and where a third stage goes before."""
    under_test = subject("thin_pages")
    every, evict = Quest(budget=96, page_size=4, num_dense_layers=0), under_test.method.evict
    first = evict if snap is None else Stages(evict=snap, retrieve=evict)
    got, want = (under_test.drive(method=x) for x in (Stages(evict=first, retrieve=every), first))
    same(got, want)
    if snap is not None:
        nested = Stages(evict=snap, retrieve=Stages(evict=evict, retrieve=every))
        same(under_test.drive(method=nested), got)


@pytest.mark.parametrize("outside", [pytest.param(True, marks=pytest.mark.thorough), False])  # False runs both, at 0.5
@pytest.mark.slow
def test_top_p_of_packed_keys(outside):
    """`Twilight` around both stages is `Twilight` as the second; with all of the mass they are the stages alone."""
    under_test = subject("thin_pages")
    evict, retrieve = under_test.method.evict, under_test.method.retrieve

    def made(mass):
        if outside:
            return Twilight(method=under_test.method, mass=mass)
        return Stages(evict=evict, retrieve=Twilight(method=retrieve, mass=mass))

    same(under_test.drive(method=made(1.0)), under_test.plain)
    got = under_test.drive(method=made(0.5), poison=True)
    assert not (got.attended & ~under_test.plain.attended).any() and got.attended.sum() < under_test.plain.attended.sum()
    same(got, under_test.drive(method=Twilight(method=under_test.method, mass=0.5)))


def test_bytes_and_cost_of_pages_of_packed_keys():
    """The prompt's keys stay packed. A step reads packed bytes of what it attends to beyond whole keys, and bounds."""
    method = Stages(evict=ThinK(), retrieve=Quest(budget=256, num_dense_layers=0))
    state = state_of(method)
    assert size(state.cache.older) == 8 * (4096 * (160 + 256 + 4) + 77 * 4) + 4
    assert state.cache.num_slots == 4096 + 32 + 64
    odd = state_of(method, dataclasses.replace(SPEC, prompt_slots=4090)).cache
    assert odd.older.key.shape[2] == 4096  # the whole keys begin with a page

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    newer = dataclasses.replace(holding(zeros.cache.newer, 40), cursor=np.array([40], np.int32))
    cache = dataclasses.replace(zeros.cache, older=holding(zeros.cache.older, 1000), newer=newer)
    found = jax.jit(method.cost)(dataclasses.replace(zeros, cache=cache), None)
    attended = 15 * 16 + 8
    np.testing.assert_array_equal(found.attended, [attended])
    np.testing.assert_array_equal(found.kv_bytes, [8 * ((attended - 40) * 416 + 40 * 512)])
    np.testing.assert_array_equal(found.metadata_bytes, [8 * ((63 + 3) * 512 + 77 * 4)])
    full, pages = (
        kvjax.memory_needed(x, LLAMA, batch=1, prompt_slots=8192, max_new_tokens=64).device for x in (Quest(), method)
    )
    assert pages < 0.85 * full


def test_a_step_widens_no_more_than_it_chooses():
    """No array of a step has all slots and all channels, but the storage itself."""
    method = Stages(evict=ThinK(), retrieve=Quest(budget=256, num_dense_layers=0))
    state, one = state_of(method), jax.ShapeDtypeStruct
    given = Inputs(
        query=one((1, 8, 4, 1, 128), jnp.bfloat16), key=one((1, 8, 1, 128), jnp.bfloat16),
        value=one((1, 8, 1, 128), jnp.bfloat16), position=one((1, 1), jnp.int32), tokens=one((1, 1), jnp.int32),
        inv_freq=one((64,), jnp.float32), shared=None,
    )  # fmt: skip
    traced = jax.make_jaxpr(method.attend)(state, given)
    made = [x.aval for equation in traced.jaxpr.eqns for x in equation.outvars]
    assert all(x.size < 8 * 4096 * 128 for x in made if getattr(x, "ndim", 0) >= 4)
    assert any(x.shape == (1, 8, 256, 128) for x in made)


@pytest.mark.thorough  # test_checkpoint.py shows it for another method
def test_a_cache_of_packed_pages_goes_on_from_disk(tmp_path):
    under_test = subject("thin_pages")
    kvjax.save_cache(tmp_path / "cache", under_test.read())
    loaded = kvjax.load_cache(tmp_path / "cache", config=under_test.model, method=under_test.method)
    np.testing.assert_array_equal(under_test.go_on(loaded).tokens, under_test.base[1].tokens)


def packed_pages(**knobs):
    return Stages(evict=ThinK(), retrieve=Quest(**knobs))


def test_layers_that_quest_leaves_dense_attend_to_packed_keys():
    layers = [packed_pages().for_layer(layer, 4) for layer in range(4)]
    assert [x.selects for x in layers] == [False, False, True, True]
    assert packed_pages().offloaded(True) is None
    with pytest.raises(ValueError, match="ThinK has a storage of its own and cannot run with kv_dtype='int8'"):
        kvjax.memory_needed(packed_pages(), LLAMA, batch=1, prompt_slots=64, max_new_tokens=8, kv_dtype="int8")


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Stages(evict=ThinK(), retrieve=ParisKV()), "must choose from packed keys .* got ParisKV"),
        (lambda: Stages(evict=ThinK(), retrieve=DenseBelow(length=9, method=Quest())), "got DenseBelow"),
        (lambda: packed_pages(offload=True), "what ThinK packs stays on the device; Quest .* offload=False, got True"),
        (lambda: Stages(evict=packed_pages(), retrieve=Quest()), "Stages chooses slots of its packed keys already"),
        (lambda: Stages(evict=ThinK(), retrieve=ThinK()), "ThinK has dropped channels of keys already, got ThinK"),
        (lambda: Stages(evict=ThinK(), retrieve=SnapKV()), "retrieve must keep every slot .* but SnapKV evicts"),
        (lambda: DenseBelow(length=9, method=packed_pages()), "Stages drops channels .*, which cannot be undone"),
        (lambda: Periodic(evict=packed_pages()), "evict must discard tokens, but Stages keeps every token"),
        (lambda: DenseBelow(length=9, method=ThinK()), "ThinK drops channels .*, which cannot be undone"),
        (lambda: Twilight(method=ThinK()), "ThinK attends to all that it keeps"),
        (lambda: Periodic(evict=ThinK()), "evict must discard tokens, but ThinK keeps every token"),
        (lambda: Stages(evict=SnapKV(), retrieve=ShadowKV()), "must be a method that chooses cache slots"),
        (lambda: ShadowKV(budget=7), r"budget must be .* at least 8 tokens \(one chunk of chunk_size=8\), got 7"),
        (lambda: ThinK(channels=0.0), "channels must be .* above 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
