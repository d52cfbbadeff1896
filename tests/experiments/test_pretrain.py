"""The command from its arguments to its folder of results."""

import contextlib
import json
import math
import types

import numpy as np
import pytest

from experiments import pretrain, record, report, trial
from experiments.compare import Comparison
from experiments.folder import Folder
from experiments.presets import resolve, schedule
from experiments.stop import Stop
from fp4jax import data, models, policies
from fp4jax.policies import Schedule

SMALL = [
    "model.num_layers=2",
    "model.d_model=32",
    "model.d_ff=32",
    "model.head_dim=16",
    "data.sequence_length=32",
    "data.vocab_size=260",
    "data.holdout=0.2",
]
FLAGS = [f"--set={assignment}" for assignment in SMALL]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of texts with words that only some documents use."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        sentence = f"Text {i} counts to {i * i}, and says so {i % 7} times. "
        (folder / f"{i}.txt").write_text(sentence * (3 + i % 5))
    return folder


@pytest.fixture(scope="module")
def results(texts, tmp_path_factory):
    """The folder that the command leaves: BF16 and the control, two seeds."""
    folder = tmp_path_factory.mktemp("out") / "results"
    argv = ["--policies=bf16", f"--data={texts}", f"--out={folder}", *FLAGS]
    assert pretrain.main([*argv, "--steps=6", "--seeds=2"]) in (0, 1)
    return folder


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def comparison(texts):
    """Makes comparisons, in a folder each, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(out, *assignments, **flags):
            config = resolve(
                data=str(texts), assignments=[*SMALL, *assignments], **flags
            )
            corpus = data.load_corpus(config.data)
            description = record.describe(config, corpus=corpus, command="")
            return Comparison(
                config=config,
                corpus=corpus,
                folder=stack.enter_context(Folder(out, description, resume=False)),
                description=description,
                stop=Stop(),
            )

        yield make


def test_leaves_all_results(results):
    names = {path.name for path in results.iterdir()}
    assert names == {
        ".lock",
        "baselines.jsonl",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "trials.jsonl",
        "report.json",
        "report.md",
        "tokenizer.json",
        "loss.png",
    }


def test_config_is_resolved_and_names_its_setting(results, texts):
    found = json.loads((results / "config.json").read_text())
    assert found["config"]["data"]["source"] == str(texts)
    assert found["config"]["model"]["vocab_size"] == 260
    assert found["config"]["policies"] == ["bf16", "int2"]
    assert found["policies"]["int2"]["default"]["fprop"]["x"]["grid"] == {
        "format": "INT2"
    }
    assert {"python", "jax", "flax", "fp4jax"} <= set(found["versions"])
    assert found["device"]["platform"] == "cpu"
    assert "git" in found and found["command"].endswith("--seeds=2")


def test_metrics_hold_every_step_of_every_run(results):
    runs = [(r["policy"], r["seed"], r["step"]) for r in records(results)]
    assert runs == [
        (policy, seed, step)
        for policy in ("bf16", "int2")
        for seed in (0, 1)
        for step in range(1, 7)
    ]


def test_report_averages_the_runs(results):
    found = json.loads((results / "report.json").read_text())
    bf16, control = found["policies"]
    assert (bf16["name"], bf16["gap"]) == ("bf16", 0)
    assert control["name"] == "int2" and control["gap_spread"] > 0
    losses = [r["loss"] for r in records(results) if r["policy"] == "bf16"]
    assert bf16["train_loss"] == pytest.approx(np.mean(losses))
    assert [row["name"] for row in found["baselines"]] == ["2-gram", "3-gram"]
    assert "| int2 |" in (results / "report.md").read_text()


def test_policies_share_batches_and_seeds_do_not(comparison, tmp_path):
    shared = comparison(tmp_path, steps=3, seeds=2)
    first, again, other = (
        [batch["inputs"] for batch in shared.batches(seed)] for seed in (0, 0, 1)
    )
    assert len(first) == 3
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_seeds_share_the_compiled_step(comparison, tmp_path):
    trial.compiled.cache_clear()
    runs = comparison(tmp_path, steps=1, seeds=2, policy_names=["bf16"], alone=True)
    assert [found.seed for found in runs.trials()] == [0, 1]
    assert trial.compiled.cache_info().misses == 1


def test_a_control_that_does_not_lose_fails_the_command(
    results, texts, tmp_path, monkeypatch, capsys
):
    same = lambda name: report.Trial(
        name=name,
        seed=0,
        heldout_loss=2.0,
        bits_per_byte=1.0,
        losses=(2.0,),
        tokens_per_s=None,
    )
    equal = lambda self: [same("bf16"), same("ufp4"), same("int2")]
    monkeypatch.setattr(Comparison, "trials", equal)
    argv = [f"--data={texts}", f"--out={tmp_path / 'out'}", "--steps=1", *FLAGS]
    assert pretrain.main(argv) == 1
    assert "DO NOT TRUST" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/report.json").read_text())["valid"] is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set=optim.rate=1"], "--set: path must be one of optim.lr"),
        (["--set=optim.lr=fast"], "--set optim.lr: must be of type float, got 'fast'"),
        (["--model=huge"], "--model: must be one of tiny"),
        (["--policies=bf16,fp8"], "--policies: must be one of bf16"),
        (["--finish=fp8"], "finish must be one of none, bf16, bf16_forward"),
        (["--finish=bf16", "--finish-fraction=1"], "finish_fraction must lie between"),
        (["--finish=bf16", "--steps=1"], "--finish: must leave a step before it"),
        (["--steps=0"], "steps must be at least 1"),
        (["--data=nowhere"], "nowhere"),
        (["--set=data.sequence_length=100000"], "sequence_length must be at most"),
        (["--mesh=data=3"], "must divide data.batch_size=8, got 'data=3'"),
        (
            ["--mesh=data=4", "--set=run.microbatches=4"],
            "must divide data.batch_size=8 / run.microbatches=4, got 'data=4'",
        ),
        (["--mesh=tensor=2"], "num_kv_heads must be a multiple of tensor = 2 of the"),
        (
            ["--mesh=rows=2"],
            "mesh must read AXIS=N,..., each axis of data, fsdp, expert",
        ),
        (
            ["--set=data.batch_size=64", "--mesh=data=64"],
            "at most the number of devices, 8, got 64 (data=64)",
        ),
        (["--set=guard.max_skips=0"], "max_skips must be at least 1, got max_skips=0"),
        (["--set=checkpoint.keep_last=0"], "keep_last must be at least 1"),
        (["--profile=0:3"], "--profile: must read FIRST:LAST with 1 <= FIRST"),
        (["--profile=7"], "--profile: must read FIRST:LAST"),
        (["--profile=7:201"], "LAST <= --steps=200, got '7:201'"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_leaves_nothing(
    argv, message, texts, tmp_path, capsys
):
    out = tmp_path / "out"
    assert pretrain.main([f"--data={texts}", f"--out={out}", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_folder_without_texts_is_an_error(tmp_path, capsys):
    assert pretrain.main([f"--data={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    assert "*.txt" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_file_that_is_not_utf8_is_an_error(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert pretrain.main([f"--data={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    assert "a.txt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_results_are_never_overwritten(results, texts, capsys):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in results.iterdir())
    assert pretrain.main([f"--data={texts}", f"--out={results}", *FLAGS]) == 2
    assert "--out: must be a new or an empty folder" in capsys.readouterr().err
    after = sorted((path.name, path.stat().st_mtime_ns) for path in results.iterdir())
    assert after == before


def test_a_run_that_diverges_is_nan_from_there_on(comparison, tmp_path):
    runs = comparison(
        tmp_path,
        *("optim.lr=1e30", "guard.max_skips=2"),
        steps=9,
        policy_names=["bf16"],
        alone=True,
    )
    (found,) = runs.trials()
    assert math.isnan(found.heldout_loss)
    assert len(found.losses) == 9 and math.isnan(found.losses[-1])
    assert math.isfinite(found.losses[0])
    row = json.loads((tmp_path / "trials.jsonl").read_text())
    assert "First not finite: dgrad dy of blocks/" in row["stopped_by"]


def test_a_finish_leaves_reference_and_control(comparison, tmp_path):
    options = {"steps": 4, "finish": "bf16_forward", "finish_fraction": 0.5}
    shared = {"steps": 4, "policy_names": ["e2m1_ref"], "alone": True}
    runs = comparison(tmp_path / "finish", **shared | options)
    plain = comparison(tmp_path / "plain", **shared)
    found = [next(run.trials()) for run in (runs, plain)]
    assert found[0].losses[:2] == found[1].losses[:2]
    assert found[0].losses[2] != found[1].losses[2]
    assert found[0].heldout_loss != found[1].heldout_loss
    e2m1 = policies.e2m1_ref(runs.config.model)
    expected = Schedule(((0, e2m1), (2, policies.bf16_forward(e2m1))))
    assert schedule(runs.config, "e2m1_ref") == expected
    for name in ("bf16", "int2"):
        assert schedule(runs.config, name) == policies.PRESETS[name](runs.config.model)


def test_a_single_one_of_what_is_about_to_happen_is_said_as_such(texts, tmp_path):
    config = resolve(policy_names=["ufp4"], alone=True, data=str(texts), steps=1)
    corpus = types.SimpleNamespace(num_train_tokens=1000)
    found = pretrain.introduction(config, corpus, None, tmp_path)
    assert found.startswith("1 policy x 1 seed x 1 step of ")
    assert " 1,000 tokens of text; 1 device (8 are there: " in found


def test_help_lists_what_can_be_chosen(capsys):
    with pytest.raises(SystemExit, match="0"):
        pretrain.main(["--help"])
    shown = capsys.readouterr().out
    fields = ("optim.lr=", "model.moe.top_k=", "model.mamba.chunk=")
    for word in (*models.PRESETS, *policies.PRESETS, *fields, "exit status"):
        assert word in shown


@pytest.mark.parametrize("argv", [["--steps=many"], ["--lr=1"], ["--steps"]])
def test_an_unknown_flag_or_value_exits_with_two(argv):
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(argv)
