"""Runs that go on upon other devices, and in another number of processes."""

import json

import pytest

from experiments import processes

BF16 = "--policies=bf16"
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def losses(out):
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def undisturbed(command, finish, tmp_path_factory):
    """The losses on one device."""
    out = tmp_path_factory.mktemp("one") / "run"
    finish(command(out, BF16))
    return losses(out)


def assert_near(out, undisturbed):
    found = losses(out)
    assert list(found) == list(undisturbed)
    # The order of sums differs with the number of devices, and training amplifies it.
    assert found == pytest.approx(undisturbed, rel=0.02)


def test_from_one_device_onto_eight_and_back(
    command, finish, wait_for, is_training, undisturbed, tmp_path
):
    out = tmp_path / "run"
    one = command(out, BF16)
    wait_for(is_training, out, one)
    one.terminate()
    finish(one, status=75)
    before = len(losses(out))
    eight = command(out, BF16, "--mesh=data=8", **EIGHT)
    wait_for(lambda out: len(losses(out)) > before, out, eight)
    eight.terminate()
    finish(eight, status=75)
    assert before < len(losses(out)) < 60
    finish(command(out, BF16))
    assert_near(out, undisturbed)


def test_from_two_processes_onto_one(
    command, finish, wait_for, is_training, undisturbed, tmp_path
):
    out = tmp_path / "run"
    two = command(out, BF16, "--distributed", "--mesh=fsdp=2", processes=2)
    wait_for(is_training, out, two)
    two.terminate()
    finish(two, status=75)
    finish(command(out, BF16))
    assert_near(out, undisturbed)


def test_a_process_that_waits_in_vain_says_so(command, finish, tmp_path):
    alone = command(
        tmp_path / "run",
        *("--distributed", "--wait=2"),
        JAX_COORDINATOR_ADDRESS="localhost:1",
        JAX_NUM_PROCESSES="2",
        JAX_PROCESS_ID="1",
    )
    error = finish(alone, status=75)
    assert error.startswith(
        "error: --distributed: all 2 processes must come within 2 s"
    )
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_an_address_without_a_port_is_one_sentence(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node-0")
    with pytest.raises(ValueError, match="ADDRESS must be host:port, got node-0"):
        processes.initialize(timeout=1)
