"""What is reported of runs that are written by hand, finished or not."""

import base64
import dataclasses
import json
import os
import re
import statistics

import numpy as np
import pytest

from experiments.presets import resolve
from experiments.report import __main__ as command
from experiments.report import figures, runs
from experiments.report.standings import standings, verdict

STEPS, TOKENS = 40, 8 * 256
WORSE = {"bf16": 0.0, "ufp4": 0.02, "int2": 0.5}
DOMAINS = {"english": 1.0, "code": 0.5}


def loss(policy, seed, step, scale=1.0):
    return scale * (2 + 2 / step + 0.1 * seed) * (1 + WORSE[policy] * (1 + seed))


def evaluation(policy, seed, step):
    each = {name: loss(policy, seed, step, s) for name, s in DOMAINS.items()}
    return {
        "heldout_loss": loss(policy, seed, step),
        "bits_per_byte": 1.5,
        "domains": {
            name: {"heldout_loss": x, "bits_per_byte": 1.0} for name, x in each.items()
        },
    }


def write(folder, policies, *, seeds=(0, 1), done=STEPS, setting=(), diverge=None):
    """Leaves a folder as experiments.pretrain does at some moment."""
    folder.mkdir()
    names = [name for name in policies if name in WORSE]
    config = resolve(
        steps=STEPS, policy_names=names, seeds=2, alone=True, assignments=[*setting]
    )
    description = {
        "command": "python -m experiments.pretrain <here>",
        "corpus": "abc",
        "config": dataclasses.asdict(config),
        "policies": {},
        "versions": {"jax": "0.10.2"},
        "git": "0123",
        "device": {"platform": "cpu", "kind": "cpu", "count": 1},
    }
    (folder / "config.json").write_text(json.dumps(description))
    logs = {"metrics": [], "evaluations": [], "trials": []}
    for policy in names:
        for seed in seeds:
            trial = {"policy": policy, "seed": seed}
            for step in range(1, done + 1):
                row = {"step": step, "loss": loss(policy, seed, step)}
                row |= {"skipped": int(step == 7), "spike": step == 9}
                row |= {"tokens_per_s": 100.0 if step > 1 else None}
                logs["metrics"].append(trial | row)
                if step % 10 == 0 and step < STEPS:
                    found = {"step": step} | evaluation(policy, seed, step)
                    logs["evaluations"].append(trial | found)
            stopped = "nan" if policy == diverge else None
            if done == STEPS:
                found = evaluation(policy, seed, STEPS)
                if stopped:
                    found = {"heldout_loss": None, "bits_per_byte": None}
                logs["trials"].append(trial | found | {"stopped_by": stopped})
    for name, rows in logs.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines + '{"policy": "bf')
    return folder


def only(*folders):
    (group,) = runs.read(folders)
    return group


def test_gaps_pair_seeds_at_equal_steps(tmp_path):
    rows = {row.name: row for row in standings(only(write(tmp_path / "a", WORSE)))}
    assert rows["bf16"].gap == 0
    # 2% and 4% by construction, up to rounding of float64.
    ufp4 = rows["ufp4"]
    assert (ufp4.gap, ufp4.gap_spread) == pytest.approx((3, statistics.stdev([2, 4])))
    assert ufp4.domains["code"][0] == pytest.approx(3)
    assert not ufp4.by_train and ufp4.cells[1] == "2/2"
    assert ufp4.tokens == STEPS * TOKENS
    assert (ufp4.spikes, ufp4.skipped, ufp4.tokens_per_s) == (2, 2, 100)


def test_the_verdict_waits_for_the_end(tmp_path):
    group = only(write(tmp_path / "a", WORSE))
    assert "2 bits lose plainly" in verdict(group, standings(group))
    group = only(write(tmp_path / "b", WORSE, done=25))
    assert verdict(group, standings(group)).startswith("Not finished: bf16-0, bf16-1")
    group = only(write(tmp_path / "c", WORSE, seeds=(0,)))
    assert "Not finished: bf16-1, int2-1, ufp4-1." in verdict(group, standings(group))


def test_a_run_without_an_evaluation_compares_training_losses(tmp_path):
    rows = standings(only(write(tmp_path / "a", ["bf16", "ufp4"], done=8)))
    assert rows[1].by_train and rows[1].heldout_loss is None
    assert rows[1].gap == pytest.approx(3)  # a mean of losses keeps their ratio
    assert rows[1].cells[6].endswith(" *") and rows[1].cells[1] == "0/2"


def test_folders_of_equal_settings_are_compared(tmp_path):
    folders = [
        write(tmp_path / "a", ["bf16"]),
        write(tmp_path / "b", ["ufp4"], done=25),
        write(tmp_path / "c", ["ufp4"], setting=["optim.lr=0.1"]),
    ]
    first, second = runs.read(folders)
    assert first.names == ("a", "b") and second.names == ("c",)
    assert [row.name for row in standings(first)] == ["bf16", "ufp4"]
    assert standings(first)[1].gap == pytest.approx(3)  # at step 20, of the same seed
    assert standings(second)[0].gap is None


def test_runs_from_another_seed_on_are_compared(tmp_path):
    folders = [
        write(tmp_path / "a", ["bf16"], seeds=(0, 1)),
        write(tmp_path / "b", ["bf16"], seeds=(2, 3), setting=["run.seed=2"]),
    ]
    (row,) = standings(only(*folders))
    assert row.seeds == 4 and row.cells[1] == "4/4"


def test_one_policy_with_two_recipes_is_an_error(tmp_path):
    folders = [write(tmp_path / name, ["ufp4"]) for name in "ab"]
    for folder in folders:
        path = folder / "config.json"
        description = json.loads(path.read_text())
        description["policies"] = {"ufp4": {"made by": folder.name}}
        path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="policy 'ufp4' .* in '.*b' than in '.*a'"):
        runs.read(folders)


def test_the_first_of_two_equal_trials_counts(tmp_path):
    folders = [write(tmp_path / "a", ["bf16"], done=25), write(tmp_path / "b", WORSE)]
    group = only(*folders)
    assert {t.step for t in group.policies["bf16"]} == {25}
    assert len(group.trials) == 6


def test_a_policy_that_diverged_is_named_so(tmp_path):
    group = only(write(tmp_path / "a", WORSE, diverge="ufp4"))
    row = standings(group)[1]
    assert row.cells[1] == "2/2 (2 diverged)" and row.cells[6] == "diverged"
    assert "DO NOT TRUST" in verdict(group, standings(group))


def test_a_skipped_step_is_a_hole(tmp_path):
    trial = only(write(tmp_path / "a", ["bf16"])).trials[0]
    assert [step for step, x in trial.smoothed.items() if np.isnan(x)] == [7]


def test_a_run_whose_newest_step_was_skipped_has_not_diverged(tmp_path):
    rows = standings(only(write(tmp_path / "a", ["bf16", "ufp4"], done=7)))
    assert rows[1].by_train and rows[1].gap == pytest.approx(3)
    assert np.isfinite(rows[1].train_loss)


def test_figures_have_bands_and_leave_the_gap_of_the_control_out(tmp_path):
    group = only(write(tmp_path / "a", WORSE))
    losses, gaps, heldout, _ = figures.overview(group).axes
    assert [line.get_label() for line in losses.lines] == list(WORSE)
    assert [line.get_label() for line in gaps.lines[:-1]] == ["ufp4"]
    assert len(losses.collections) == 3
    assert losses.lines[0].get_xdata()[-1] == STEPS * TOKENS
    assert heldout.lines[0].get_xdata().tolist() == [
        step * TOKENS for step in (10, 20, 30, 40)
    ]
    assert [axes.get_title() for axes in figures.of_domains(group).axes] == [*DOMAINS]


def test_the_page_needs_nothing_beside_it(tmp_path, capsys):
    folder = write(tmp_path / "a", WORSE)
    losses = {"heldout_loss": 1.2345, "bits_per_byte": 1.0, "gap": None}
    domains = {"code": losses | {"tokens": 4321}}
    result = {"policy": "ufp4", "seed": 0, "step": 4, "forward": "quantized"}
    found = {"results": [result | {"domains": domains}]}
    (folder / "evaluation.json").write_text(json.dumps(found))
    assert command.main([str(folder)]) == 0
    assert "ufp4" in capsys.readouterr().out
    page = (folder / "runs.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 2
    for source, name in zip(sources, ("gaps.png", "domains.png"), strict=True):
        kind, _, data = source.partition("base64,")
        assert kind == "data:image/png;"
        assert base64.b64decode(data) == (folder / name).read_bytes()
    assert "http" not in page and "&lt;here&gt;" in page and "+3.00%" in page
    assert "1.2345" in page and "Held-out tokens: code 4,321." in page


def test_results_are_of_the_text_of_the_run_and_each_once(tmp_path):
    def leave(name, corpus, loss, policies):
        rows = [
            {"policy": policy, "seed": 0, "step": 4, "forward": "bf16"}
            | {"domains": {"code": {"heldout_loss": loss[policy]}}}
            for policy in policies
        ]
        text = json.dumps({"corpus": corpus, "results": rows})
        (folder / f"evaluation{name}.json").write_text(text)

    folder = write(tmp_path / "a", WORSE)
    leave("", "abc", {"bf16": 2.0, "ufp4": 2.1}, ["bf16", "ufp4"])
    leave("-on-other-1234", "other", {"bf16": 1.0}, ["bf16"])
    leave("-ufp4-0", "abc", {"ufp4": 2.2}, ["ufp4"])
    os.utime(folder / "evaluation.json", (0, 0))
    first, second = only(folder).evaluations
    assert (first["policy"], second["policy"]) == ("bf16", "ufp4")
    assert first["domains"]["code"]["heldout_loss"] == 2.0
    assert second["domains"]["code"]["gap"] == pytest.approx(10)  # the newest, to both
    leave("", "abc", {"bf16": 2.0, "ufp4": None}, ["bf16", "ufp4"])
    gaps = {r["policy"]: r["domains"]["code"]["gap"] for r in only(folder).evaluations}
    assert gaps == {"bf16": 0, "ufp4": None}


def test_several_runs_have_a_section_for_each_setting(tmp_path, capsys):
    folders = [
        write(tmp_path / "a", ["bf16"]),
        write(tmp_path / "b", ["bf16"], setting=["optim.lr=0.1"]),
    ]
    out = tmp_path / "out"
    assert command.main([*map(str, folders)]) == 2
    assert "--out: must be given" in capsys.readouterr().err
    assert command.main([*map(str, folders), f"--out={out}"]) == 0
    assert {path.name for path in out.iterdir()} == {
        "runs.html",
        *("gaps-1.png", "gaps-2.png", "domains-1.png", "domains-2.png"),
    }


def test_what_is_no_run_is_an_error(tmp_path, capsys):
    assert command.main([]) == 2
    assert "must be at least one folder" in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2
    assert "without config.json" in capsys.readouterr().err
    assert command.main([str(write(tmp_path / "a", ["bf16"], done=0))]) == 2
    assert "must hold a step, got none yet" in capsys.readouterr().err
