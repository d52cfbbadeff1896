"""The command on virtual devices."""

import re
from importlib import metadata

import pytest

from experiments.scaling_gpus import invariance, run
from experiments.scaling_gpus.tasks import Task


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "huge"], "--models: must be of dense_1p5b, .* got 'huge'"),
        (["--policies", "fp3"], "policy: must be"),
        (["--dry", "--models", "huge"], "--models: must be of dense_1p5b, .* 'huge'"),
        ([], "--models: dense_1p5b must have GPUs, .* --dry"),
        (["--meshes", "fsdp"], "mesh must read AXIS=N"),
        (["--scalings", "fast"], "--scalings: must be of weak, strong, got 'fast'"),
    ],
)
def test_bad_names_are_one_sentence(capsys, monkeypatch, flags, message):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert run.main(flags) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*{message}", error) and error.count("\n") == 1


@pytest.mark.parametrize("command", [run, invariance])
def test_a_library_that_is_not_there_is_one_sentence(capsys, monkeypatch, command):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(metadata, "version", missing)
    assert command.main(["--policies", "qwix"]) == 2
    error = capsys.readouterr().err
    assert "qwix must be installed" in error and error.count("\n") == 1


def test_a_mesh_that_does_not_divide_is_a_row():
    task = Task(model="tiny", case="bf16", mesh="tensor=8", scaling="weak", devices=8)
    row = run.prepare(task)()
    assert "num_heads must be a multiple of tensor" in row["error"]
    assert row["device"]["count"] == 8


def test_a_step_is_measured_on_a_mesh(monkeypatch):
    monkeypatch.setattr(run.programs, "_BLOCK_SECONDS", 1e-6)
    task = Task(model="tiny", case="bf16", mesh="fsdp=2", scaling="strong", devices=2)
    row = run.prepare(task)()
    assert row["batch"] == [8, 32] and row["communication_share"] is None
    assert row["collective_bytes"]["all-gather"] > 0
    assert row["tokens_per_second"] == pytest.approx(
        1e3 * 8 * 32 / min(row["milliseconds"])
    )
