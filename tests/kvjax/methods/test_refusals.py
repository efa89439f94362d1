"""Knobs of a method that do not fit each other; tests/kvjax/test_fields.py has what a field refuses alone."""

import dataclasses

import pytest

from kvjax.methods import AdaKV, ExpectedAttention, FreeKV, InfLLM, KVzip, ParisKV, RetroInfer, SelfExtend
from kvjax.methods.mosaickv.method import MosaicKV
from kvjax.protocol.method import LayerSpec
from tests.harness import example
from tests.models.test_latent import CONFIG as LATENT

SIZES = {"batch": 1, "num_kv_heads": 1, "group_size": 1, "prompt_slots": 64, "max_new_tokens": 8}


def init(method, dim):
    """The state of a layer of this head_dim after an empty prompt."""
    spec = LayerSpec(head_dim=dim, dtype="float32", **SIZES)
    return method.finish(method.init(spec), spec)


@pytest.mark.parametrize(
    ("named", "make"),
    [
        ("num_sink .*page_size=32", lambda: FreeKV(num_sink=100)),
        ("num_local .*page_size=32", lambda: FreeKV(num_local=16)),
        ("budget .*page_size=32", lambda: FreeKV(budget=31)),
        ("chunk .*num_local=4096", lambda: InfLLM(chunk=8192)),
        ("budget .*block_size=128", lambda: InfLLM(budget=127)),
        ("budget .*obs_window=32", lambda: AdaKV(budget=31)),
        ("budget .*num_sink=4", lambda: ExpectedAttention(budget=4)),
        ("budget .*num_sink=4", lambda: KVzip(budget=4)),
        ("offload", lambda: KVzip(offload=True)),
        ("KVzip.* ModelConfig with can_probe = False; .*plus=False", lambda: KVzip(plus=True).check_sizes(LATENT)),
        ("capacity", lambda: MosaicKV(fraction=0.1, capacity=0.05)),
        ("buffer", lambda: MosaicKV(buffer=20)),
        # A rank of no channel.
        ("channels .*head_dim=8", lambda: init(dataclasses.replace(MosaicKV(channels=0.25), channels=0.05), 8)),
        ("rho .*beta=0.2", lambda: ParisKV(rho=0.1, beta=0.2)),
        *(("head_dim .*power of two", lambda dim=dim: init(example("pariskv"), dim)) for dim in (4, 12, 96)),
        ("buffer .*cluster_size=16", lambda: RetroInfer(buffer=15)),
        ("window .*group_size=8", lambda: SelfExtend(window=12, group_size=8)),
        ("budget", lambda: example("sentencekv", budget=5)),
        ("obs_window", lambda: example("sentencekv", obs_window=30)),
        ("chunk .*num_local=8", lambda: example("tokenselect", chunk=9)),
    ],
)
def test_knobs_that_do_not_fit_each_other_are_refused(named, make):
    with pytest.raises(ValueError, match=named):
        make()
