"""What the tests of MosaicKV share: random rows, and a drive of the method compared with its oracle."""

from __future__ import annotations

import numpy as np

from kvjax.methods.mosaickv.method import MosaicKV
from tests.harness import drive, frequencies, random_tokens, small
from tests.kvjax.cases import STEPS as ALIKE
from tests.kvjax.cases import drive_alike
from tests.oracles import mosaickv

STEPS = 18  # two flushes of a buffer of 8


def bases(state, row):
    """What the oracle takes from an implementation: keyword arguments of `mosaickv.run`."""
    return {name: np.asarray(getattr(state, name)[row]) for name in mosaickv.STATE}


def check(knobs, data, lengths, *, steps=STEPS, inv_freq=None, tolerance=1e-4, **fields):
    """Drive a batch and assert that every row is what the oracle says; returns the oracle's traces and the drive.

    Up to four rows of `ALIKE` steps take the sizes of `cases.drive_alike`.
    """
    q, k, v = data
    inv_freq = frequencies(q.shape[-1]) if inv_freq is None else inv_freq
    method = small(MosaicKV, **knobs, **fields)
    if steps == ALIKE and len(lengths) <= 4:
        got = drive_alike(method, q, k, v, lengths, inv_freq)
    else:
        got = drive(method, q, k, v, lengths, prompt=max(lengths), inv_freq=inv_freq)
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
            np.testing.assert_allclose(got.outputs[step, row], want.outputs[step], atol=tolerance, rtol=0, err_msg=label)
        traces.append(want)
    return traces, got


def rows(lengths, *, heads=2, groups=2, dim=16, seed=0, steps=STEPS):
    """Random rows long enough for ``steps`` tokens after each prompt."""
    return random_tokens(seed, len(lengths), heads, groups, max(lengths) + steps, dim)
