"""The table of measured steps."""

import json

from experiments.kernels import show


def test_every_row_has_its_cells(tmp_path, capsys):
    row = {
        "model": "tiny",
        "batch": [4, 64],
        "case": "ue5m3",
        "milliseconds": [12.5, 12.0],
        "sampled_milliseconds": [15.0, 14.0],
        "tokens_per_second": 21333.3,
        "utilization": 0.456,
        "ratio": 1.2,
        "program_bytes": 3 * 2**30,
    }
    failed = {key: row[key] for key in ("model", "batch", "case")} | {"error": "no"}
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (row, failed)))
    show.main((path,))
    *_, first, last = capsys.readouterr().out.splitlines()
    cells = "`tiny` | 4 x 64 | `ue5m3` | 12.0 (14.0) | 21,333 | 45.6% | 1.200 | 3.0"
    assert first == f"| {cells} |"
    assert last.count("|") == first.count("|") and "no" in last
