"""Speed against the peak of devices, units of the loss, and the log."""

import json
import math
from types import SimpleNamespace

import jax
import pytest

from fp4jax.train import Evaluation, JsonLines, peak_flops
from fp4jax.train.metrics import utilization


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("TPU v5 lite", 197),
    ],
)
def test_peaks_of_known_devices(kind, teraflops):
    assert peak_flops(kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A10G", "TPU v5", ""])
def test_other_devices_have_no_known_peak(kind):
    assert peak_flops(kind) is None


def test_utilization_is_a_fraction_of_all_devices():
    a100, t4 = (SimpleNamespace(device_kind=kind) for kind in ("A100", "Tesla T4"))
    found = utilization(1e6, flops_per_token=1e8, devices=[a100, t4])
    assert found == pytest.approx(1e14 / (377 * 1e12))
    assert utilization(1e6, flops_per_token=1e8, devices=jax.devices("cpu")) is None


def test_evaluation_in_both_units():
    evaluation = Evaluation(nats=100 * math.log(2), tokens=50, bytes=200)
    assert evaluation.nats_per_token == pytest.approx(2 * math.log(2))
    assert evaluation.bits_per_byte == pytest.approx(0.5)


def test_lines_are_on_disk_as_soon_as_written(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonLines(path) as log:
        log.write({"step": 1, "loss": 6.25})
        log.write({"step": 2, "mfu": None})
        lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 6.25},
        {"step": 2, "mfu": None},
    ]


def test_a_full_disk_is_an_error_that_names_the_log_and_closing_is_none():
    log = JsonLines("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log.write({"step": 1})
    log.close()


def test_numbers_that_json_lacks_are_null(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 3, "loss": float("nan"), "grad_norm": float("inf")})
        log.write({"domains": {"code": {"losses": [1.0, float("-inf")]}}})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 3, "loss": None, "grad_norm": None}
    assert json.loads(lines[1]) == {"domains": {"code": {"losses": [1.0, None]}}}


def test_a_log_is_written_on_at_its_end(tmp_path):
    for step in (1, 2):
        with JsonLines(tmp_path / "metrics.jsonl") as log:
            log.write({"step": step})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
