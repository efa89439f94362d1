"""Wrappers: what composes with what, and that a composition is what its parts say."""

import dataclasses
import inspect
import typing

import jax
import pytest

import kvjax
from kvjax.exact.verified_layer import VerifiedLayer
from kvjax.methods import H2O, Full, KVzip, Quest, SnapKV, StreamingLLM
from kvjax.protocol.method import Method, declarations
from kvjax.protocol.slots import SlotMethod
from kvjax.protocol.typing import pytree
from kvjax.wrappers import PerLayer, Prefill, Stages, Twilight
from kvjax.wrappers.compose import Answer, answers, passes
from kvjax.wrappers.reuse import Follower
from tests.harness import WRAPPERS, read, small, stored, tiny_params
from tests.kvjax.cases import ONE

pytestmark = pytest.mark.usefixtures("quick_compile")

SNAP = SnapKV(budget=20, obs_window=5)
QUEST = Quest(budget=8, page_size=4, num_dense_layers=0)


def shapes(run):
    """What ``run`` would return; it is traced and not compiled."""
    tiny_params()  # which are kept, and so must be made before
    return jax.eval_shape(run)


def test_per_layer_picks_by_index_and_from_the_end():
    method = PerLayer(layers={0: SNAP, -1: H2O(budget=12)}, default=Full())
    assert method.for_layer(0, 3) == SNAP and method.for_layer(1, 3) == Full() and method.for_layer(2, 3) == H2O(budget=12)


def test_per_layer_storage_differs_by_layer():
    cache = shapes(lambda: read(PerLayer(layers={0: small(StreamingLLM, budget=12, chunk=8)}, default=SNAP)))
    assert [stored(layer).num_slots for layer in cache.layers] == [12 + 8, 20 + 24]


def test_per_layer_reaches_into_wrappers():
    """A wrapper's inner layers are resolved by the real layer index."""
    dense_first = PerLayer(layers={}, default=Quest(budget=8, page_size=4, num_dense_layers=1))
    assert dense_first.for_layer(0, 2) == Full() and dense_first.for_layer(1, 2).page_size == 4
    stages = Stages(evict=SNAP, retrieve=Quest(budget=8, page_size=4, num_dense_layers=1))
    assert stages.for_layer(0, 2).retrieve == Full() and stages.for_layer(1, 2).retrieve.page_size == 4


def test_stages_hold_the_compressed_cache_only():
    full, both = (read(method, config=ONE) for method in (QUEST, Stages(evict=SNAP, retrieve=QUEST)))
    assert stored(both.layers[0]).num_slots == 20 + 24 < stored(full.layers[0]).num_slots
    assert int(stored(both.layers[0]).valid.sum(axis=2).max()) <= 20


def test_wrappers_are_pytrees_of_their_inner_numbers():
    """Nested hyper-parameters are leaves that a sweep can stack."""
    stages = Stages(evict=SNAP, retrieve=QUEST)
    assert sorted(jax.tree.leaves(stages)) == [8, 20]
    doubled = jax.tree.map(lambda x: x // 2, stages)
    assert doubled.evict.budget == 10 and doubled.retrieve.budget == 4 and doubled.evict.capacity == 20


# ---- what wrappers answer -------------------------------------------------------------------------------------------


def with_subclasses(cls):
    return {cls}.union(*map(with_subclasses, cls.__subclasses__()))


def inner_fields(kind):
    """The fields of a class of methods that hold methods."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        options = [hint for hint in (hints[field.name], *typing.get_args(hints[field.name])) if isinstance(hint, type)]
        if any(issubclass(option, Method) for option in options):
            yield field.name


OURS = [x for x in with_subclasses(Method) if x.__module__.startswith("kvjax.")]
KINDS = sorted((x for x in OURS if not inspect.isabstract(x) and [*inner_fields(x)]), key=lambda x: x.__name__)


class Says:
    """Stands for an inner method whose declarations are all true, each another object, or all false."""

    def __init__(self, true):
        self._true = true

    def __getattr__(self, name):
        vars(self)[name] = (name,) if self._true else ()
        return vars(self)[name]


def heard(kind, name):
    """The fields whose methods a wrapper's answer comes from: where only this field's says true, the answer is its own."""
    found = []
    for field in (*inner_fields(kind), None):
        wrapper = object.__new__(kind)
        inner = {each: Says(each == field) for each in inner_fields(kind)}
        vars(wrapper).update({each: {0: one} if each == "layers" else one for each, one in inner.items()})
        answer = getattr(wrapper, name)
        assert answer == () or (field is not None and answer is getattr(inner[field], name)), (kind, name)
        found += [field] * bool(answer)
    return found


def check_answers(kind):
    """Each declaration of the protocol is answered as the inner method does, unless the class states it itself."""
    for name in declarations(kind):
        assert name in vars(kind) or name in kind.__dataclass_fields__, f"{kind.__name__} leaves {name} to its base class"
        answer = vars(kind).get(name)
        if isinstance(answer, Answer):
            assert heard(kind, name) and answer.__doc__, f"{kind.__name__} answers {name} as none of its methods does"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_wrappers_answer_every_declaration(kind):
    check_answers(kind)


def test_every_wrapper_is_asked():
    assert {type(method) for method in WRAPPERS.values()} | {kvjax.Verified, VerifiedLayer, Follower} == {*KINDS}


def test_a_new_declaration_reaches_every_wrapper(monkeypatch):
    """Declared in one class, it is asked of each; and a class that was not told of it is found."""
    monkeypatch.setattr(Method, "is_new", False, raising=False)

    @answers("method")
    @pytree
    class Told(Method):
        method: Method

        for_layer = passes("method", Method.for_layer)
        init_shared = passes("method", Method.init_shared)
        observe = passes("method", Method.observe)

    assert heard(Told, "is_new") == ["method"] and "is_new" in declarations(Twilight)
    check_answers(Told)
    with pytest.raises(AssertionError, match="Twilight leaves is_new to its base class"):
        check_answers(Twilight)


def test_stages_answers_by_the_method_that_does_it():
    assert heard(Stages, "selects") == heard(Stages, "offload") == ["retrieve"]
    assert heard(Stages, "observes") == heard(Stages, "evicts") == ["evict", "retrieve"]


def test_what_a_wrapper_states_stays():
    """Class attributes, properties and fields are not replaced; `help` says where a declaration is explained."""
    assert Twilight(method=QUEST).obs_window == 1 > QUEST.obs_window
    assert "`kvjax.protocol.method.Method.evicts`" in inspect.getdoc(Twilight.evicts)
    assert inspect.getdoc(Prefill.compress) == inspect.getdoc(SlotMethod.compress)


def test_twilight_reads_again_with_what_it_wraps():
    """`KVzip` inside of it decides for all layers after a second reading."""
    stages = Stages(evict=KVzip(budget=20), retrieve=QUEST)
    method = Twilight(method=stages)
    assert method.reread_tokens(99) == stages.reread_tokens(99) > 0 and method.spans_layers
    with pytest.raises(ValueError, match="chooses for all layers at once"):
        PerLayer(layers={0: method}, default=Full())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("quest(budget=64, budget=128)", "expected each knob once, got 'budget' twice"),
        ("perlayer(snapkv, 0=full, 0=quest)", "expected each knob once, got '0' twice"),
        ("stages(snapkv, evict=h2o, retrieve=quest)", "expected each knob once, got 'evict' twice"),
        ("perlayer(snapkv, \u00b2=full)", "PerLayer has no knob '\u00b2'"),
        ("twilight(" * 60 + "quest" + ")" * 60, r"expected at most 50 '\(' in the text of a method, got 60"),
    ],
    ids=["knob", "layer", "method inside", "index", "depth"],
)
def test_a_text_that_says_two_things_or_too_much_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        kvjax.make(text)
