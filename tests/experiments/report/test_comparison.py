"""Gaps, the verdict, and what the table and the page show."""

import io
import math
import statistics

import numpy as np
import pytest
from rich.console import Console

from experiments import report
from experiments.report import Baseline, Trial, comparison


def trial(name, heldout, *, seed=0, losses=(4.0, 3.0, 2.0)):
    return Trial(
        name=name,
        seed=seed,
        heldout_loss=heldout,
        bits_per_byte=heldout / 2,
        losses=tuple(losses),
        tokens_per_s=1000.0,
    )


def summary(*trials, baselines=(), average=2):
    return report.summarize(trials, baselines, average=average)


BASELINES = [
    Baseline(name="order 2", seed=0, heldout_loss=3.5, bits_per_byte=1.7),
    Baseline(name="order 3", seed=0, heldout_loss=3.25, bits_per_byte=1.6),
]
GOOD = [trial("bf16", 2.0), trial("ufp4", 2.02), trial("int2", 2.5)]


def test_gap_is_positive_where_worse_than_bf16():
    rows = summary(*GOOD, trial("nvfp4", 1.9)).policies
    gaps = {row.name: row.gap for row in rows}
    assert gaps == pytest.approx({"bf16": 0, "ufp4": 1, "int2": 25, "nvfp4": -5})


def test_train_loss_is_the_mean_of_the_last_steps():
    assert summary(*GOOD, average=2).policies[0].train_loss == 2.5
    assert summary(*GOOD, average=99).policies[0].train_loss == 3.0


def test_a_caption_says_of_how_many_steps():
    ends = "mean of the last 1 step.", "mean of the last 2 steps."
    for average, end in enumerate(ends, start=1):
        assert end in comparison.caption(summary(*GOOD, average=average))


def test_a_skipped_step_does_not_hide_the_train_loss():
    losses = (4.0, math.nan, 2.0)
    assert summary(trial("ufp4", 2.0, losses=losses)).policies[0].train_loss == 2.0
    found = summary(trial("ufp4", math.nan, losses=losses)).policies[0]
    assert math.isnan(found.train_loss)  # diverged


def test_gaps_pair_the_runs_of_a_seed():
    found = summary(
        *(trial("bf16", loss, seed=seed) for seed, loss in enumerate([2.0, 4.0])),
        *(trial("ufp4", loss, seed=seed) for seed, loss in enumerate([2.02, 4.12])),
        *(trial("int2", 8.0, seed=seed) for seed in range(2)),
    )
    bf16, ufp4, _ = found.policies
    assert bf16.heldout_loss == 3.0
    assert bf16.heldout_spread == pytest.approx(statistics.stdev([2.0, 4.0]))
    assert (ufp4.gap, ufp4.gap_spread) == pytest.approx((2, statistics.stdev([1, 3])))


def test_one_seed_has_no_spread():
    row = summary(*GOOD).policies[1]
    assert row.heldout_spread is None and row.gap_spread is None


@pytest.mark.parametrize(
    ("ufp4", "int2", "valid"),
    [
        (2.02, 2.5, True),
        (2.02, 2.03, False),  # worse, but not plainly
        (2.02, 2.02, False),  # quantization had no effect
        (1.98, 2.01, True),
        (1.98, 1.99, False),  # better than BF16
        (2.02, math.nan, True),  # 2 bits diverge
        (math.nan, math.nan, False),
        (math.nan, 2.5, False),
    ],
)
def test_control_must_be_plainly_worse(ufp4, int2, valid):
    found = summary(trial("bf16", 2.0), trial("ufp4", ufp4), trial("int2", int2))
    assert found.valid is valid
    assert found.verdict.startswith("DO NOT TRUST") is not valid


@pytest.mark.parametrize(("scatter", "valid"), [(0.02, True), (0.2, False)])
def test_control_must_exceed_the_spread_of_seeds(scatter, valid):
    trials = []
    for seed, sign in enumerate([1, -1]):
        trials += [
            trial("bf16", 2.0, seed=seed),
            trial("ufp4", 2.0 + sign * scatter, seed=seed),
            trial("int2", 2.08, seed=seed),
        ]
    assert summary(*trials).valid is valid  # 4% against 0 +- 1.4% or 14%


def test_table_and_page_show_every_row_and_explain_the_sign():
    found = summary(*GOOD, baselines=BASELINES)
    terminal = Console(file=io.StringIO(), width=80)
    terminal.print(report.table(found))
    page = report.markdown(found, title="A title", command="a command")
    for text in (terminal.file.getvalue(), page):
        for shown in ("bf16", "ufp4", "int2", "order 2", "order 3", "+1.00%", "3.2500"):
            assert shown in text
        assert "positive is worse" in " ".join(text.split())
        assert "Kneser-Ney" in text
    assert "a command" in page and found.verdict in page


def test_a_diverged_policy_is_named_so():
    found = summary(trial("bf16", 2.0), trial("ufp4", math.inf), trial("int2", 2.5))
    assert "diverged" in report.markdown(found, title="", command="")
    assert "DO NOT TRUST" in found.verdict


def test_a_diverged_reference_is_not_believed():
    found = summary(trial("bf16", math.nan), trial("int2", 2.5))
    assert not found.valid and found.verdict.startswith("DO NOT TRUST")


def test_plot_is_a_picture(tmp_path):
    report.plot(GOOD, BASELINES, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_unbiased_and_weighs_the_past():
    np.testing.assert_allclose(report.smooth([3.0] * 5), 3.0)
    np.testing.assert_allclose(report.smooth([1.0, 2.0], 0.5), [1, (0.5 + 2) / 1.5])
