"""The checkpoint of a training run: one safetensors file with the state, the finished steps and the run's settings."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from experiments.records import write_bytes


def save_checkpoint(file: pathlib.Path, step: int, state: Any, settings: Mapping[str, Any]) -> None:
    """Write the state after ``step`` finished steps in place of an older checkpoint; a killed run leaves the older one.

    Args:
        file: the checkpoint.
        step: finished steps.
        state: a tree of arrays.
        settings: values that must not change between a run and its continuation; JSON values.
    """
    leaves = jax.device_get(jax.tree.leaves(state))
    arrays = {str(index): np.asarray(leaf, order="C") for index, leaf in enumerate(leaves)}
    about = {"step": str(step), "settings": json.dumps(settings)}
    write_bytes(file, safetensors.numpy.save(arrays, about))


def restore_checkpoint(file: pathlib.Path, like: Any, settings: Mapping[str, Any]) -> tuple[int, Any]:
    """Read a checkpoint.

    Args:
        file: the checkpoint.
        like: a state of the same structure.
        settings: the settings of this run; a setting that the checkpoint lacks may have any value.

    Returns:
        The number of finished steps, and the state.

    Raises:
        ValueError: the checkpoint belongs to other settings.
    """
    with safetensors.safe_open(file, "numpy") as tensors:
        about = tensors.metadata()
        stored, expected = json.loads(about["settings"]), json.loads(json.dumps(settings))
        changed = [name for name in stored if name in expected and stored[name] != expected[name]]
        if changed:
            before, here = (", ".join(f"{name} {of[name]}" for name in changed) for of in (stored, expected))
            raise ValueError(f"the checkpoint was made with {before}, this run has {here}")
        structure = jax.tree.structure(like)
        leaves = [tensors.get_tensor(str(index)) for index in range(structure.num_leaves)]
    return int(about["step"]), jax.tree.unflatten(structure, leaves)
