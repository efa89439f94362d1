"""Commands with ``--mesh``: what only a process with many devices can show. `eight_devices.py` runs these checks, too."""

import contextlib
import functools
import io
import json
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.answering import __main__ as generate
from experiments.answering import make_mesh
from experiments.demo import __main__ as demo
from experiments.evaluation import __main__ as evaluation
from experiments.speed import __main__ as speed
from experiments.speed import bench
from experiments.speed.roofline import Bandwidth
from models import ModelConfig
from pallas_kernels import axes
from tests.tiny_models import write_model

CONFIG = ModelConfig(
    vocab_size=5120, hidden_size=32, intermediate_size=64, num_layers=1, num_q_heads=8, num_kv_heads=4, head_dim=8,
    max_position_embeddings=2048, tie_word_embeddings=True, qk_norm=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip
MESH = "data=2,model=2"


@functools.cache
def tiny():
    """A checkpoint directory, which goes with this process."""
    folder = tempfile.TemporaryDirectory()
    return folder, write_model(pathlib.Path(folder.name) / "tiny", CONFIG)


def called(command, *flags):
    """What a command wrote to standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as told:
        code = command.main([*map(str, flags)])
    assert code == 0, told.getvalue()
    return out.getvalue(), told.getvalue()


def beside(command, *flags, read):
    """``read`` of the folder that a command made on one device, and of the one that it made on a mesh."""
    flags = "--model", tiny()[1], "--dtype", "float32", "--no-plot", "--quiet", *flags
    found = []
    for more in ((), ("--mesh", MESH)):
        with tempfile.TemporaryDirectory() as out:
            called(command, *flags, "--out", out, *more)
            found.append(read(pathlib.Path(out)))
    return found


def predictions(folder):
    """The rows of a result folder, and its predictions in their order."""
    rows = json.loads((folder / "metrics.json").read_text())["metrics"]
    (run,) = json.loads((folder / "metrics.json").read_text())["notes"]["runs"]
    told = run["settings"]["mesh"], run["weights"]
    assert all(row.get("mesh") == told[0] for row in rows)
    lines = [[json.loads(line) for line in (folder / row["predictions"]).read_text().splitlines()] for row in rows]
    return told, rows, lines


def same_answers(*flags, command=evaluation):
    """The same answers and the same accounting on a mesh, on which three rows are four."""
    flags = "--samples", 3, "--workers", 0, *flags
    ((_, weights), here, one), (told, there, other) = beside(command, *flags, read=predictions)
    assert told == (MESH, weights), "the same numbers tell a model from others, wherever they are"
    for line, same in zip(sum(one, []), sum(other, []), strict=True):
        assert line.keys() == same.keys()
        for name, value in line.items():
            assert same[name] == value, name
    for row, same in zip(here, there, strict=True):
        fields = "attended_tokens", "length_tokens", "bytes_read_per_step", "resident_bytes_per_row"
        assert {name: row[name] for name in fields} == {name: same[name] for name in fields}


def check_eval():
    same_answers("--methods", "full", "--tasks", "passkey", "--lengths", 128, "--template", "none", "--max-new-tokens", 4)


def check_eval_of_questions():
    flags = "--methods", "streamingllm,quest", "--lengths", 384, "--questions", 2
    same_answers(*flags, "--tasks", "niah_multikey_1", "--question", "extend")


def check_sweep():
    flags = "--methods", "snapkv", "--grid", "budget=32,64", "--set", "snapkv.obs_window=8", "--lengths", 128
    same_answers(*flags, "--tasks", "passkey")


def check_demo():
    """Five questions about a context that both groups of devices have read; and five prompts."""

    def read(folder):
        return json.loads((folder / "demo.json").read_text())

    flags = "--length", 512, "--samples", 1, "--methods", "snapkv,quest", "--budget", "1/4"
    here, there = beside(demo, *flags, read=read)
    assert (here["settings"]["mesh"], there["settings"]["mesh"]) == (None, MESH)
    assert there["answers"] == here["answers"]
    for one, other in zip(here["metrics"], there["metrics"], strict=True):
        assert one["attended_tokens"] == other["attended_tokens"]


def check_generate():
    """The same text, greedy and drawn; and what cannot be is refused before the model is read."""
    prompt = tiny()[1] / "prompt.txt"
    prompt.write_text("The grass is green and the sky is blue.")
    flags = "--model", tiny()[1], "--prompt-file", prompt, "--max-new-tokens", 8, "--method", "quest", "--dtype", "float32"
    for more in ((), ("--temperature", 1.0)):
        here, _ = called(generate, *flags, *more)
        there, told = called(generate, *flags, *more, "--mesh", MESH)
        assert here == there and "each of 2 groups of devices generates the same" in told
    here, _ = called(generate, *flags)
    for mesh in ("slots=4", "model=2,slots=2"):
        assert called(generate, *flags, "--mesh", mesh)[0] == here
    for mesh, expected in (
        ("model=16", "a mesh of data=1,model=16 needs 16 devices, got 8 (cpu)"),
        ("slots=16", "a mesh of data=1,model=1,slots=16 needs 16 devices, got 8 (cpu)"),
        ("model=8", "num_kv_heads=4, intermediate_size=64, vocab_size=5120 can be split over 1 or 2 or 4 devices"),
        ("heads=2", "the axes of a mesh are data, model and slots, got 'heads' in 'heads=2'"),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert generate.main([*map(str, flags), "--mesh", mesh]) == 2
        assert expected in told.getvalue() and told.getvalue().count("\n") == 1, told.getvalue()


def check_sums():
    """The sum of all parts, with the same bits everywhere, in one collective."""
    for text, dtypes in (("model=8", (jnp.float32, jnp.bfloat16, jnp.int32)), ("data=4,model=2", (jnp.bfloat16,))):
        mesh = make_mesh(text)
        devices, split = mesh.shape["model"], PartitionSpec("model")
        mapped = jax.shard_map(axes.total, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        for dtype in dtypes:
            parts = jnp.asarray(100 * np.random.default_rng(0).standard_normal((devices, 3, 8)), dtype)
            want, near = np.asarray(parts).astype(np.float64).sum(axis=0), 0.01 if dtype == jnp.bfloat16 else 1e-6
            program = jax.jit(mapped).lower(parts).compile()
            got = np.asarray(program(parts))
            assert got.dtype == dtype and all(np.array_equal(x, got[0]) for x in got), dtype
            np.testing.assert_allclose(got[0].astype(np.float64), want, atol=100 * near, rtol=near)
            assert " all-reduce(" in program.as_text()


def check_speed():
    """Rows of a mesh stand beside rows of one device; bytes and floor belong to one device of the mesh."""
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=8, num_kv_heads=4, head_dim=8,
        max_position_embeddings=4096,
    )  # fmt: skip
    bandwidth = mock.patch.object(bench, "measure_bandwidth", lambda: Bandwidth(1e9, 1, {}))
    with tempfile.TemporaryDirectory() as out, mock.patch.dict(bench.MODELS, tiny=lambda: config), bandwidth:
        record = pathlib.Path(out) / "speed.json"
        flags = "--model", "tiny", "--methods", "quest,chess", "--lengths", 128, "--tokens", 2, "--repeats", 1
        flags = *flags, "--batches", 2, "--out", record, "--no-plot", "--no-split"
        slots = "model=2,slots=2"
        placed = ("--mesh", MESH, "--beside-one"), ("--mesh", MESH, "--prefill"), ("--mesh", slots)
        for more in (*placed, ("--mesh", slots, "--prefill")):
            said, _ = called(speed, *flags, *more)
            assert ("of one device" in said) == ("--prefill" not in more)
        rows = json.loads(record.read_text())["metrics"]
        assert "| data=2,model=2 | Quest | 128 |" in record.with_suffix(".md").read_text()
    assert rows[0]["run"] == rows[3]["run"], "one device is in the run of the mesh"
    slots = f"data=1,{slots}"
    placed = [None] * 3 + [MESH] * 6 + [slots] * 6
    assert [(row["mesh"], row["error"]) for row in rows] == [(mesh, None) for mesh in placed]
    for one, part, slot in zip(rows[:3], rows[3:6], rows[9:12], strict=True):
        assert (part["method"], part["attended_tokens"]) == (one["method"], one["attended_tokens"])
        assert (slot["method"], slot["attended_tokens"]) == (one["method"], one["attended_tokens"])
        for row in (part, slot):
            assert row["cache_bytes_read"] == one["cache_bytes_read"] / 4
            assert one["weight_bytes"] / 2 <= row["weight_bytes"] <= 1.05 * one["weight_bytes"] / 2  # norms are everywhere
            assert row["floor"] == (row["weight_bytes_read"] + row["cache_bytes_read"]) / 1e9
        assert part["cache_bytes"] <= 1.01 * one["cache_bytes"] / 4
        assert slot["cache_bytes"] <= 1.5 * one["cache_bytes"] / 4  # each device has whole pages
