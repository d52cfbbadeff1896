"""What the folder of a run tells of its models."""

import json
import shutil

import pytest

from experiments import evaluate, pretrain

FLAGS = [
    *("--set=model.num_layers=1", "--set=model.d_model=32", "--set=model.d_ff=32"),
    *("--set=model.head_dim=16", "--set=data.sequence_length=32"),
    *("--set=data.vocab_size=260", "--set=data.holdout=0.2"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A mixture of two domains."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("plain", "loud"):
        (folder / name).mkdir()
        for i in range(20):
            text = f"Text {i} counts to {i * i}, and says so {i % 7} times. " * 4
            text = text.upper() if name == "loud" else text
            (folder / name / f"{i}.txt").write_text(text)
    domains = [{"name": name, "source": name} for name in ("plain", "loud")]
    path = folder / "both.json"
    path.write_text(json.dumps({"domains": domains}))
    return path


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    """A run under UE5M3, with a checkpoint of step 4 and one of the last step."""
    out = tmp_path_factory.mktemp("out") / "run"
    argv = ["--policies=ue5m3", "--alone", f"--data={texts}", f"--out={out}", *FLAGS]
    every = ["--set=checkpoint.every=4", "--set=run.eval_every=4"]
    assert pretrain.main([*argv, *every, "--steps=6"]) == 0
    return out


def results(folder, *flags, out):
    path = out / "found.json"
    assert evaluate.main([f"--checkpoint={folder}", f"--out={path}", *flags]) == 0
    return json.loads(path.read_text())["results"]


def rows(run, name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def losses(row):
    return {name: each["heldout_loss"] for name, each in row["domains"].items()}


def test_losses_of_the_quantized_forward_are_those_of_training(run, tmp_path, capsys):
    quantized, bf16 = results(run, out=tmp_path)
    assert [quantized["forward"], bf16["forward"]] == ["quantized", "bf16"]
    (trial,) = rows(run, "trials.jsonl")
    assert losses(quantized) == {
        "all": trial["heldout_loss"],
        **{name: each["heldout_loss"] for name, each in trial["domains"].items()},
    }
    assert quantized["domains"]["all"]["bits_per_byte"] == trial["bits_per_byte"]
    assert losses(bf16) != losses(quantized)
    assert bf16["domains"]["all"]["gap"] is None  # BF16 did not train
    shown = capsys.readouterr().out
    sizes = {name: each["tokens"] for name, each in bf16["domains"].items()}
    counts = [f"{name} {count:,}" for name, count in sizes.items()]
    assert f"Held-out tokens: {'; '.join(counts)}." in " ".join(shown.split())
    for text in ("ue5m3, seed 0", "plain", "loud", f"{trial['heldout_loss']:.4f}"):
        assert text in shown


def test_a_trial_at_a_step_without_its_text_elsewhere(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    trial = copied / "checkpoints/ue5m3-0"
    (found,) = results(trial, "--step=4", "--forward=quantized", out=tmp_path)
    (evaluation,) = [r for r in rows(run, "evaluations.jsonl") if r["step"] == 4]
    assert found["step"] == 4
    assert losses(found)["all"] == evaluation["heldout_loss"]


def test_questions_and_samples_need_no_text(run, texts, tmp_path, capsys):
    path = tmp_path / "questions.jsonl"
    question = {"context": "Text 3 ", "choices": ["counts", "weighs"], "answer": 0}
    path.write_text(json.dumps(question))
    flags = ["--no-loss", f"--choices={path}", "--sample=Text 3", "--sample=TEXT"]
    flags += ["--num-tokens=8", "--forward=quantized"]
    (found,) = results(run, *flags, out=tmp_path)
    assert "domains" not in found
    assert found["choices"]["questions"] == 1
    assert found["choices"]["by_sum"] in (0, 1)
    assert [each["prompt"] for each in found["samples"]] == ["Text 3", "TEXT"]
    shown = capsys.readouterr().out
    assert found["samples"][0]["text"] in shown
    assert "Questions: 1." in " ".join(shown.split())
    assert results(run, *flags, out=tmp_path) == [found]
    (other,) = results(run, *flags, "--seed=1", out=tmp_path)
    assert other["samples"] != found["samples"]


def test_other_text_is_evaluated_whole_by_the_tokenizer_of_the_run(run, tmp_path):
    text = "Text 3 counts to 9. " * 5
    (tmp_path / "a.txt").write_text(text)
    flags = [f"--data={tmp_path / 'a.txt'}", "--forward=bf16"]
    (found,) = results(run, *flags, out=tmp_path)
    assert found["domains"].keys() == {"text"}
    # All bytes but those of the first token, which nothing predicts.
    assert len(text) - 8 <= found["domains"]["text"]["bytes"] < len(text)


def test_results_are_left_in_the_folder_of_the_run(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    flags = ["--no-loss", "--sample=T", "--num-tokens=1", "--forward=bf16"]
    assert evaluate.main([f"--checkpoint={copied}", *flags]) == 0
    trial = copied / "checkpoints/ue5m3-0"
    assert evaluate.main([f"--checkpoint={trial}", *flags]) == 0
    found = {path.name for path in copied.glob("evaluation*.json")}
    assert found == {"evaluation.json", "evaluation-ue5m3-0.json"}


def test_other_text_leaves_the_results_of_the_run_alone(run, texts, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "evaluation.json").write_text("kept")
    flags = ["--forward=bf16", f"--checkpoint={copied}"]
    for name in ("plain", "loud"):
        assert evaluate.main([*flags, f"--data={texts.parent / name}"]) == 0
    found = sorted(path.name for path in copied.glob("evaluation*.json"))
    assert found[0].startswith("evaluation-on-loud-") and len(found) == 3
    assert (copied / "evaluation.json").read_text() == "kept"


def test_results_are_kept_when_a_later_model_fails(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "found.json"
    call = evaluate.Task.__call__

    def fail(task, saved, forward):
        if forward == "bf16":
            raise ValueError("too late")
        return call(task, saved, forward)

    monkeypatch.setattr(evaluate.Task, "__call__", fail)
    flags = ["--no-loss", "--sample=T", "--num-tokens=1", f"--out={out}"]
    assert evaluate.main([f"--checkpoint={run}", *flags]) == 2
    (found,) = json.loads(out.read_text())["results"]
    assert found["forward"] == "quantized"
    assert "too late 1 result written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/found.json", "."])
def test_results_that_have_no_place_are_an_error_first(
    run, name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate, "evaluate", None)  # must not be reached
    flags = ["--no-loss", "--sample=T", "--num-tokens=1"]
    out = f"--out={tmp_path / name}"
    assert evaluate.main([f"--checkpoint={run}", *flags, out]) == 2
    assert "--out: must be a file in a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=5"], "step must be one of 4, 6 in"),
        (["--no-loss"], "--no-loss: must come with --choices or --sample"),
        (["--data=nowhere"], "nowhere"),
        (["--choices=nowhere"], "nowhere"),
        (["--no-loss", "--sample="], "must fit a row of 32 tokens"),
        (["--no-loss", "--sample=a", "--num-tokens=32"], "got 1 tokens of 'a'"),
        (["--no-loss", "--sample=a", "--temperature=-1"], "temperature must be"),
        (["--no-loss", "--sample=a", "--top-k=-1"], "top_k must be"),
        (["--temperature=0.5"], "--temperature: must come with --sample, got"),
        (["--num-tokens=2"], "--num-tokens: must come with --sample"),
        (["--text-field=a"], "--text-field: must come with --data"),
        (["--no-loss", "--sample=a", "--data=b"], "--data: must not come with --no-"),
    ],
)
def test_a_wrong_argument_is_one_sentence(run, flags, message, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert evaluate.main([f"--checkpoint={run}", f"--out={out}", *flags]) == 2
    error = capsys.readouterr().err
    assert "error: " in error and message in error
    assert not out.exists()


def test_a_folder_that_is_none_of_a_run_is_an_error(run, tmp_path, capsys):
    assert evaluate.main([f"--checkpoint={tmp_path}"]) == 2
    assert "must be the folder of a run" in capsys.readouterr().err
    alone = tmp_path / "ue5m3-0"
    shutil.copytree(run / "checkpoints/ue5m3-0", alone)
    assert evaluate.main([f"--checkpoint={alone}"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_text_that_has_changed_is_an_error(run, texts, tmp_path, capsys):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    path = copied / "config.json"
    changed = json.loads(path.read_text())
    changed["config"]["data"]["source"] = str(texts.parent / "plain")
    path.write_text(json.dumps(changed))
    assert evaluate.main([f"--checkpoint={copied}"]) == 2
    assert "must be what the run trained on" in capsys.readouterr().err
