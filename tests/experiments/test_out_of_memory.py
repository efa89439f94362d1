"""What an evaluation does when the device runs out of memory: it reads less at once, and says so."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import jax
import pytest

import kvjax
import models
from experiments.answering import Shape, ask
from experiments.evaluation import plan, runner
from kvjax.accounting import memory
from tests.experiments.test_evaluation import CONFIG, loaded, make

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("evaluation")]

GIVEN = {"methods": ["snapkv", "h2o", "streamingllm"], "max_new_tokens": 4, "tasks": ("passkey", "vt"), "samples": 4}
LACKS = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34.13GiB")
DONE = {
    "seconds": 0.0, "answer_seconds": 0.0, "compile_seconds": 0.0, "no_effect": False, "value": 0.0, "unit": "percent",
}  # fmt: skip


@pytest.fixture
def device(monkeypatch):
    """A device on which some methods and rows are too much: the attempts, as (names of methods, rows)."""

    def that_lacks_memory(too_much, error=LACKS):
        tried = []

        def run(self, group, *given):
            tried.append(("+".join(job.label for job in group.jobs), self._rows(group)))
            if too_much(*tried[-1]):
                raise error
            return [DONE for _ in group.jobs]

        monkeypatch.setattr(runner.Runner, "_run", run)
        return tried

    return that_lacks_memory


def test_methods_part_before_batches_are_halved(directory, tmp_path, device, capsys):
    """H2O alone needs much; the other methods keep their batches, and H2O its smaller ones."""
    tried = device(lambda names, rows: "h2o" in names and rows > 2)
    run = make(directory, tmp_path, **GIVEN)
    run.progress = True
    run.run()
    assert tried == [
        ("full+snapkv+h2o", 4), ("full+snapkv", 4), ("h2o", 4), ("h2o", 2),  # passkey
        ("full+snapkv", 4), ("h2o", 2),  # vt
        ("streamingllm", 4), ("streamingllm", 4),  # it reads alone
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert "out of memory: passkey 512: 3 methods no longer prefill together, but 2 and 1" in said
    assert "out of memory: passkey 512 under h2o: 4 rows at a time become 2" in said


@pytest.mark.parametrize(
    ("error", "attempts"), [(LACKS, 5), (MemoryError("Full needs 34.13GiB"), 5), (jax.errors.JaxRuntimeError("INTERNAL"), 1)]
)
def test_a_single_row_that_does_not_fit_ends_the_run(directory, tmp_path, device, error, attempts):
    """Also if kvjax says so, before it reads anything; other errors are not taken for a lack of memory."""
    tried = device(lambda names, rows: True, error)
    with pytest.raises(type(error), match=str(error)[:8]):
        make(directory, tmp_path, **GIVEN).run()
    assert tried == [("full+snapkv+h2o", 4), ("full+snapkv", 4), ("full", 4), ("full", 2), ("full", 1)][:attempts]


def test_what_did_not_fit_is_freed_before_less_is_read(directory, tmp_path, monkeypatch):
    """An error and the frames that it passed refer to each other, so the caches of those frames outlive it."""
    failed = []

    class Caches:
        pass

    def run(self, group, *given):
        assert not any(caches() for caches in failed), "the caches of an earlier attempt are still there"
        if len(group.jobs) > 1:
            caches = Caches()
            failed.append(weakref.ref(caches))
            caches.error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            raise caches.error
        return [DONE]

    monkeypatch.setattr(runner.Runner, "_run", run)
    make(directory, tmp_path, **GIVEN).run()
    assert len(failed) == 4


def test_what_the_evaluation_reads_together_kvjax_does_not_refuse(directory, tmp_path, monkeypatch):
    """On a device with room for two of three caches: `kvjax.prefill_each` takes the groups, and not all three."""
    run = make(directory, tmp_path, **GIVEN, together=8)
    jobs = [job for job in run._jobs(run.settings.choices) if job.setting.method.dense_prompt and job.cell.task == "vt"]
    given, tokens = [job.setting.method for job in jobs], run.settings.batch_tokens
    limit = run._plan.needed(jobs[:2], tokens)
    assert len(jobs) == 3 and run._plan.needed(jobs, tokens) > limit
    monkeypatch.setattr(plan, "free_bytes", lambda mesh: 2 * limit)
    run = make(directory, tmp_path, **GIVEN, together=8)
    groups = run._plan.groups(jobs)
    assert [sorted(group.parts) for group in groups] == [[1, 2]]
    (shape,) = {batch.shape for batch in run._plan.batches(groups[0])}
    sizes = {"batch": shape.rows, "prompt_slots": shape.length, "max_new_tokens": shape.room, "chunk_size": shape.chunk}
    two, three = (
        kvjax.memory_needed(some, run.model.config, **sizes, share_storage=True).peak for some in (given[:2], given)
    )
    assert two < three and two < limit  # the method that answers has a copy of its cache
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: two)
    memory.check_memory(given[:2], run.model.config, None, None, sizes, share=True)
    with pytest.raises(MemoryError, match="3 methods that share one prefill need .*; prefill fewer methods"):
        memory.check_memory(given, run.model.config, None, None, sizes, share=True)
    for free, chunk in ((0, 8192), (100 << 30, 1 << 16)):
        monkeypatch.setattr(plan, "free_bytes", lambda mesh, free=free: free)
        assert {x.shape.chunk for x in make(directory, tmp_path, **GIVEN)._plan.batches(groups[0])} == {chunk}


@pytest.mark.parametrize("length", [pytest.param(512, marks=pytest.mark.thorough), 16384])
def test_bytes_of_a_group_add_up_to_what_kvjax_counts_for_it(directory, length):
    """For any rows; a prompt has one chunk of tokens or two."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=length, num_layers=3)
    model = dataclasses.replace(loaded(directory), config=config, params=models.param_shapes(config))
    every = {name: kvjax.make(name) for name in ("full", "quest", "mosaickv", "snapkv", "h2o", "kvzip")}
    made = plan.Plan(None, model, None, (), length)
    needed, jobs = made.bytes_needed, (SimpleNamespace(setting=SimpleNamespace(method=method)) for method in every.values())
    assert [made._kinds(job) for job in jobs] == [True] * 5 + [False]  # KVzip reads a prompt again
    for names in ("h2o kvzip snapkv", " ".join(every)):
        methods = [every[name] for name in names.split()]
        for rows in (3, 40):
            sizes = {"batch": rows, "prompt_slots": length, "max_new_tokens": 128}
            exact = kvjax.memory_needed(methods, model.config, **sizes, share_storage=True, params=model.params).peak
            assert needed(methods, Shape(length, rows, 128), copy=False) == exact, (names, rows)


@pytest.fixture
def growth(monkeypatch):
    """The bytes of living arrays when the function of `kvjax` of that name is called, less those at its first call."""

    def at(name):
        real, found = getattr(kvjax, name), []

        def call(*args, **options):
            gc.collect()
            found.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
            return real(*args, **options)

        monkeypatch.setattr(kvjax, name, call)
        return lambda: [more - found[0] for more in found]

    return at


@pytest.mark.slow
def test_a_question_is_answered_before_the_context_is_copied_for_the_next(growth):
    grown, params = growth("fork"), models.random_params(CONFIG, jax.random.key(0))
    shape = Shape(64, 1, 2, questions=3, question_length=8)
    ask(params, CONFIG, [list(range(1, 50))], "full", shape, questions=[[[5, 6], [7], [8, 9]]])
    assert len(grown()) == 2 and max(grown()) < _cache_bytes(64, 8) / 2


def _cache_bytes(slots, room):
    return memory.memory_needed(kvjax.methods.Full(), CONFIG, batch=1, prompt_slots=slots, max_new_tokens=room).device
