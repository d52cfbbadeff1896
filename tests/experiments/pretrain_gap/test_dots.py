from experiments import study
from experiments.pretrain_gap import dots


def row(policy, loss, seed=0):
    return {
        "policy": policy,
        "seed": seed,
        "heldout": {"bf16": {"all": {"loss": loss}}},
        "diverged": loss is None,
        "tokens_per_s": 1.0,
    }


def test_every_gap_is_seen_and_the_best_is_on_top(monkeypatch, tmp_path):
    rows = [row("bf16", 2.0), row("nvfp4", 2.1), row("ti2d", None), row("mxfp4", 2.5)]
    rows += [row("ufp4", 1.9), row("ti2d", 2.2), row("quartet2", 2.0, seed=1)]
    drawn = []
    monkeypatch.setattr(study, "save", lambda made, *_: drawn.append(made))
    dots.draw({"tiny": rows, "moe_tiny": rows[:1]}, tmp_path / "a.png")
    (axes,) = drawn[0].axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["ti2d", "mxfp4", "nvfp4", "ufp4"]
    left, right = axes.get_xlim()
    assert left < -5 and 25 < right
