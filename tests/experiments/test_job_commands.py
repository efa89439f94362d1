"""Every job's command explains itself, in this process; an unknown flag ends with a line and exit code 2."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

JOBS = {
    "ablations": "--trained-length", "fidelity": "--streams",
    "insight": "--calibration-new-tokens", "speed.kernels": "--only", "speed.peers": "--caches",
    "lm_eval": "run", "records": "--fields", "site": "--figures", "speed": "--largest-batch", "speed.offload": "--share",
    "speed.tpu_bytes": "--lengths",
    "training": "--save-minutes", "training.tokenizer": "--text",
}  # fmt: skip


def main_of(job):
    name = f"experiments.{job}"
    module = importlib.import_module(name)
    return (importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module).main


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_help(job, capsys):
    if job == "lm_eval" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("the harness (lm_eval) is not installed")
    with pytest.raises(SystemExit) as ended:
        main_of(job)(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code in (0, None) and said.startswith("usage: ") and JOBS[job] in said


@pytest.mark.parametrize("job", [job for job in JOBS if job != "lm_eval"])
def test_an_unknown_flag_is_refused(job, capsys):
    with pytest.raises(SystemExit) as ended:
        main_of(job)(["--nonsense"])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
