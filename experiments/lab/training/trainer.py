"""A training run: compiled steps, data workers, progress, checkpoints, export. `experiments.lab.training` is its command.

Checkpoints are saved during the run, and when SIGTERM or the time limit stops it. A resumed run computes exactly the same
values as an uninterrupted run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import models
from experiments.lab.training.checkpoints import Checkpoints
from experiments.lab.training.course import Course
from experiments.lab.training.curriculum import Curriculum
from experiments.lab.training.data import Loader
from experiments.lab.training.loss import DATA, State, Step, initial_state, make_step, schedule
from experiments.lab.training.mixture import BUILTIN as BUILTIN_MIXTURE
from experiments.lab.training.mixture import SHORTEST
from experiments.lab.training.progress import Progress
from experiments.lab.training.subject import Subject

BUILTIN = pathlib.Path(models.__file__).parent / "builtin"  # holds the tokenizer even before there is a model
IN_FLIGHT = 4  # steps that are dispatched before the metrics of the first of them are read


def builtin_course(name: str, steps: int | None = None) -> tuple[models.ModelConfig, Course]:
    """Return the model and the course of training called "full" (15M parameters, one H100) or "toy" (seconds on a CPU).

    Args:
        name: the size.
        steps: length of the run; None takes the size's.

    Raises:
        ValueError: an unknown name.
    """
    end = BUILTIN_MIXTURE.form.end
    full = models.ModelConfig(
        vocab_size=5120, hidden_size=384, intermediate_size=1024, num_layers=8, num_q_heads=8, num_kv_heads=2,
        head_dim=64, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
        qk_norm=True, eos_token_ids=(end,), dtype="bfloat16",
    )  # fmt: skip
    if name == "full":
        return full, Course(steps or 6000, (512, 1024, 2048, 4096, 8192, 16384), 131072, BUILTIN_MIXTURE)
    if name == "toy":
        toy = dataclasses.replace(
            full,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_q_heads=4,
            num_kv_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
            dtype="float32",
        )
        return toy, Course(steps or 40, (256, 384), 1536, BUILTIN_MIXTURE)
    raise ValueError(f"unknown size {name!r}, expected 'full' or 'toy'")


class Compiler:
    """The steps of every batch shape, compiled in the background and in the order in which the run needs them.

    Args:
        step: see `experiments.lab.training.loss.make_step`.
        state: arrays of the state's shapes and dtypes.
        frozen: arrays of the same shapes and dtypes as the arrays that training only reads.
        mesh: the devices.
        shapes: (rows, length) of the batches.
    """

    def __init__(self, step: Step, state: State, frozen: Any, mesh: Mesh, shapes: Sequence[tuple[int, int]]) -> None:
        self.everywhere, self.rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
        whole = self.everywhere
        jitted = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(whole, whole, self.rows, self.rows, self.rows, whole),
            out_shardings=whole,
        )
        like, kept = (
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree) for tree in (state, frozen)
        )

        def build(rows: int, length: int) -> Any:
            tokens = jax.ShapeDtypeStruct((rows, length), jnp.uint16)
            tasks = jax.ShapeDtypeStruct((rows,), jnp.int32)
            return jitted.lower(like, kept, tokens, tokens, tasks, jax.ShapeDtypeStruct((), jnp.float32)).compile()

        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=2)
        self._steps = {shape: self._pool.submit(build, *shape) for shape in shapes}

    def get(self, shape: tuple[int, int]) -> Any:
        """Wait for the compiled step of a (rows, length) and return it."""
        return self._steps[shape].result()

    def close(self) -> None:
        """Cancel the steps that have not been compiled yet."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _check_course(course: Course, config: models.ModelConfig, devices: int) -> None:
    """Refuse a course that cannot run, before anything is written.

    Raises:
        ValueError: a length that holds no row or is beyond the model's context, batches that cannot be split over the
            devices, or a vocabulary that batches cannot hold.
    """
    shortest, longest = course.lengths[0], course.lengths[-1]
    if shortest < SHORTEST:
        raise ValueError(f"lengths must be at least {SHORTEST} tokens, the shortest row, got {shortest}")
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"lengths must be at most {config.max_position_embeddings} tokens, the model's context, got {longest}"
        )
    for rows in (course.tokens_per_step // length for length in course.lengths):
        if rows % devices:
            raise ValueError(f"the rows of a batch must be a multiple of {devices} devices, got {rows}")
    most = np.iinfo(np.uint16).max + 1
    if config.vocab_size > most:
        raise ValueError(f"batches hold token ids below {most}, the model has a vocabulary of {config.vocab_size}")


def train(
    out: pathlib.Path,
    *,
    subject: Subject,
    course: Course,
    tokenizer: pathlib.Path,
    texts: Sequence[pathlib.Path] = (),
    minutes: float = math.inf,
    save_minutes: float = 4.0,
    resume: bool = False,
    seed: int = 0,
    workers: int = 14,
    stop_after: int | None = None,
) -> State:
    """Train, save and export. All devices of this process take part, each with an equal part of every batch.

    Args:
        out: directory for checkpoints, the log and the export.
        subject: the trained model or adapter; its config has the compute dtype.
        course: how the run goes.
        tokenizer: directory with tokenizer.json.
        texts: prose files besides `pydoc_data.topics`.
        minutes: wall-clock limit of this call; the run is saved and can be resumed.
        save_minutes: minutes between checkpoints.
        resume: continue from the newest checkpoint in `out`.
        seed: seed of parameters and data.
        workers: data processes; with 0, this process makes the data.
        stop_after: stop and save after this many steps of the whole run, as if the time were over.

    Returns:
        The last state.

    Raises:
        ValueError: there is nothing to resume, the checkpoint belongs to another run, there is a checkpoint but ``resume``
            is False, or `_check_course` refuses the course.
        FileNotFoundError: a text is absent.
        FloatingPointError: the loss is not finite.
    """
    begun = time.monotonic()
    steps = course.steps
    mesh = jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(jax.sharding.AxisType.Auto,))
    curriculum = Curriculum(steps, course.tokens_per_step, course.lengths, seed)
    _check_course(course, subject.config, jax.device_count())
    for path in texts:
        if not path.is_file():
            raise FileNotFoundError(f"no text file {path}")
    settings = {
        **dataclasses.asdict(curriculum),
        "texts": [path.name for path in texts],
        "peak": course.peak,
        "lm_weight": course.lm_weight,
        **subject.identity,
    }
    finished = [path for path in (out / "checkpoints").glob("*") if path.name.isdigit()]  # not what a killed run began
    if resume and not finished:
        raise ValueError(f"nothing to resume in {out / 'checkpoints'}")
    if finished and not resume:
        raise ValueError(f"{out / 'checkpoints'} holds a run: continue it (--resume), or choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out / "checkpoints", settings)
    state = initial_state(subject, course, seed)
    first = 0
    if resume:
        first, state = checkpoints.restore(state)
    last = steps if stop_after is None else min(stop_after, steps)
    shapes = list(dict.fromkeys(curriculum.bucket(step) for step in range(first, last)))
    step_of = make_step(subject, course, None, mesh)
    compiler = Compiler(step_of, state, subject.frozen, mesh, shapes)
    state, frozen = jax.device_put((state, subject.frozen), compiler.everywhere)
    loader = Loader(tokenizer / "tokenizer.json", texts, course.mixture, curriculum, seed, first, workers)
    progress = Progress(curriculum, schedule(course), first, out / "train_log.jsonl")
    stopped: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: stopped.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    in_flight: collections.deque = collections.deque()
    saved = time.monotonic()
    step = first
    try:
        while step < last and not stopped and time.monotonic() - begun < 60 * minutes:
            shape = curriculum.bucket(step)
            batch = loader.next()
            lm_weight = course.lm_weight_first if curriculum.is_first_stage(step) else course.lm_weight
            rows = jax.device_put((batch.tokens, batch.roles, batch.tasks), compiler.rows)
            state, metrics = compiler.get(shape)(state, frozen, *rows, np.float32(lm_weight))
            in_flight.append((step, shape[1], metrics))
            step += 1
            if len(in_flight) > IN_FLIGHT:
                done, length, metrics = in_flight.popleft()
                progress.update(done, length, jax.device_get(metrics))
            if time.monotonic() - saved > 60 * save_minutes:
                checkpoints.save(step, state)
                saved = time.monotonic()
        while in_flight:
            done, length, metrics = in_flight.popleft()
            progress.update(done, length, jax.device_get(metrics))
        checkpoints.save(step, state)
        subject.export(out / "export", state["params"])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        loader.close()
        compiler.close()
        progress.close()
        checkpoints.close()
    return state
