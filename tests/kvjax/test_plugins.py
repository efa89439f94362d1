"""Methods outside of kvjax: by path, by entry point, registered; what records and settings say of them; their contract."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kvjax
import kvjax.__main__ as command
import models
from experiments.answering import METHODS, choices_of, paper_method, set_knobs
from experiments.answering.__main__ import GenerateSettings
from experiments.cli.main import main
from experiments.evaluation.grid import the_grid
from experiments.evaluation.settings import EvaluationSettings
from experiments.evaluation.tables import edited
from experiments.records import knobs_of
from kvjax import plugins, registry, testing
from kvjax.cache import LayerCache
from kvjax.methods import Quest
from kvjax.protocol.families import AppendOnly, Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.typing import pytree, static
from kvjax.testing import check_method, laws
from kvjax.testing.subject import Subject
from tests import outside_method
from tests.harness import TINY
from tests.outside_method import Newest

pytestmark = pytest.mark.usefixtures("quick_compile")

PATH = "tests.outside_method:Newest"
ROOT = pathlib.Path(__file__).parents[2]
ANNOUNCED = plugins._announced.__wrapped__  # the tests' configuration replaces the function itself


@pytree
class Forgetful(AppendOnly):
    """Makes metadata that a decode step then drops."""

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array]:
        return cache, jnp.zeros(cache.position.shape[:1])


@pytree
class Average(Eviction):
    """Keeps keys that are unlike the mean of all slots. Empty slots are among them: the fault that a law must find."""

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        return -jnp.einsum("bhsd,bhd->bhs", cache.key, cache.key.mean(axis=2))


@pytree
class Eager(Eviction):
    """Asks for the value of an array while it is compiled, in one of two ways."""

    asks = bool

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        norm = jnp.linalg.norm(cache.key, axis=-1)
        if self.asks is bool:
            if norm.max() > 0:
                return norm
        norm = np.sqrt(np.asarray(norm))
        return norm


@pytree
class Sometimes(Eviction):
    """Has no score for the third token, or for empty slots."""

    stored: bool = static(default=True)

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        without = cache.position == 2 if self.stored else ~cache.valid
        return jnp.where(without, jnp.nan, cache.position.astype(jnp.float32))


# ---- how it is found ------------------------------------------------------------------------------------------------


def test_a_registered_method_has_a_name():
    with pytest.raises(ValueError, match="unknown method 'newest'"):
        kvjax.make("newest")
    assert kvjax.register(Newest) is Newest
    assert kvjax.make("Newest", budget=3) == Newest(budget=3)
    assert registry.classes()["newest"] is Newest and "newest" not in registry.builtin()
    assert "newest" not in METHODS
    assert kvjax.register(Newest) is Newest  # a cell that is run again


@pytest.mark.parametrize(
    ("cls", "error", "told"),
    [
        (3, TypeError, "a method must be a subclass of kvjax.protocol.method.Method, got 3"),
        (Quest, ValueError, "expected a method that kvjax does not have, got its own Quest"),
        (Eviction, TypeError, "must be a final class, got Eviction, which lacks score"),
        (type("Bare", (Newest,), {}), TypeError, "must be decorated with kvjax.protocol.typing.pytree, got Bare without it"),
        (
            pytree(type("Short", (Newest,), {"score": lambda self, cache: cache})),
            TypeError,
            r"Short.score must take .self, cache, prompt., as Newest.score does, got .self, cache.",
        ),
        (pytree(type("Quest", (Newest,), {})), ValueError, "'quest' belongs to kvjax.methods.quest:Quest, got .*: rename"),
    ],
)
def test_unfit_classes_are_not_registered(cls, error, told):
    with pytest.raises(error, match=told):
        kvjax.register(cls)
    assert not plugins.outside()


def test_functions_of_all_methods_take_what_those_take_that_they_replace():
    for cls in (*registry.builtin().values(), *registry.WRAPPERS.values(), Newest, Forgetful, Average):
        plugins.check_hooks(cls)
    told = "Short.compress must take .self, cache, prompt, room., as Eviction.compress does, got .self, cache."
    with pytest.raises(TypeError, match=told):
        check_method(pytree(type("Short", (Average,), {"compress": lambda self, *, cache: cache})))


def test_two_classes_of_one_name_are_refused():
    kvjax.register(Newest)
    with pytest.raises(ValueError, match="'newest' belongs to tests.outside_method:Newest, got .*: rename the class"):
        kvjax.register(pytree(type("Newest", (Newest,), {})))


def test_a_path_names_a_method():
    assert registry.find(PATH) is Newest and registry.canonical_name(PATH) == "newest"
    assert kvjax.make(PATH, budget=5) == Newest(budget=5)
    assert registry.find("kvjax.methods:Quest") is kvjax.methods.Quest and registry.lasting_name("quest") == "quest"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere.methods:Newest", "there is no module 'nowhere', which 'nowhere.methods:Newest' needs"),
        ("tests.outside_method:Newst", "has no class 'Newst' .did you mean 'Newest'..*, which 'tests.outside_method:Newst'"),
        ("tests/outside_method.py:Newest", "is named package.module:Class, got 'tests/outside_method.py:Newest'"),
    ],
)
def test_wrong_paths_are_refused(path, told):
    with pytest.raises(ValueError, match=told):
        kvjax.make(path)


def test_a_file_of_the_current_directory_is_found(tmp_path, monkeypatch):
    """It hides nothing, and the search path stays as it was."""
    (tmp_path / "kvjax_users_file.py").write_text(pathlib.Path(outside_method.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert kvjax.make("kvjax_users_file:Newest", budget=4).budget == 4
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "kvjax_users_file")


def test_installed_packages_announce_methods(monkeypatch):
    def entries(group):
        assert group == "kvjax.methods"
        values = (PATH, "tests.nowhere:Lost", "tests.outside_method:jnp", "kvjax.methods.quest:Quest")
        return [importlib.metadata.EntryPoint(f"name{at}", value, group) for at, value in enumerate(values)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entries)
    with pytest.warns(UserWarning) as warned:
        assert {**ANNOUNCED()} == {"newest": Newest, "quest": kvjax.methods.Quest}
    said = [str(warning.message) for warning in warned]
    assert len(said) == 2 and "'tests.nowhere:Lost' of an installed package is left out: ModuleNotFoundError" in said[0]
    assert "'tests.outside_method:jnp'" in said[1] and "subclass of kvjax.protocol.method.Method" in said[1]
    monkeypatch.setattr(plugins, "_announced", lambda: {"newest": Newest})
    assert registry.find("newest") is Newest and registry.lasting_name("newest") == PATH


SPREAD = """
from kvjax.protocol.families import Eviction
from kvjax.protocol.typing import pytree, static, traced

@pytree
class Spread(Eviction):
    width: int = static(default=1, least=0)
    tilt: float = traced(default=0.5)
    gaps: tuple[int, ...] = static(default=(1, 2))

    def score(self, cache, prompt):
        return cache.position % (self.width + 1) + self.tilt
"""


def sweep(path):
    methods = set_knobs(choices_of([path]), ["spread.tilt=2", "spread.budget=512"])
    grid = the_grid(EvaluationSettings(methods=methods), ["width=0,1,2", "gaps=1,2;3,4"])
    assert [choice.knobs["gaps"] for choice in grid] == [(1, 2), (3, 4)] * 3 and {c.knobs["tilt"] for c in grid} == {2.0}


def generate(path):
    made = GenerateSettings(prompt_file="-", method=path, set=("width=2", "gaps=3,4")).make(9)
    assert (made.width, made.gaps) == (2, (3, 4))


def evaluate(path):
    made = EvaluationSettings.from_mapping({"methods": [{path: {"width": 2}}], "tasks": "passkey"}, "here")
    (choice,) = set_knobs(made.methods, ["spread.tilt=1", f"{path}.gaps=5,6"])
    assert choice.knobs == {"width": 2, "tilt": 1.0, "gaps": (5, 6)}


@pytest.mark.parametrize("first", [sweep, generate, evaluate], ids=lambda first: first.__name__)
def test_every_command_types_the_knobs_of_a_class_that_it_is_the_first_to_name(first, tmp_path, monkeypatch):
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "spread.py").write_text(SPREAD)
    monkeypatch.chdir(tmp_path)
    first("my_methods.spread:Spread")
    for name in ("my_methods.spread", "my_methods"):
        monkeypatch.delitem(sys.modules, name)


def run_python(program: str, directory: pathlib.Path) -> str:
    """Run a program in a new process, in a directory; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what is said of it ---------------------------------------------------------------------------------------------


def test_ls_lists_a_method_from_outside(capsys):
    assert main(["ls", PATH]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f'newest  (--method "{PATH}", or Newest)') and "no paper" in text and "arxiv.org" not in text
    assert "Keep the newest tokens of a prompt." in text and "budget=1024" in text
    assert main(["ls", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["newest"]["path"] == PATH and listed["newest"]["outside"] and not listed["quest"]["outside"]


def test_records_and_settings_name_its_path():
    """So that the row tells whose method it is, and config.yaml runs in another process."""
    assert "class" not in knobs_of(kvjax.make("quest"))
    settings = EvaluationSettings.from_mapping({"methods": [{PATH: {"budget": 8}}, "quest"], "tasks": "passkey"}, "a test")
    assert [choice.label for choice in settings.choices] == ["full", "newest(budget=8)", "quest"]
    assert settings.as_dict()["methods"] == [{PATH: {"budget": 8}}, "quest"]
    knobs = knobs_of(kvjax.make("newest", budget=8))
    assert knobs.pop("source") and knobs == {"class": PATH, "budget": 8, "capacity": 8}
    made = paper_method(PATH, 800, tokenizer=None, config=testing.TinyModel())
    assert made.name == "newest" and made.method.budget == 100 and made.note == "1/8 of the context"


@pytest.mark.parametrize("path", ["edited:Spread", "edited:Spread in a wrapper", "kvjax's own"])
def test_cells_of_an_edited_class_are_others(path, tmp_path, monkeypatch):
    """An edit of the file makes other cells, and tables name a method that two versions answered; kvjax's own have none."""
    monkeypatch.chdir(tmp_path)
    sources = []
    for width in (0, 2):
        (tmp_path / "edited.py").write_text(SPREAD.replace("default=1, least", f"default={width}, least"))
        method = kvjax.make("quest") if path == "kvjax's own" else plugins.load("edited:Spread")(budget=20)
        within = Quest(budget=8, page_size=4, num_dense_layers=0)
        method = kvjax.make("stages", evict=method, retrieve=within) if path.endswith("wrapper") else method
        sources.append(knobs_of(method).get("source"))
        sys.modules.pop("edited", None)
    assert (None not in sources and sources[0] != sources[1]) or (path == "kvjax's own" and sources == [None, None])
    rows = [{"method": "spread", "no_effect": False, "knobs": {"source": x}} for x in sources]
    assert ("Spread" in "".join(edited(rows))) == (sources[0] is not None)


# ---- the contract ---------------------------------------------------------------------------------------------------


def test_broken_laws_are_named(monkeypatch):
    """All broken laws at once, each with what it says; here only the laws that need no compiled program."""
    monkeypatch.setattr(testing, "_LAYER", ())
    monkeypatch.setattr(testing, "MODEL_LAWS", (laws.decoding_keeps_structure_shapes_and_dtypes, laws.bfloat16_is_kept))
    names = "decoding_keeps_structure_shapes_and_dtypes, bfloat16_is_kept"
    lines: list[str] = []
    with pytest.raises(AssertionError, match=f"2 of 2 laws are broken\n\n{names}:\nValueError: Forgetful.up") as broken:
        check_method(Forgetful, tell=lines.append)
    said = str(broken.value)
    assert "Forgetful.update must return the metadata with the shapes and dtypes that they had, float32 [3], got no" in said
    assert [line.partition(", ")[0] for line in lines] == ["1 of 2", "2 of 2"] and "bfloat16_is_kept is broken" in lines[1]


@pytest.mark.parametrize("wrong, line", [(bool, "if norm.max() > 0:"), (np.asarray, "norm = np.sqrt(")])
def test_a_method_that_asks_for_a_traced_value_is_told_its_line(wrong, line, monkeypatch):
    monkeypatch.setattr(testing, "_LAYER", ())
    monkeypatch.setattr(testing, "MODEL_LAWS", (laws.decoding_keeps_structure_shapes_and_dtypes,))
    monkeypatch.setattr(Eager, "asks", wrong)
    with pytest.raises(AssertionError) as broken:
        check_method(Eager, everything={})
    said = str(broken.value).split("\n")[-1]
    assert said.startswith("Eager.score (line ") and "test_plugins.py) needs the value of an array while" in said
    assert line in said and "use jnp.where or jax.lax.cond" in said


def test_a_score_of_nan_breaks_a_law():
    """Comparisons with NaN are false, so it chooses tokens; a score of an empty slot may be anything."""
    laws.scores_are_numbers(Subject(Sometimes(budget=12, stored=False), TINY, None))
    with pytest.raises(AssertionError, match="Sometimes.score returned NaN for a stored token or page"):
        laws.scores_are_numbers(Subject(Sometimes(budget=12, stored=True), TINY, None))


def test_a_score_that_reads_empty_slots_breaks_a_law():
    """`compress` meets empty slots: behind the prompts, and behind the longest of them."""
    subject = Subject(Average(budget=12), TINY, None)
    with pytest.raises(AssertionError):
        laws.empty_slots_are_never_read(subject)


@pytest.mark.thorough
def test_a_method_outside_obeys_the_laws():
    assert len(check_method(Newest, budget=12)) == len(check_method(Newest)) == 17


# ---- the package's home for models ----------------------------------------------------------------------------------


def test_the_home_of_models_has_every_name_of_models():
    assert kvjax.models.load is models.load and dir(kvjax.models) == sorted(models.__all__)
    assert all(getattr(kvjax.models, name) is getattr(models, name) for name in models.__all__)
    with pytest.raises(AttributeError, match="kvjax.models has no name 'from_pretraned', expected one of ChatTemplate"):
        kvjax.models.from_pretraned  # noqa: B018


HIDING = """
import pathlib, sys
import kvjax  # which needs no models
assert "models" not in sys.modules
for begin in ("", "import models; "):
    try:
        exec(begin + "from kvjax.models import load")
    except ImportError as error:
        told = str(error)
    place = pathlib.Path(FILE).resolve()
    assert told.startswith(f"kvjax needs its own package 'models' in {HOME}, but {place} hides it: rename that, or"), told
try:
    kvjax.answer("builtin", "a", "b")
except ImportError as error:
    assert FILE in str(error)
"""


def test_a_users_own_models_is_named(tmp_path):
    """In a new process, whether the user has imported it already or not."""
    (tmp_path / "models.py").write_text("MINE = 1\n")
    run_python(f"HOME, FILE = {str(ROOT)!r}, {str(tmp_path / 'models.py')!r}\n{HIDING}", tmp_path)


# ---- python -m kvjax ------------------------------------------------------------------------------------------------


def test_a_foreign_package_that_hides_ours_is_named(tmp_path, monkeypatch, capsys):
    """A folder "models" of the current directory hides nothing; one that stands first on the search path is named."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert command.main(["--version"]) == 0 and sys.path[0] != str(tmp_path)
    assert capsys.readouterr().out.startswith("kvjax ")
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path), *sys.path])
    assert command.main(["--version"]) == 2
    assert f"kvjax needs its own package 'models' in {ROOT}, but {tmp_path / 'models'} hides it" in capsys.readouterr().err
