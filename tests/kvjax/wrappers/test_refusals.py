"""Wrappers that cannot be made, as texts: each is refused in one sentence that names what is wrong."""

import pytest

import kvjax
from kvjax.methods import Full, Quest, SnapKV
from kvjax.wrappers import DenseBelow, Periodic, Stages, Twilight
from tests.harness import small

REFUSED = {
    "periodic(keydiff)": "evict must .* chooses cache slots .*KeyDiff",
    "periodic(full)": "evict must discard .*Full",
    "periodic(quest)": "evict must discard .*Quest",
    "periodic(think)": "evict must discard .*ThinK",
    "periodic(tova)": "TOVA evicts while decoding",
    "periodic(rkv)": "RKV evicts while decoding",
    "periodic(periodic(snapkv))": "Periodic evicts while decoding",
    "periodic(observedattention)": "ObservedAttention cannot be applied again",
    "periodic(snapkv, budget=31)": "SnapKV: budget .*31",
    "periodic(snapkv, budget=99, capacity=64)": "Periodic: budget .*capacity=64",
    "periodic(snapkv, capacity=64)": "budget must be given .*capacity=64",
    "periodic(snapkv, interval=0)": "Periodic: interval .*0",
    "rkv(budget=7)": "RKV: budget .*obs_window=8.*7",
    "stages(periodic(snapkv), quest)": "Periodic moves slots",
    "stages(h2o, quest)": "H2O .*Quest",
    "stages(streamingllm, quest)": "evict .*StreamingLLM",
    "stages(snapkv, keydiff)": "retrieve .*KeyDiff",
    "stages(snapkv, shadowkv)": "retrieve .* chooses cache slots",
    "stages(think, quest)": "ThinK stores keys in channels .* last",
    "stages(attentionmatching, oracle)": "AttentionMatching stores keys in channels .* evict must",
    "stages(think, snapkv)": "retrieve .*SnapKV evicts",
    "stages(snapkv, prefill(quest))": "Prefill, which must be the outer wrapper",
    "stages(snapkv, reuse(quest))": "retrieve must choose in each layer alone, got Reuse, which must be the outer wrapper",
    "densebelow(snapkv, length=9)": "SnapKV discards",
    "densebelow(periodic(snapkv), length=9)": "Periodic discards",
    "densebelow(think, length=9)": "ThinK stores keys in channels",
    "densebelow(prefill(quest), length=9)": "Prefill, which must be the outer wrapper",
    "twilight(tokenselect)": "method .*TokenSelect",
    "twilight(magicpig)": "method .* plain logits, got MagicPIG",
    "twilight(retroinfer)": "method .* attends to these alone, .*RetroInfer",
    "twilight(full)": "Full attends to all",
    "twilight(think)": "ThinK attends to all",
    "twilight(periodic(snapkv))": "Periodic attends to all",
    "twilight(prefill(quest))": "Prefill, which must be the outer wrapper",
    "reuse(tokenselect)": "Reuse: method .*SlotMethod.*TokenSelect",
    "reuse(magicpig)": "method .* plain logits, got MagicPIG",
    "reuse(full)": "Full attends to all",
    "reuse(stages(snapkv, quest))": "Stages evicts in each layer .*every=4, expected every=1",
    "reuse(prefill(quest))": "Prefill, which must be the outer wrapper",
    "reuse(reuse(quest))": "method must .*Reuse",
    "twilight(reuse(quest))": "method must .*Reuse",
    "perlayer(reuse(quest), 0=full)": "PerLayer: Reuse chooses for all layers",
    "prefill(prefill(quest))": "Prefill, which must be the outer wrapper",
    "prefill(h2o)": "H2O needs the attention of the whole prompt",
    "prefill(keydiff)": "method must .*SlotMethod.*KeyDiff",
    "prefill(shadowkv)": "method must .*SlotMethod.*ShadowKV",
    "shadowkv(budget=7)": "budget .*chunk_size=8",
    "think(channels=0)": "channels",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_wrapped_is_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match=REFUSED[text]) as error:
        kvjax.make(text)
    assert "\n" not in str(error.value)


def test_what_is_no_method_is_refused():
    """Names and classes; and a method that would leave the 4-bit keys of `Twilight` stale."""
    for wrap in (
        lambda x: DenseBelow(length=9, method=x),
        lambda x: Stages(evict=SnapKV(), retrieve=x),
        lambda x: Periodic(evict=x),
        lambda x: Twilight(method=x),
    ):
        for wrong, named in (("quest", "the name 'quest'"), (Quest, "the class Quest")):
            with pytest.raises(ValueError, match=f"must be a kvjax method, got {named}"):
                wrap(wrong)
    with pytest.raises(ValueError, match="Quest moves slots while decoding, .* leave the 4-bit keys stale"):
        Twilight(method=small(Quest, moves_slots=True))
    assert Twilight(method=Quest(num_dense_layers=1)).for_layer(0, 2) == Full()
