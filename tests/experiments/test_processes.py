"""Runs that go on upon other devices, and in another number of processes."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from experiments import pretrain, processes

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


UNLIKE = """
import os, sys, time
me = int(os.environ["JAX_PROCESS_ID"])
os.environ["TZ"] = f"UTC-{me}"
time.tzset()
from experiments import pretrain
prepare = pretrain.prepare
def prepare_late(*args):
    time.sleep(2 * me)
    return prepare(*args)
pretrain.prepare = prepare_late
of_one = os.environ.get("OF_ONE", "").split()
from experiments.trial import Run
def fail(run):
    raise OSError("no disk")
def hang(run):
    open("hung", "w").close()
    while True:
        time.sleep(1)
trained = os.environ.get("TRAINED")
if me and trained:
    Run._train = {"fail": fail, "hang": hang}[trained]
sys.exit(pretrain.main(sys.argv[1:] + of_one * me))
"""


@pytest.fixture
def unlike(command, tmp_path):
    """Starts two processes, of which the second is late and in another time zone."""

    def start(out, **environment):
        flags = (BF16, "--distributed", "--mesh=data=2", "--resume=never", "--steps=4")
        root = str(Path(__file__).parents[2])
        environment |= {"PYTHONPATH": root}
        return command(
            out, *flags, processes=2, code=UNLIKE, cwd=tmp_path, **environment
        )

    return start


def test_processes_come_onto_one_folder_and_then_refuse_it(unlike, finish, tmp_path):
    finish(unlike(""))
    (folder,) = (tmp_path / "runs").iterdir()
    assert list(losses(folder)) == [1, 2, 3, 4]
    error = finish(unlike(folder), status=2)
    assert error.startswith("[0] error: --out: must be a new or an empty folder")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("of_one", "message"),
    [
        ("--data=nowhere", "process 1: read_documents: source must be"),
        ("--steps=5", "process 1: .* process 0 has config.run.steps=4, not 5"),
        ("--out=there", "process 1: .* process 0 has --out=.*/here., not .*/there"),
        ("--mesh=fsdp=2", 'process 1: .* process 0 has --mesh="data=2", not "fsdp=2"'),
    ],
)
def test_what_one_process_is_wrong_about_comes_onto_one_line(
    unlike, finish, tmp_path, of_one, message
):
    error = finish(unlike("here", OF_ONE=of_one), status=2)
    assert re.match(rf"\[0\] error: {message}", error) and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_where_one_fails_the_other_is_not_killed_while_it_waits(unlike, finish):
    began = time.monotonic()
    error = finish(unlike("here", TRAINED="fail"), status=70)
    assert "[1] error: no disk\n" in error
    assert time.monotonic() - began < 90


def test_a_run_that_hangs_is_killed_while_it_waits(unlike, finish, wait_for, tmp_path):
    hung = unlike("here", TRAINED="hang")
    wait_for(lambda path: path.exists(), tmp_path / "hung", hung)
    hung.terminate()
    time.sleep(2)
    assert hung.poll() is None
    hung.terminate()
    finish(hung, status=128 + signal.SIGKILL)


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


def test_one_of_several_processes_must_be_told_so(monkeypatch, capsys):
    processes.check_alone()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    assert pretrain.main(["--mesh=data=2"]) == 2
    assert "got JAX_NUM_PROCESSES=2 without it. Give it" in capsys.readouterr().err


def test_an_address_without_a_port_is_one_sentence(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node-0")
    with pytest.raises(ValueError, match="ADDRESS must be host:port, got node-0"):
        processes.initialize(timeout=1)
