"""Checkpoints of a training run, in Orbax's format."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from experiments.lab.training.loss import State
from experiments.lab.training.plain_path import plain_path


class Checkpoints:
    """The checkpoints of a run, which belong to its settings.

    Args:
        directory: directory of the checkpoints, of any name; is made if it is not there.
        settings: values that must not change between a run and its continuation; JSON values.
    """

    def __init__(self, directory: pathlib.Path, settings: dict[str, Any]) -> None:
        self._settings = json.loads(json.dumps(settings))  # as the file will give them back
        self._directory = directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._link = contextlib.ExitStack()
        self._manager = ocp.CheckpointManager(
            self._link.enter_context(plain_path(self._directory)),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )

    def save(self, step: int, state: State) -> None:
        """Save the state after ``step`` finished steps."""
        if self._manager.latest_step() == step:
            return
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self._settings))
        self._manager.save(step, args=saved)
        self._manager.wait_until_finished()

    def restore(self, like: State) -> tuple[int, State]:
        """Restore the newest checkpoint.

        Args:
            like: a state of the same shapes and dtypes.

        Returns:
            The number of finished steps, and the state.

        Raises:
            ValueError: there is no checkpoint, or it belongs to other settings.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ValueError(f"nothing to resume in {self._directory}")
        settings = self._manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]
        changed = [name for name in settings if name in self._settings and settings[name] != self._settings[name]]
        if changed:
            made, mine = (", ".join(f"{name} {of[name]}" for name in changed) for of in (settings, self._settings))
            raise ValueError(f"the checkpoint was made with {made}, this run has {mine}")
        template = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return step, self._manager.restore(step, args=template)["state"]

    def close(self) -> None:
        """Release the directory."""
        self._manager.close()
        self._link.close()
