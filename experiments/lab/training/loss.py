"""The loss and the optimiser step of training: pure functions of parameters and a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import models
from experiments.lab.training.course import Course
from experiments.lab.training.data import FIRST_QUESTION_ROLE, LM_ROLE
from experiments.lab.training.mixture import ROW_TASKS
from experiments.lab.training.subject import Subject
from kvjax import rope
from kvjax.protocol.typing import layer_ropes
from models.layers.transformer import Block, Norm, Table
from pallas_kernels.attend.causal_attention import causal_attention

FINAL_SHARE = 0.05  # of the peak, reached at the end of the cosine
SHORTEST_QUESTION = 32  # tokens; bounds the number of questions in a row
DATA = "data"  # the mesh axis over which rows are split

State = dict[str, Any]
Step = Callable[[State, Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]


def schedule(course: Course) -> optax.Schedule:
    """Make the learning rates: a linear warm-up, then a cosine that reaches 5 % of the peak at the last step."""
    warmup = min(course.warmup, max(1, course.steps // 10))
    return optax.warmup_cosine_decay_schedule(
        0.0, course.peak, warmup, max(course.steps, warmup + 1), course.peak * FINAL_SHARE
    )


def optimizer(course: Course) -> optax.GradientTransformation:
    """Make the optimiser: AdamW with gradient clipping, and weight decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule(course),
            b1=0.9,
            b2=0.98,
            weight_decay=course.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def initial_state(subject: Subject, course: Course, seed: int) -> State:
    """Return the trained arrays and the optimiser state at the beginning: a dict of "params" and "opt_state"."""
    params = subject.initial(seed)
    return {"params": params, "opt_state": optimizer(course).init(params)}


def forward(
    config: models.ModelConfig, params: Any, tokens: jax.Array, at: jax.Array, implementation: str | None
) -> jax.Array:
    """Compute the logits at some positions of whole rows that start at position 0.

    The layers are a scan, because the program of a single layer compiles in seconds.

    Args:
        config: the model.
        params: its parameters with stacked layers, see `experiments.lab.training.subject.stack_layers`.
        tokens: int32 [B, T], padded on the right.
        at: int32 [B, N], the positions that go through the LM head.
        implementation: see `pallas_kernels.attend.causal_attention.causal_attention`.

    Returns:
        float32 [B, N, V].

    Raises:
        ValueError: a layer has a sliding window or no attention, or layers rotate differently, so that layers differ; or
            attention has sink logits or a soft cap.
    """
    if config.linear is not None:
        raise ValueError(f"training scans over equal layers, expected attention in all layers, got {config.linear}")
    if any(config.windows):
        raise ValueError(f"training scans over equal layers, expected a model without windows, got {config.windows}")
    if config.attention_sinks or config.attention_softcap is not None:
        raise ValueError("training computes attention without sink logits and soft cap, got a model that has one")
    kinds = layer_ropes(config)
    if len(set(kinds)) > 1:
        raise ValueError(f"training scans over equal layers, expected one kind of RoPE in all layers, got {set(kinds)}")
    inverse = rope.frequencies(kinds[0], config.head_dim)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    length = jnp.full((1,), tokens.shape[1], jnp.int32)  # padding counts: rows of one batch are treated as equally long

    def attend(layer: int, state: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        del layer
        q, k = rope.prepare(q, k, position[None], length, kinds[0])
        q, k = rope.rotate(q, position, inverse), rope.rotate(k, position, inverse)
        return causal_attention(q, k, v, implementation=implementation), state

    def run(carry: tuple[jax.Array, jax.Array], layer: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, update, _, _ = Block(config, 0).apply({"params": layer}, *carry, attend, None)
        return (x, update), None

    x = Table(config).apply({"params": params["embed"]}, tokens, method="embed")
    (x, update), _ = jax.lax.scan(run, (x, jnp.zeros_like(x)), params["layers"])
    x, update = (jnp.take_along_axis(y, at[:, :, None], axis=1) for y in (x, update))
    _, x = Norm(config).apply({"params": params["final_norm"]}, x, update)
    head = params["embed" if config.tie_word_embeddings else "lm_head"]
    return Table(config).apply({"params": head}, x, method="logits")


def choose(tokens: jax.Array, roles: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the positions of each row whose predictions count.

    Args:
        tokens: int32 [B, T].
        roles: int32 [B, T], see `experiments.lab.training.data.Row`.
        count: N positions of each row: first the positions that predict answers, then scattered positions of the
            language-model loss.

    Returns:
        The positions in increasing order, the tokens that they predict, and the roles of these tokens: int32 [B, N].
    """
    length = tokens.shape[1]
    target = jnp.roll(tokens, -1, axis=1)
    role = jnp.roll(roles, -1, axis=1).at[:, -1].set(0)  # the last position predicts nothing
    position = jnp.arange(length, dtype=jnp.int32)
    # A multiplicative hash scatters the positions over the row.
    scattered = length + ((position.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 8).astype(jnp.int32)
    rank = jnp.where(role >= FIRST_QUESTION_ROLE, position, jnp.where(role == LM_ROLE, scattered, 1 << 30))
    at = jnp.sort(jnp.argsort(rank, axis=1)[:, :count].astype(jnp.int32), axis=1)
    return at, jnp.take_along_axis(target, at, axis=1), jnp.take_along_axis(role, at, axis=1)


def losses(
    logits: jax.Array,
    target: jax.Array,
    role: jax.Array,
    tasks: jax.Array,
    length: int,
    total: Callable[[jax.Array], jax.Array] = lambda x: x,
    taught: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Compute the loss terms and exact-match counts of a batch.

    The answer tokens of a row count in proportion to the square root of their number. Otherwise a row with fifty answers of
    uuids would drown the rows with a single short answer, and evaluation consists of such rows.

    Args:
        logits: float32 [B, N, V].
        target: int32 [B, N], the tokens to predict.
        role: int32 [B, N], their roles, see `experiments.lab.training.data.Row`.
        tasks: int32 [B].
        length: T, tokens of a row.
        total: the sum of a value over all parts of a batch, if this is a part; the losses of all parts then add up.
        taught: float32 [B, N, V], the logits of a teacher. The language-model loss is then the distance to its distribution,
            not to the text, so that no text can be learned by heart; None without a teacher.

    Returns:
        "answer" and "lm": mean negative log-likelihoods in nats per token, float32 (with a teacher, "lm" is the mean
        Kullback-Leibler divergence from its distribution); "asked": int32 [number of row tasks],
        all questions; "right": int32 of the same shape, questions whose whole answer is the arg-max under teacher forcing.
    """
    rows = target.shape[0]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    is_answer = role >= FIRST_QUESTION_ROLE
    is_prose = role == LM_ROLE
    count = jnp.sum(is_answer, axis=1).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.maximum(count, 1.0))
    answer = jnp.sum(scale * jnp.sum(jnp.where(is_answer, nll, 0.0), axis=1))
    answer = answer / jnp.maximum(total(jnp.sum(scale * count)), 1.0)
    if taught is not None:
        likely = jax.nn.log_softmax(taught)
        nll = jnp.sum(jnp.exp(likely) * (likely - jax.nn.log_softmax(logits)), axis=-1)
    lm = jnp.sum(jnp.where(is_prose, nll, 0.0))
    lm = lm / jnp.maximum(total(jnp.sum(is_prose).astype(jnp.float32)), 1.0)

    slots = length // SHORTEST_QUESTION + 4
    wrong = is_answer & (jnp.argmax(logits, axis=-1).astype(jnp.int32) != target)
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], role.shape)
    question = jnp.clip(role - FIRST_QUESTION_ROLE, 0, slots - 1)
    zeros = jnp.zeros((rows, slots), jnp.int32)
    asked = zeros.at[row, question].max(is_answer.astype(jnp.int32))
    failed = zeros.at[row, question].max(wrong.astype(jnp.int32))
    by_task = jnp.zeros(len(ROW_TASKS), jnp.int32)
    return {
        "answer": answer,
        "lm": lm,
        "asked": by_task.at[tasks].add(jnp.sum(asked, axis=1)),
        "right": by_task.at[tasks].add(jnp.sum(asked * (1 - failed), axis=1)),
    }


def make_step(subject: Subject, course: Course, implementation: str | None, mesh: Mesh) -> Step:
    """Make the optimiser step, which the caller jits with its state donated.

    Args:
        subject: the trained model or adapter.
        course: rates, the share of positions with logits, the length of the run.
        implementation: see `pallas_kernels.attend.causal_attention.causal_attention`.
        mesh: devices on an axis "data"; each takes an equal part of the rows.

    Returns:
        step(state, frozen, tokens uint16 [B, T], roles uint16 [B, T], tasks int32 [B], lm_weight float32 []) ->
        (state, metrics); the loss is answer + lm_weight x lm.
    """
    transform = optimizer(course)

    def total(part: Any) -> Any:
        return jax.lax.psum(part, DATA)

    def objective(trained: Any, frozen: Any, tokens: jax.Array, roles: jax.Array, tasks: jax.Array, lm_weight: jax.Array):
        tokens, roles = tokens.astype(jnp.int32), roles.astype(jnp.int32)
        at, target, role = choose(tokens, roles, tokens.shape[1] // course.scored)
        logits = forward(subject.config, subject.params(frozen, trained), tokens, at, implementation)
        taught = None
        if subject.teacher is not None:
            taught = jax.lax.stop_gradient(forward(subject.teacher, frozen, tokens, at, implementation))
            beyond = at >= subject.teacher.max_position_embeddings  # where the teacher knows nothing
            role = jnp.where(beyond & (role == LM_ROLE), 0, role)
        metrics = losses(logits, target, role, tasks, tokens.shape[1], total, taught)
        metrics["loss"] = metrics["answer"] + lm_weight * metrics["lm"]
        return metrics["loss"], metrics

    def gradient(*arguments: Any) -> Any:
        """Compute the gradient and the metrics of all rows, from each device's part."""
        return total(jax.grad(objective, has_aux=True)(*arguments))

    split = jax.shard_map(
        gradient, mesh=mesh, in_specs=(P(), P(), P(DATA), P(DATA), P(DATA), P()), out_specs=(P(), P()), check_vma=False
    )

    def step(
        state: State, frozen: Any, tokens: jax.Array, roles: jax.Array, tasks: jax.Array, lm_weight: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        gradients, metrics = split(state["params"], frozen, tokens, roles, tasks, lm_weight)
        metrics["gradient_norm"] = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradients)))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 step count with floats
            updates, opt_state = transform.update(gradients, state["opt_state"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, metrics

    return step
