"""An evaluation from Python: `kvjax.evaluate` calls `evaluate_methods`."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import models
from experiments.answering import of_loaded, preset
from experiments.evaluation.cells import make_cells
from experiments.evaluation.comparison import beside_reference, flat_rows, load
from experiments.evaluation.runner import Runner
from experiments.evaluation.settings import EvaluationSettings
from kvjax import plugins, registry
from kvjax.protocol.fields import Share, shown
from kvjax.protocol.method import Method
from kvjax.wrappers import Pattern


def evaluate_methods(
    model: Any,
    methods: Sequence[Method | str | Mapping[str, Any]],
    settings: Mapping[str, Any],
    out: str | os.PathLike | None,
    *,
    progress: bool,
) -> list[dict[str, Any]]:
    """Run an evaluation, and return its rows; see `kvjax.evaluate`.

    Args:
        model: a `models.Loaded`, or what `load_model` takes.
        methods: methods, names, or ``{name: knobs}``.
        settings: further settings by name.
        out: the result folder; None keeps nothing.
        progress: whether to show a progress bar.

    Raises:
        TypeError: ``model`` is something else.
    """
    _check_model(model, settings)
    entries = [entry_of(method) if isinstance(method, Method) else method for method in methods]
    name = model.name if isinstance(model, models.Loaded) else str(model)
    chosen = EvaluationSettings.from_mapping({"workers": 0, **settings, "model": name, "methods": entries}, "kvjax.evaluate")
    cells = make_cells(chosen)  # refuses damaged files before the model is loaded
    loaded = of_loaded(model) if isinstance(model, models.Loaded) else chosen.load()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        runner = Runner(chosen, loaded, folder, cells=cells, progress=progress)
        runner.run()
        runner.folder.keep_examples()
        compared = beside_reference(load([folder]))
    labels, asked = {choice.label for choice in chosen.choices}, [cell.identity.items() for cell in cells]
    return [  # the folder may have more
        row
        for item, row in zip(compared, flat_rows(compared), strict=True)
        if item.row["method"] in labels and any(all(item.row.get(name) == x for name, x in cell) for cell in asked)
    ]


def _check_model(model: Any, settings: Mapping[str, Any]) -> None:
    if not isinstance(model, (models.Loaded, str, os.PathLike)):
        raise TypeError(f"model must be what kvjax.models.load returns, a name or a path, got {type(model).__name__}")
    if isinstance(model, models.Loaded) and settings.get("weight_dtype") is not None:
        raise ValueError(
            f"weight_dtype is for a model that evaluate loads, got {settings['weight_dtype']!r} and a loaded model: give it "
            "to kvjax.models.load"
        )


def entry_of(method: Method) -> dict[str, Any]:
    """Write a method as ``{name: knobs}``, as a settings file holds it.

    Knobs that have their defaults are left out, unless a settings file would mean a paper's value by that. A class that kvjax
    does not know is registered. Budgets that are shares become texts.

    Raises:
        ValueError: a knob has an array of values, which no settings file can hold.
    """
    cls = type(method)
    if cls not in (*registry.classes().values(), *registry.WRAPPERS.values()):
        plugins.register(cls)
    knobs, always = {}, preset(cls.__name__.lower(), 1 << 17)[0].keys()
    for field in dataclasses.fields(cls):
        value = vars(method)[field.name]
        size = vars(method).get("budget") if field.name == "capacity" else None
        filled_in = type(size) is int and value == size
        if field.name in always or (value is not field.default and not filled_in):
            value = _plain(f"{cls.__name__}: {field.name}", value)
            knobs |= {field.name: value} if field.name in always or value != field.default else {}
    return {cls.__name__.lower(): knobs}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Method):
        return entry_of(value)
    if isinstance(value, Share):
        return repr(value.part)
    if isinstance(value, dict):
        return {at: _plain(name, inner) for at, inner in value.items()}
    if isinstance(value, Pattern):
        return {field.name: x for field in dataclasses.fields(value) if (x := vars(value)[field.name]) != field.default}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and all(part is None or isinstance(part, (int, float, str)) for part in value):
        return list(value)
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return array.item()
    raise ValueError(f"{name} must be a knob that a settings file can hold, or not be given; got {shown(value)}")
