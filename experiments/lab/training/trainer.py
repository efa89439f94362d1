"""A training run: compiled steps, data workers, progress, a checkpoint, export. `experiments.lab.training` is its command.

The checkpoint is saved during the run, and when SIGTERM or the time limit stops it. A resumed run computes exactly the same
values as an uninterrupted run.
"""

import collections
import dataclasses
import math
import pathlib
import signal
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import models
from experiments.lab.training.checkpoint import restore_checkpoint, save_checkpoint
from experiments.lab.training.course import Course
from experiments.lab.training.data import Loader
from experiments.lab.training.loss import DATA, State, initial_state, make_step, schedule
from experiments.lab.training.mixture import BUILTIN as BUILTIN_MIXTURE
from experiments.lab.training.progress import Progress
from experiments.lab.training.subject import Subject

BUILTIN = pathlib.Path(models.__file__).parent / "builtin"  # holds the tokenizer even before there is a model
CHECKPOINT = "checkpoint.safetensors"
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
            full, hidden_size=64, intermediate_size=128, num_layers=2, num_q_heads=4, num_kv_heads=1, head_dim=16,
            max_position_embeddings=1024, dtype="float32",
        )  # fmt: skip
        return toy, Course(steps or 40, (256, 384), 1536, BUILTIN_MIXTURE)
    raise ValueError(f"unknown size {name!r}, expected 'full' or 'toy'")


def _check_course(course: Course, config: models.ModelConfig, devices: int) -> None:
    """Refuse a course that cannot run, before anything is written.

    Raises:
        ValueError: a length beyond the model's context, batches that cannot be split over the devices, or a vocabulary that
            batches cannot hold.
    """
    if (longest := course.lengths[-1]) > config.max_position_embeddings:
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
        out: directory for the checkpoint, the log and the export.
        subject: the trained model or adapter; its config has the compute dtype.
        course: how the run goes.
        tokenizer: directory with tokenizer.json.
        texts: prose files besides `pydoc_data.topics`.
        minutes: wall-clock limit of this call; the run is saved and can be resumed.
        save_minutes: minutes between checkpoints.
        resume: continue from the checkpoint in `out`.
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
    mesh = jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(jax.sharding.AxisType.Auto,))
    _check_course(course, subject.config, jax.device_count())
    for path in texts:
        if not path.is_file():
            raise FileNotFoundError(f"no text file {path}")
    settings = {
        **{name: vars(course)[name] for name in ("steps", "tokens_per_step", "lengths", "peak", "lm_weight")},
        "seed": seed,
        "texts": [path.name for path in texts],
        **subject.identity,
    }
    checkpoint = out / CHECKPOINT
    if resume and not checkpoint.exists():
        raise ValueError(f"nothing to resume: there is no {checkpoint}")
    if checkpoint.exists() and not resume:
        raise ValueError(f"{out} holds a run: continue it (--resume), or choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    state, step = initial_state(subject, course, seed), 0
    if resume:
        step, state = restore_checkpoint(checkpoint, state, settings)
    last = course.steps if stop_after is None else min(stop_after, course.steps)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
    run_step = jax.jit(
        make_step(subject, course, None, mesh),
        donate_argnums=0,
        in_shardings=(whole, whole, split, split, split, whole),
        out_shardings=whole,
    )
    state, frozen = jax.device_put((state, subject.frozen), whole)
    loader = Loader(tokenizer / "tokenizer.json", texts, course, seed, step, workers)
    progress = Progress(course, schedule(course), step, out / "train_log.jsonl")
    stopped: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: stopped.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    in_flight: collections.deque = collections.deque()

    def report(most: int) -> None:
        """Report finished steps until at most ``most`` are in flight."""
        while len(in_flight) > most:
            finished, length, metrics = in_flight.popleft()
            progress.update(finished, length, jax.device_get(metrics))

    saved = time.monotonic()
    try:
        while step < last and not stopped and time.monotonic() - begun < 60 * minutes:
            batch = loader.next()
            rows = jax.device_put((batch.tokens, batch.roles, batch.tasks), split)
            state, metrics = run_step(state, frozen, *rows, np.float32(course.lm_weight_at(step)))
            in_flight.append((step, batch.tokens.shape[1], metrics))
            step += 1
            report(IN_FLIGHT)
            if time.monotonic() - saved > 60 * save_minutes:
                save_checkpoint(checkpoint, step, state, settings)
                saved = time.monotonic()
        report(0)
        save_checkpoint(checkpoint, step, state, settings)
        subject.export(out / "export", state["params"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        loader.close()
        progress.close()
    return state
