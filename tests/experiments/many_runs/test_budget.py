import dataclasses

import pytest

from experiments.many_runs import budget
from experiments.many_runs.found import Found
from tests.experiments.many_runs.cases import RUN, row


def test_a_run_costs_what_one_like_it_took():
    guess, is_measured = budget.seconds(RUN, Found([]))
    assert not is_measured and guess > 0
    found = Found([row(RUN, tokens_per_s=512.0)])
    longer = dataclasses.replace(RUN, tokens=100 * 2 * 64, seed=1)
    cost, is_measured = budget.seconds(longer, found)
    assert is_measured
    assert cost == pytest.approx(100 * 2 * 64 / 512, abs=5)


def test_time_is_that_of_the_device():
    rows = [{"seconds": 60.0, "lanes": 0}, {"seconds": 90.0, "lanes": 3}]
    assert budget.minutes(rows) == pytest.approx(1.5)
