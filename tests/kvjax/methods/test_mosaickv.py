"""MosaicKV beyond the laws of every method: its packing, its knobs against the oracle, its storage, its dynamic strategy."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.method import Inputs, LayerSpec, num_bytes
from kvjax.methods import Full
from kvjax.methods.mosaickv import packing
from kvjax.methods.mosaickv.method import MosaicKV
from tests.harness import drive, frequencies, random_tokens
from tests.oracles import full, mosaickv
from tests.oracles.plain import rotate_all

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("mosaickv")]
STEPS = 18  # two flushes of a buffer of 8


def bases(state, row):
    """What the oracle takes from an implementation: keyword arguments of `mosaickv.run`."""
    return {name: np.asarray(getattr(state, name)[row]) for name in mosaickv.STATE}


def check(knobs, data, lengths, *, steps=STEPS, inv_freq=None, tolerance=1e-4, **fields):
    """Drive a batch and assert that every row is what the oracle says; returns the oracle's traces and the drive."""
    q, k, v = data
    inv_freq = frequencies(q.shape[-1]) if inv_freq is None else inv_freq
    got = drive(MosaicKV(**knobs, **fields), q, k, v, lengths, prompt=max(lengths), inv_freq=inv_freq)
    assert len(got.outputs) == steps
    traces = []
    for row, length in enumerate(lengths):
        end = length + steps
        given = (q[row, :, :, :end], k[row, :, :end], v[row, :, :end])
        want = mosaickv.run(*given, length, inv_freq, **knobs, **bases(got.state, row))
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want.prompt, atol=tolerance, rtol=0)
        for step in range(steps):
            label = f"row {row} (prompt {length}), step {step}"
            for h in range(k.shape[1]):
                attended = set(np.flatnonzero(got.attended[step, row, h]).tolist())
                assert attended == want.attended[step][h], f"{label}, head {h}: attended"
            np.testing.assert_allclose(
                got.outputs[step, row], want.outputs[step], atol=tolerance, rtol=0, err_msg=label
            )
        traces.append(want)
    return traces, got


def rows(lengths, *, heads=2, groups=2, dim=16, seed=0, steps=STEPS):
    """Random rows long enough for ``steps`` tokens after each prompt."""
    return random_tokens(seed, len(lengths), heads, groups, max(lengths) + steps, dim)


# ---- packing ------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_paper():
    """170 bytes a token against 512 of bfloat16 keys and values: the 3x that the paper reports."""
    assert packing.bytes_per_token(128, 32, 1, 8) == 170
    assert round(2 * 128 * 2 / packing.bytes_per_token(128, 32, 1, 8), 2) == 3.01
    assert packing.bytes_per_token(128, 32, 1, 16) == 165
    assert packing.bytes_per_token(128, 32, 4, 8) == (64 + 4) * 2.125
    assert packing.bytes_per_token(128, 32, 1, 8, truncate=True) == (64 + 12) * 2.125
    assert packing.bytes_per_token(64, 16, 2, 4) == (32 + 4) * 2.25


def samples(dim, seed=0):
    """float32 [N, D]: random vectors, vectors full of ties, one-hot vectors, a zero vector."""
    rng = np.random.default_rng(seed)
    tied = rng.integers(-2, 3, (24, dim))
    flat = np.ones((1, dim)) * -3
    return np.concatenate([rng.normal(size=(24, dim)), tied, flat, np.eye(dim)[:5], np.zeros((1, dim))]).astype("f4")


pack = jax.jit(packing.pack, static_argnums=(1, 2))
unpack = jax.jit(packing.unpack, static_argnums=2)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dim, rank", [(16, 4), (64, 16), (128, 32), (16, 16), (8, 4)])
def test_packing_round_trip(dim, rank, group):
    """Unpacking gives the vector with all but its largest coordinates zero; ties and zero vectors go to low channels."""
    y = samples(dim)
    values, bitmap = pack(y, rank, group)
    assert values.shape == (len(y), rank) and values.dtype == jnp.float32
    assert bitmap.shape == (len(y), dim // 8) and bitmap.dtype == jnp.uint8
    np.testing.assert_array_equal(np.unpackbits(np.asarray(bitmap), axis=1).sum(axis=1), rank)
    want = np.stack([mosaickv.prune(x.astype(np.float64), rank, group, dim) for x in y])
    np.testing.assert_array_equal(unpack(values, bitmap, dim), want.astype(np.float32))
    mask = unpack(jnp.ones_like(values), bitmap, dim)
    picked = [mosaickv.largest(x.astype(np.float64) ** 2, rank, group, dim) for x in y]
    for row, channels in zip(np.asarray(mask), picked, strict=True):
        assert np.flatnonzero(row).tolist() == channels
    order = np.take_along_axis(y, np.array(picked), axis=1)
    np.testing.assert_array_equal(values, order)  # values lie in channel order


def test_packing_takes_any_leading_axes_and_dtype():
    y = jnp.asarray(samples(16)[:24].reshape(2, 3, 4, 16), jnp.bfloat16)
    values, bitmap = pack(y, 4, 1)
    assert values.shape == (2, 3, 4, 4) and values.dtype == jnp.bfloat16 and bitmap.shape == (2, 3, 4, 2)
    flat_values, flat_bitmap = packing.pack(y.reshape(24, 16), 4, 1)
    np.testing.assert_array_equal(values.reshape(24, 4), flat_values)
    np.testing.assert_array_equal(bitmap.reshape(24, 2), flat_bitmap)
    assert packing.unpack(values, bitmap, 16).dtype == jnp.bfloat16


def energy(y, rank, group=1):
    """Energy of what packing keeps of each vector: float64 [N]."""
    kept = unpack(*pack(y, rank, group), y.shape[-1])
    return np.sum(np.asarray(kept, np.float64) ** 2, axis=-1)


def test_own_channels_keep_at_least_the_energy_of_common_ones():
    """For every vector, and for every choice of common channels that a uniform mask could make."""
    y = samples(32)
    for rank in (4, 8, 12):
        for channels in (np.argsort(-(y**2).sum(axis=0))[:rank], np.arange(rank), np.arange(32 - rank, 32)):
            assert (energy(y, rank) >= np.sum(y[:, channels].astype(np.float64) ** 2, axis=1) - 1e-6).all()


def test_loss_is_monotone_in_rank_and_group():
    y = samples(32)
    for group in (1, 2, 4):
        kept = [energy(y, rank, group) for rank in (4, 8, 12, 32)]
        assert all((more >= less).all() for less, more in zip(kept, kept[1:]))
        np.testing.assert_allclose(kept[-1], np.sum(y.astype(np.float64) ** 2, axis=1), rtol=1e-6)
    for rank in (4, 8, 12):
        kept = [energy(y, rank, group) for group in (4, 2, 1)]
        assert all((fine >= coarse - 1e-6).all() for coarse, fine in zip(kept, kept[1:]))


# ---- the static strategy against the oracle ----------------------------------------------------------------------

EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 40]  # of buffer 8 and segment 16


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"element_group": 2},
        {"element_group": 4, "channels": 0.5},
        {"truncate": True},
        {"truncate": True, "element_group": 2},
        {"per_vector": False},
        {"per_vector": False, "rotate": False, "element_group": 2},
        {"rotate": False},
        {"reduce": "mean"},
        {"reduce": "softmax"},
        {"per_segment": True},
        {"keep_first_block": True},
        {"keep_first_block": True, "per_segment": True, "reduce": "mean"},
        {"segment": 64},
        {"block_size": 8, "fraction": 0.1},
        {"block_size": 2, "buffer": 2, "channels": 0.125},
    ],
    ids=lambda changed: ",".join(f"{name}={value}" for name, value in changed.items()) or "plain",
)
@pytest.mark.thorough
def test_knobs(changed):
    lengths = EDGES if not changed else [7, 9, 24, 40]
    if changed.get("per_vector") is False:
        lengths = [9, 24, 40]  # without a segment nothing says which channels are common ones
    check({**mosaickv.KNOBS, **changed}, rows(lengths, seed=len(str(changed))), lengths)


@pytest.mark.parametrize("heads, groups, dim", [(2, 1, 64), (1, 4, 128), (1, 8, 64)])
@pytest.mark.thorough
def test_head_dims_and_groups(heads, groups, dim):
    lengths = [13, 40]
    check(mosaickv.KNOBS, rows(lengths, heads=heads, groups=groups, dim=dim, seed=dim + groups), lengths)


def test_common_channels_without_a_segment_are_the_first():
    knobs = {**mosaickv.KNOBS, "per_vector": False}
    check(knobs, rows([5]), [5])


def test_one_block_when_the_fraction_is_less():
    """A tenth of eight blocks is one block; selection reads the block's own kept coordinates, not its tokens'."""
    knobs = {**mosaickv.KNOBS, "fraction": 0.01, "segment": 64}
    (trace,), got = check(knobs, rows([32]), [32])
    assert [len(trace.attended[0][h]) for h in range(2)] == [4 + 1] * 2
    assert got.attended[7].sum() == 2 * (4 + 8) and got.attended[8].sum() == 2 * (4 + 1)  # the buffer was flushed


@pytest.mark.thorough
def test_fraction_is_traced_below_its_capacity():
    data = rows([9, 40])
    for fraction in (0.1, 0.45):
        check({**mosaickv.KNOBS, "fraction": fraction}, data, [9, 40], capacity=0.5)
    q, k, v = data
    many = jax.vmap(lambda f: run_steps(MosaicKV(**{**mosaickv.KNOBS, "fraction": f}, capacity=0.5), q, k, v, 40))
    swept = many(jnp.asarray([0.1, 0.45], jnp.float32))
    for at, fraction in enumerate((0.1, 0.45)):
        alone = run_steps(MosaicKV(**{**mosaickv.KNOBS, "fraction": fraction}, capacity=0.5), q, k, v, 40)
        np.testing.assert_allclose(swept[at], alone, atol=1e-5, rtol=0)


def run_steps(method, q, k, v, prompt):
    """Outputs of one decode step behind a dense prompt."""
    state = read(method, q, k, v, prompt, room=1)
    return method.attend(state, inputs(q, k, v, prompt, 1))[0]


@pytest.mark.parametrize("dim", [16, pytest.param(64, marks=pytest.mark.thorough)])
def test_everything_kept_is_dense_attention(dim):
    lengths, steps = [5, 24, 37], STEPS
    q, k, v = rows(lengths, dim=dim)
    knobs = {**mosaickv.KNOBS, "channels": 1.0, "fraction": 1.0}
    got = drive(MosaicKV(**knobs), q, k, v, lengths, prompt=max(lengths))
    for row, length in enumerate(lengths):
        end = length + steps
        want = full.run(q[row, :, :, :end], k[row, :, :end], v[row, :, :end], length, frequencies(dim))
        np.testing.assert_allclose(got.outputs[:, row], want.outputs, atol=1e-4, rtol=0)
        for step in range(steps):
            assert got.attended[step, row].sum() == 2 * (length + step + 1)


@pytest.mark.thorough  # the contract shows it for fewer steps
def test_mask_mode_equals_packed_mode():
    lengths = [9, 40]
    q, k, v = rows(lengths)
    got, want = (
        drive(MosaicKV(**mosaickv.KNOBS, implementation=name), q, k, v, lengths, prompt=40) for name in ("mask", None)
    )
    np.testing.assert_allclose(got.outputs, want.outputs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(got.attended, want.attended)


def test_planted_needle_is_selected():
    """One key along the query, four times as long, is attended at any place."""
    spots, dim = [0, 3, 17, 31, 47, 55], 16
    q, k, v = random_tokens(3, len(spots), 1, 2, 57, dim)
    direction = np.random.default_rng(0).normal(size=dim)
    direction *= 4 / np.linalg.norm(direction)
    for row, spot in enumerate(spots):
        q[row, :, :, 56:] = direction
        k[row, :, spot] = 4 * direction
    still = np.zeros(dim // 2, np.float32)
    got = drive(MosaicKV(**{**mosaickv.KNOBS, "fraction": 0.1}), q, k, v, [56] * len(spots), prompt=56, inv_freq=still)
    for row, spot in enumerate(spots):
        assert got.attended[0, row, 0, spot] and got.attended[0, row, 0].sum() <= 2 * 4 + 1


# ---- bases --------------------------------------------------------------------------------------------------------


def test_bases_keep_scores_and_commute_with_means():
    lengths, dim = [40], 64
    q, k, v = rows(lengths, dim=dim)
    got = drive(MosaicKV(**mosaickv.KNOBS), q, k, v, lengths, prompt=40)
    keys, queries = rotate_all(k[0], frequencies(dim)), rotate_all(q[0], frequencies(dim))
    for name, tokens in zip(mosaickv.STATE, (keys, v[0].astype(np.float64)), strict=True):
        found = np.asarray(getattr(got.state, name)[0], np.float64)
        for h in range(2):
            for s, first in enumerate(range(0, 40, 16)):
                basis, members = found[h, s], tokens[h, first : min(first + 16, 40)]
                assert mosaickv.is_eigenbasis(basis, members)
                np.testing.assert_allclose(basis @ basis.T, np.eye(dim), atol=1e-5)
                turned = members @ basis.T
                for query in queries[h, :, 40]:
                    np.testing.assert_allclose(turned @ (basis @ query), members @ query, atol=1e-4)
                np.testing.assert_allclose(turned.mean(axis=0), basis @ members.mean(axis=0), atol=1e-12)


# ---- storage ------------------------------------------------------------------------------------------------------


def specification(prompt, room, *, batch=1, heads=1, groups=1, dim=16, dtype="float32"):
    return LayerSpec(
        layer=0,
        batch=batch,
        num_kv_heads=heads,
        group_size=groups,
        head_dim=dim,
        dtype=dtype,
        prompt_slots=prompt,
        max_new_tokens=room,
    )


def inputs(q, k, v, first, count, start=None, active=None):
    """`Inputs` for tokens [first, first + count) of every row, those of inactive rows being padding."""
    batch, dim = q.shape[0], q.shape[-1]
    position = jnp.broadcast_to(jnp.arange(first, first + count, dtype=jnp.int32)[None], (batch, count))
    if active is not None:
        position = jnp.where(jnp.asarray(active)[:, None], position, -1)
    return Inputs(
        query=jnp.asarray(q[..., first : first + count, :]),
        key=jnp.asarray(k[..., first : first + count, :]),
        value=jnp.asarray(v[..., first : first + count, :]),
        position=position,
        tokens=position,
        inv_freq=jnp.asarray(frequencies(dim)),
        shared=None,
        start=start,
    )


def read(method, q, k, v, prompt, room):
    """State after a prompt of the same length in every row."""
    batch, heads, groups, _, dim = q.shape
    spec = specification(prompt, room, batch=batch, heads=heads, groups=groups, dim=dim)
    _, state = method.attend(method.init(spec), inputs(q, k, v, 0, prompt, start=0))
    return method.finish(state, spec)


def kept_after(method, spec):
    """Shapes of the state that decoding keeps."""
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


@pytest.mark.parametrize("prompt", [16384, 131072])
def test_uncompressed_cache_is_gone_after_the_prompt(prompt):
    spec = specification(prompt, 64, heads=2, groups=4, dim=128, dtype="bfloat16")
    state = kept_after(MosaicKV(channels=0.25), spec)
    assert num_bytes(state) <= 0.40 * num_bytes(kept_after(Full(), spec))
    for leaf in jax.tree.leaves(state):
        assert not (leaf.shape[-1:] == (128,) and leaf.shape[-2] >= prompt), f"a leaf {leaf.shape} holds the prompt"
        assert math.prod(leaf.shape) <= 2 * prompt * 32 * 1.01, f"a leaf {leaf.shape} is larger than the packed keys"


@pytest.mark.thorough
def test_extend_is_dense_and_flushes():
    """Three tokens at once over the packed prompt and the buffer, which they fill; then a step over what was packed."""
    prompt, count = 37, 3  # 5 tokens in a buffer of 8
    q, k, v = random_tokens(4, 2, 2, 2, 48, 16)
    method = MosaicKV(**mosaickv.KNOBS)
    before = read(method, q, k, v, prompt, room=8)
    out, state = method.attend(before, inputs(q, k, v, prompt, count, active=[True, False]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), state, before)
    step, _ = method.attend(state, inputs(q, k, v, prompt + count, 1, active=[True, False]))
    inv_freq = frequencies(16)
    turned, keys = rotate_all(q[0], inv_freq), rotate_all(k[0], inv_freq)
    row = mosaickv.Row(keys, v[0].astype(np.float64), prompt, all_knobs(mosaickv.KNOBS), **bases(before, 0))
    want = row.extend(turned[:, :, prompt : prompt + count], prompt)
    np.testing.assert_allclose(out[0], want, atol=1e-4, rtol=0)
    assert row.buffer == []
    want, _ = row.decode(turned[:, :, prompt + count], prompt + count)
    np.testing.assert_allclose(step[0, ..., 0, :], want, atol=1e-4, rtol=0)


def all_knobs(knobs):
    """Every knob that the oracle's `Row` reads, at its default unless given."""
    defaults = {
        "element_group": 1,
        "reduce": "max",
        "per_segment": False,
        "keep_first_block": False,
        "truncate": False,
        "rotate": True,
        "per_vector": True,
        "strategy": "static",
        "max_loss": 0.1,
        "max_variance": 0.5,
        "lifetime": 8192,
    }
    return {**defaults, **knobs}


@pytest.mark.thorough
def test_state_after_two_thousand_tokens_equals_state_rebuilt():
    """Steps in the middle and at the end, against everything so far packed at once with the last prompt segment's basis."""
    prompt, steps, dim = 37, 2000, 16
    q, k, v = random_tokens(6, 1, 2, 2, prompt + steps, dim)
    knobs = {**mosaickv.KNOBS, "fraction": 0.1}
    got = drive(MosaicKV(**knobs), q, k, v, [prompt], prompt=prompt)
    turned, keys = rotate_all(q[0], frequencies(dim)), rotate_all(k[0], frequencies(dim))
    for last in (1003, 2000):
        row = mosaickv.Row(keys, v[0].astype(np.float64), prompt, all_knobs(knobs), **bases(got.state, 0))
        row.buffer += range(prompt, prompt + last - 12)
        row.flush()
        for step in range(last - 12, last):
            want, attended = row.decode(turned[:, :, prompt + step], prompt + step)
            np.testing.assert_allclose(got.outputs[step, 0], want, atol=1e-4, rtol=0)
            for h in range(2):
                assert set(np.flatnonzero(got.attended[step, 0, h]).tolist()) == attended[h]


# ---- the dynamic strategy ----------------------------------------------------------------------------------------

DYNAMIC = {
    "strategy": "dynamic",
    "fraction": 0.3,
    "segment": 128,
    "buffer": 16,
    "max_loss": 0.12,
    "max_variance": 0.5,
    "lifetime": 60.0,
}
DYNAMIC_STEPS = 150


@functools.cache
def uneven():
    """Rows whose KV heads want different strategies, and whose decoded tokens lie in other directions than the prompt.

    Keys of head 0 drift slowly and lie in few directions, those of head 1 jump and are nearly isotropic.
    """
    lengths, dim = (150, 40), 32
    total = max(lengths) + DYNAMIC_STEPS
    q, k, v = random_tokens(12, 2, 2, 2, total, dim)
    rng = np.random.default_rng(5)
    for row, length in enumerate(lengths):
        for h, (decay, slow) in enumerate([(1.2, 0.97), (0.35, 0.0)]):
            spectrum = np.arange(1, dim + 1.0) ** -decay * 3
            for first, stop in ((0, length), (length, length + 60), (length + 60, total)):
                for x, keep in ((k, slow), (v, 0.0)):
                    axes = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
                    noise = rng.normal(size=(stop - first, dim)) * spectrum
                    for t in range(1, stop - first):
                        noise[t] = keep * noise[t - 1] + math.sqrt(1 - keep**2) * noise[t]
                    x[row, h, first:stop] = noise @ axes
    return (q, k, v), lengths


def still(dim):
    """No rotation, so that slow keys stay slow."""
    return np.zeros(dim // 2, np.float32)


def test_dynamic_strategy_follows_the_oracle():
    """Plans differ between heads and segments, output segments are finalised, and every step attends as it should."""
    data, lengths = uneven()
    traces, _ = check(DYNAMIC, data, lengths, steps=DYNAMIC_STEPS, inv_freq=still(32))
    for trace in traces:
        assert len(trace.finalised) >= 2
        assert any(plans[0] != plans[1] for plans in trace.plans)
    seen = {plan for trace in traces for plans in trace.plans for plan in plans}
    assert len({rank for rank, _, _ in seen}) >= 2 and len({block for _, _, block in seen}) >= 2
    assert len({group for _, group, _ in seen}) >= 2


@pytest.mark.parametrize(
    "changed",
    [
        {"max_loss": 0.0},
        {"max_loss": 1.0, "max_variance": 0.0},
        {"max_variance": 10.0, "max_loss": 0.2},
        {"segment": 32, "lifetime": 1e6},
        {"keep_first_block": True, "per_segment": True},
        {"truncate": True, "reduce": "mean"},
    ],
    ids=str,
)
@pytest.mark.thorough
def test_dynamic_knobs(changed):
    data, lengths = uneven()
    steps = 70
    q, k, v = (x[..., : max(lengths) + steps, :] for x in data)
    traces, _ = check({**DYNAMIC, **changed}, (q, k, v), lengths, steps=steps, inv_freq=still(32))
    plans = {plan for trace in traces for plans in trace.plans for plan in plans}
    if changed.get("max_loss") == 0.0:
        assert {(rank, group) for rank, group, _ in plans} == {(12, 1)}
    if changed.get("max_loss") == 1.0:
        assert plans == {(4, 4, 4)}
    if changed.get("max_variance") == 10.0:
        assert {block for _, _, block in plans} == {16}


@pytest.mark.thorough
def test_a_longer_lifetime_finalises_later():
    """The running loss only grows, so a higher threshold is passed later."""
    data, lengths = uneven()
    ends = []
    for lifetime in (10.0, 120.0, 1e6):
        traces, _ = check({**DYNAMIC, "lifetime": lifetime}, data, lengths, steps=DYNAMIC_STEPS, inv_freq=still(32))
        ends.append([trace.finalised[0][1] if trace.finalised else 10**9 for trace in traces])
    for soon, late in zip(ends, ends[1:]):
        assert all(a <= b for a, b in zip(soon, late)) and soon != late


@pytest.mark.thorough
def test_lifetime_is_traced():
    data, lengths = uneven()
    q, k, v = (x[..., : max(lengths) + 70, :] for x in data)
    numbers = [drive(MosaicKV(**{**DYNAMIC, "lifetime": x}), q, k, v, lengths, prompt=150) for x in (5.0, 1e6)]
    arrays = [
        drive(MosaicKV(**{**DYNAMIC, "lifetime": jnp.float32(x)}), q, k, v, lengths, prompt=150) for x in (5.0, 1e6)
    ]
    for got, want in zip(arrays, numbers):
        np.testing.assert_array_equal(got.outputs, want.outputs)
    assert not np.allclose(numbers[0].outputs, numbers[1].outputs)


def test_dynamic_without_a_prompt_segment_still_attends():
    """A prompt shorter than the buffer: un-rotated until the first flush that loses anything is finalised at once."""
    (trace,), got = check(DYNAMIC, rows([5], dim=32, steps=60), [5], steps=60)
    assert trace.finalised == [(0, 16), (16, 32), (32, 48), (48, 64)]
    for step in range(60):
        buffered = (5 + step) % 16 + 1
        packed = 5 + step + 1 - buffered
        granules = max(1, math.ceil(0.3 * packed / 4 - 1e-6)) if packed else 0
        assert (got.attended[step, 0].sum(axis=1) == buffered + 4 * granules).all()


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        ("channels", 0.0),
        ("channels", 1.5),
        ("fraction", 0.0),
        ("fraction", 1.5),
        ("capacity", 0.05),
        ("block_size", 0),
        ("buffer", 20),
        ("segment", 100),
        ("element_group", 3),
        ("reduce", "median"),
        ("strategy", "automatic"),
        ("implementation", "packed"),
    ],
)
def test_knobs_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"MosaicKV: .*{field}") as error:
        MosaicKV(**{field: value})
    assert str(value) in str(error.value)


def test_a_rank_that_groups_do_not_divide_is_refused():
    method = MosaicKV(channels=0.25, element_group=4)
    with pytest.raises(ValueError, match="MosaicKV: .*element_group"):
        method.init(specification(64, 8, dim=8))
    assert dataclasses.replace(method, element_group=2).init(specification(64, 8, dim=8)) is not None
