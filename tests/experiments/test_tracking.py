"""What TensorBoard gets to see: the numbers of the logs, each step once."""

import struct
import sys

from tensorboardX.proto.event_pb2 import Event, SessionLog

from experiments import pretrain
from experiments.folder import Folder
from experiments.tracking import TensorBoard


def events(folder):
    """The events in the files of a folder; a record is length, CRC, data, CRC."""
    found = []
    for path in sorted(folder.glob("events.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (size,) = struct.unpack_from("<Q", data, start)
            found.append(Event.FromString(data[start + 12 : start + 12 + size]))
            start += size + 16
    return found


def scalars(folder):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


def row(step, loss, *, policy="bf16"):
    return {"policy": policy, "seed": 0, "step": step, "loss": loss}


DESCRIPTION = {"config": {}, "policies": {}, "corpus": ""}


def open_folder(path, *, resume=False):
    tracker = TensorBoard(path / "tensorboard")
    return Folder(path, DESCRIPTION, resume=resume, tracker=tracker)


def test_numbers_of_all_logs_are_scalars_by_trial(tmp_path):
    with open_folder(tmp_path / "run") as folder:
        folder.rewind("bf16", 0, step=0)
        mixed = row(1, 2.0) | {"mfu": None, "spike": True, "grad_norm": float("nan")}
        folder.write("metrics.jsonl", mixed)
        domains = {"code": {"heldout_loss": 1.5, "bits_per_byte": 0.5}}
        found = {"heldout_loss": 3.0, "domains": domains}
        evaluation = {"policy": "bf16", "seed": 0, "step": 1} | found
        folder.write("evaluations.jsonl", evaluation)
        folder.rewind("ufp4", 0, step=0)
        folder.write("metrics.jsonl", row(1, 4.0, policy="ufp4"))
        result = {"policy": "bf16", "seed": 0, "heldout_loss": 2.5}
        folder.finish(result | {"stopped_by": None, "failed_checkpoints": 0})
    assert scalars(tmp_path / "run/tensorboard/bf16-0") == [
        (1, "train/loss", 2.0),
        (1, "train/spike", 1.0),
        (1, "heldout/loss", 3.0),
        (1, "heldout/code/loss", 1.5),
        (1, "heldout/code/bits_per_byte", 0.5),
        (1, "heldout/loss", 2.5),
    ]
    assert scalars(tmp_path / "run/tensorboard/ufp4-0") == [(1, "train/loss", 4.0)]


def test_a_run_that_goes_on_has_every_step_once(tmp_path):
    for first, last in ((1, 5), (4, 7)):  # the checkpoint was of step 3
        with open_folder(tmp_path / "run", resume=True) as folder:
            folder.rewind("bf16", 0, step=first - 1)
            for step in range(first, last + 1):
                folder.write("metrics.jsonl", row(step, float(first)))
    trial = tmp_path / "run/tensorboard/bf16-0"
    losses = [1.0] * 3 + [4.0] * 4
    expected = [(step, "train/loss", x) for step, x in enumerate(losses, start=1)]
    assert scalars(trial) == expected
    logs = [event.session_log.status for event in events(trial)]
    assert SessionLog.START in logs  # tells an open TensorBoard to forget


def test_without_the_library_there_is_one_error_and_nothing_left(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / f"text/{i}.txt").write_text(f"text {i} " * 400)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    out = tmp_path / "out"
    argv = [f"--data={tmp_path / 'text'}", f"--out={out}", "--tensorboard"]
    assert pretrain.main([*argv, "--set=data.vocab_size=257"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --tensorboard: needs tensorboardX")
    assert "pip install -e '.[track]'" in error and not out.exists()
