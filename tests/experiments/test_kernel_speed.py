"""The table of speeds, and its file."""

import json

import pytest

from experiments.kernels import linear, quantize, timing


def test_writes_rows_versions_and_device(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    monkeypatch.setattr(quantize, "CASES", quantize.CASES[:1])
    out = tmp_path / "speed.jsonl"
    quantize.main(("32x64",), implementations=("xla",), out=out)
    row = json.loads(out.read_text())
    assert row["bytes"] == 2 * 2 * 32 * 64
    assert row["ratio_to_copy"] == row["microseconds"] / row["copy_microseconds"]
    assert row["device"]["platform"] == "cpu" and "jax" in row["versions"]
    assert "UNIFORM rows, RHT16" in capsys.readouterr().out


def test_a_kernel_that_cannot_run_here_raises():
    with pytest.raises(NotImplementedError, match="'mosaic' cannot do this"):
        quantize.measure(quantize.CASES[0], (256, 256), "mosaic")


def test_a_linear_layer_is_timed_over_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    out = tmp_path / "linear.jsonl"
    linear.main(("32x32x32",), names=("bf16", "mxfp4, FP8"), out=out)
    bf16, mxfp4 = map(json.loads, out.read_text().splitlines())
    assert bf16["ratio"] == 1
    expected = min(mxfp4["milliseconds"]) / min(bf16["milliseconds"])
    assert abs(mxfp4["ratio"] / expected - 1) < 1e-6
