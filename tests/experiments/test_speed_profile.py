"""Kernels of a step: read from traces with known contents, and the command where there is no GPU."""

from __future__ import annotations

import gzip
import json

import jax
import pytest

from experiments.speed import profile
from experiments.speed.kernel_times import kernel_times, read_trace
from experiments.speed.profile import ProfileSettings, profile_table
from experiments.speed.settings import MODELS
from models import ModelConfig
from tests.tiny_models import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

STREAMS = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7(Compute)"}},
    {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "Stream #8(Compute)"}},
    {"ph": "M", "pid": 1, "tid": 9, "name": "thread_name", "args": {"name": "XLA Ops"}},
    {"ph": "M", "pid": 5, "name": "process_name", "args": {"name": "/host:CPU"}},
    {"ph": "M", "pid": 5, "tid": 7, "name": "thread_name", "args": {"name": "Stream of thoughts"}},
]


def ran(name, start, took, pid=1, tid=7):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": took}


def test_kernels_of_all_streams_count_and_instants_count_once():
    events = [
        *STREAMS,
        ran("b", 20, 10),  # not in order
        ran("a", 0, 10),
        ran("a", 25, 30, tid=8),  # 5 us beside b
        ran("op", 0, 100, tid=9),
        ran("host", 0, 100, pid=5),
    ]
    (one,) = kernel_times(events)
    assert one.device == "/device:GPU:0"
    assert one.span == pytest.approx(55e-6)
    assert one.busy == pytest.approx(45e-6)  # 10, 10, and 25 after b
    assert {name: (count, pytest.approx(seconds)) for name, (count, seconds) in one.kernels.items()} == {
        "a": (2, 40e-6),
        "b": (1, 10e-6),
    }
    assert next(iter(one.kernels)) == "a"


def test_the_newest_trace_of_a_folder_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected plugins.*got no such file"):
        read_trace(tmp_path)
    for day, name in (("2026_01_02", "new"), ("2026_01_01", "old")):
        folder = tmp_path / "plugins" / "profile" / day
        folder.mkdir(parents=True)
        text = json.dumps({"traceEvents": [*STREAMS, ran(name, 0, 1)]})
        (folder / "host.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    assert list(read_trace(tmp_path)[0].kernels) == ["new"]


def test_the_table_names_the_rest_of_the_kernels():
    kernels = {
        "long": {"per_step": 2.0, "seconds": 8e-6},
        "short": {"per_step": 1.0, "seconds": 1e-6},
        "less": {"per_step": 3.0, "seconds": 5e-7},
    }
    row = {
        "method": "full", "where": "model=2", "sums": "xla", "device": "/device:GPU:1",
        "value": 2e-3, "span": 3e-3, "busy": 1e-3, "kernels": kernels,
    }  # fmt: skip
    text = profile_table([row], top=1)
    head = "**full, model=2, GPU:1, sums xla**: 2.000 ms a step; under the profiler 3.000 ms, of which kernels ran 1.000 ms."
    assert head in text
    assert "| long | 2.0 | 4.00 | 8.0 |" in text
    assert "| 2 others | 4.0 |  | 1.5 |" in text
    assert "short" not in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"parts": 2, "mesh": "model=2"}, "--parts runs on one device, so it has no meaning with --mesh model=2"),
        ({"methods": ("fool",)}, "unknown method 'fool'"),
        ({"sums": ("xla",)}, "--sums has no meaning without --mesh"),
    ],
)
def test_wrong_settings_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        ProfileSettings(**given)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(MODELS, "tiny", lambda: ModelConfig(**TINY))
    given = ["--model", "tiny", "--methods", "full", "--length", "64", "--tokens", "2"]
    code = profile.main([*given, "--out", str(tmp_path / "p.json")])
    assert code == 2
    assert "the profiler saw no kernels" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
