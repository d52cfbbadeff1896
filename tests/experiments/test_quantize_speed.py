"""The table of speeds, and its file."""

import json

from experiments import quantize_speed


def test_writes_rows_versions_and_device(tmp_path, capsys, monkeypatch):
    name, quantizer = next(iter(quantize_speed.QUANTIZERS.items()))
    monkeypatch.setattr(quantize_speed, "QUANTIZERS", {name: quantizer})
    quantize_speed.main(32, rounds=1, out=tmp_path / "speed.json")
    found = json.loads((tmp_path / "speed.json").read_text())
    assert list(found["rows"]) == ["x * 2 + 1", name]
    assert found["rows"]["x * 2 + 1"]["ratio"] == 1
    assert found["device"]["platform"] == "cpu" and "jax" in found["versions"]
    assert name in capsys.readouterr().out
