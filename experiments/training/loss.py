"""The loss and the optimiser step of training: pure functions of parameters and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import models
from experiments.training.data import FIRST_QUESTION_ROLE, LM_ROLE, ROW_TASKS
from kvjax import rope
from pallas_kernels.causal_attention import causal_attention

PEAK_LEARNING_RATE = 2e-3
FINAL_SHARE = 0.05  # of the peak, reached at the end of the cosine
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.02
SHORTEST_QUESTION = 32  # tokens; bounds the number of questions in a row

State = dict[str, Any]
Step = Callable[[State, jax.Array, jax.Array, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]


def schedule(total_steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine that reaches 5 % of the peak at the last step."""
    warmup = min(WARMUP_STEPS, max(1, total_steps // 10))
    return optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, warmup, max(total_steps, warmup + 1), PEAK_LEARNING_RATE * FINAL_SHARE
    )


def optimizer(total_steps: int) -> optax.GradientTransformation:
    """AdamW with gradient clipping; weight decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule(total_steps),
            b1=0.9,
            b2=0.98,
            weight_decay=WEIGHT_DECAY,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def initial_state(config: models.ModelConfig, total_steps: int, seed: int) -> State:
    """Fresh float32 parameters and optimiser state.

    Args:
        config: the model (its compute dtype does not matter here).
        total_steps: length of the run, for the schedule.
        seed: seed of the parameters.

    Returns:
        A dict of "params" and "opt_state".
    """
    params = models.random_params(dataclasses.replace(config, dtype="float32"), jax.random.key(seed))
    return {"params": params, "opt_state": optimizer(total_steps).init(params)}


def forward(config: models.ModelConfig, params: Any, tokens: jax.Array, implementation: str) -> jax.Array:
    """The logits of whole rows that start at position 0.

    Args:
        config: the model.
        params: its parameters.
        tokens: int32 [B, T], padded on the right.
        implementation: see `pallas_kernels.dense_attention.causal_attention`.

    Returns:
        float32 [B, T, V].
    """
    inverse = rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def attend(layer: int, state: None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        del layer
        q, k = rope.rotate(q, position, inverse), rope.rotate(k, position, inverse)
        return causal_attention(q, k, v, implementation=implementation), state

    logits, _ = config.apply(params, tokens, attend, (None,) * config.num_layers)
    return logits


def losses(logits: jax.Array, tokens: jax.Array, roles: jax.Array, tasks: jax.Array) -> dict[str, jax.Array]:
    """The loss terms and exact-match counts of a batch.

    The answer tokens of a row count in proportion to the square root of their number. Otherwise a row with fifty answers of
    uuids would drown the rows with a single short answer, and evaluation consists of such rows.

    Args:
        logits: float32 [B, T, V].
        tokens: int32 [B, T].
        roles: int32 [B, T], see `experiments.training.data.Row`.
        tasks: int32 [B].

    Returns:
        "answer" and "lm": mean negative log-likelihoods in nats per token, float32; "asked": int32 [number of row tasks],
        all questions; "right": int32 of the same shape, questions whose whole answer is the arg-max under teacher forcing.
    """
    rows, length = tokens.shape
    target = jnp.roll(tokens, -1, axis=1)
    role = jnp.roll(roles, -1, axis=1).at[:, -1].set(0)  # the last position predicts nothing
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    is_answer = role >= FIRST_QUESTION_ROLE
    is_prose = role == LM_ROLE
    count = jnp.sum(is_answer, axis=1).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.maximum(count, 1.0))
    answer = jnp.sum(scale * jnp.sum(jnp.where(is_answer, nll, 0.0), axis=1))
    answer = answer / jnp.maximum(jnp.sum(scale * count), 1.0)
    lm = jnp.sum(jnp.where(is_prose, nll, 0.0)) / jnp.maximum(jnp.sum(is_prose).astype(jnp.float32), 1.0)

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


def make_step(config: models.ModelConfig, total_steps: int, implementation: str) -> Step:
    """The optimiser step, which the caller jits with its state donated.

    Args:
        config: the model, with the compute dtype.
        total_steps: length of the run, for the schedule.
        implementation: see `pallas_kernels.dense_attention.causal_attention`.

    Returns:
        step(state, tokens uint16 [B, T], roles uint16 [B, T], tasks int32 [B], lm_weight float32 []) ->
        (state, metrics); the loss is answer + lm_weight x lm.
    """
    transform = optimizer(total_steps)

    def objective(params: Any, tokens: jax.Array, roles: jax.Array, tasks: jax.Array, lm_weight: jax.Array):
        metrics = losses(forward(config, params, tokens, implementation), tokens, roles, tasks)
        metrics["loss"] = metrics["answer"] + lm_weight * metrics["lm"]
        return metrics["loss"], metrics

    def step(state: State, tokens: jax.Array, roles: jax.Array, tasks: jax.Array, lm_weight: jax.Array):
        gradient, metrics = jax.grad(objective, has_aux=True)(
            state["params"], tokens.astype(jnp.int32), roles.astype(jnp.int32), tasks, lm_weight
        )
        metrics["gradient_norm"] = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 step count with floats
            updates, opt_state = transform.update(gradient, state["opt_state"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, metrics

    return step
