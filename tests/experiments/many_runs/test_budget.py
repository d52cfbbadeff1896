import dataclasses

import pytest

from experiments.many_runs import budget
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run
from tests.experiments.many_runs.cases import RUN, row


def test_a_run_costs_what_one_like_it_took():
    guess, is_measured = budget.seconds(RUN, Found([]))
    assert not is_measured and guess > 0
    found = Found([row(RUN, tokens_per_s=512.0)])
    longer = dataclasses.replace(RUN, tokens=100 * 2 * 64, seed=1)
    cost, is_measured = budget.seconds(longer, found)
    assert is_measured
    assert cost == pytest.approx(100 * 2 * 64 / 512, abs=5)
    assert not budget.seconds(dataclasses.replace(longer, rows=4), found)[1]


@pytest.mark.parametrize(
    ("model", "policy", "tokens_per_s"),
    [
        ("dense_9m", "bf16", 4.25e6),
        ("dense_9m", "e2m1_ref", 3.45e6),
        ("moe_11m", "bf16", 4.4e6),
    ],
)
def test_what_was_not_timed_costs_what_was_measured_of_flops(
    model, policy, tokens_per_s
):
    run = Run(policy=policy, model=model, tokens=int(180e6), lr=2e-3)
    cost, _ = budget.seconds(run, Found([]))
    assert cost == pytest.approx(180e6 / tokens_per_s + budget._EVALUATION, rel=0.02)


def test_a_queue_of_one_run_is_said_as_such():
    caption = budget.table([RUN], Found([row(RUN)])).caption
    assert caption.startswith("1 run; 0 minutes left on ")
