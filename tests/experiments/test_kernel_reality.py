"""Plans beside what was measured."""

import json
import types

import pytest

from experiments import footprint, plan, presets
from experiments.kernels import programs, reality
from fp4jax import sharding

ROW = {
    "model": "tiny",
    "case": "ufp4",
    "batch": [4, 64],
    "documents": 1,
    "set": ["model.remat=none"],
    "milliseconds": [12.0, 10.0],
    "program_bytes": 2**30,
    "device": {"kind": "NVIDIA H200"},
}


@pytest.fixture
def asked(monkeypatch):
    """What plans were asked for: each of 3 GiB and 20 ms."""
    asked = []

    def forecast(config, *, mesh, device, integers):
        asked.append((config, device, integers))
        seconds = types.SimpleNamespace(bounds=(0.02, 0.03), gemms=0.01)
        return types.SimpleNamespace(peak=3 * 2**30), seconds

    monkeypatch.setattr(plan, "forecast", forecast)
    monkeypatch.setattr(plan, "make_devices", lambda count: None)
    return asked


def test_a_row_is_compared_with_the_plan_of_the_same_run(asked, tmp_path, capsys):
    steps, out = tmp_path / "steps.jsonl", tmp_path / "out.jsonl"
    failed = {"case": "ufp4", "error": "out of memory"}
    rows = [ROW, ROW | {"case": "ufp4+packed"}, failed]
    steps.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert reality.main(steps, cases=("ufp4",), out=out) == 0
    ((config, device, _),) = asked
    assert (device, config.policies) == ("H200", ("ufp4",))
    assert (config.data.batch_size, config.data.sequence_length) == (4, 64)
    assert config.model.remat == "none"
    found = json.loads(out.read_text())
    assert found["bytes_ratio"] == 3 and found["milliseconds_ratio"] == 2
    assert "3.00" in capsys.readouterr().out


@pytest.mark.parametrize("documents", [1, 3])
def test_a_plan_is_of_the_arrays_that_were_measured(asked, documents):
    mesh = sharding.make_mesh()
    reality.compare(ROW | {"documents": documents}, mesh)
    ((_, _, integers),) = asked
    config = presets.resolve("tiny", policy_names=["bf16"])
    planned = footprint.batch(config, mesh=mesh, integers=integers)
    (measured, _) = programs.batches(config, documents=documents)
    shape = lambda x: (x.shape, x.dtype)
    assert {k: shape(x) for k, x in planned.items()} == {
        k: shape(x) for k, x in measured.items()
    }


def test_a_device_without_a_plan_is_one_sentence(asked, tmp_path, capsys):
    steps = tmp_path / "steps.jsonl"
    steps.write_text(json.dumps(ROW | {"device": {"kind": "cpu"}}))
    assert reality.main(steps, cases=("ufp4",)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: reality: device must") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": "ufp4+packed"}, "case must be one of .* no plan"),
        ({"device": {"kind": "cpu"}}, "device must be one of H100, .* got 'cpu'"),
    ],
)
def test_says_of_what_there_is_no_plan(asked, change, message):
    with pytest.raises(ValueError, match=message):
        reality.compare(ROW | change, sharding.make_mesh())
