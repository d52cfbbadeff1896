import dataclasses

import numpy as np
import pytest
from scipy import stats

from experiments.many_runs.gaps import (
    Deviation,
    Difference,
    Gap,
    difference,
    gaps,
    pooled,
    spread,
)
from tests.experiments.many_runs.cases import RUN, row


def test_gaps_are_taken_seed_by_seed():
    runs = [dataclasses.replace(RUN, seed=seed, noise=seed) for seed in range(2)]
    fp4 = [dataclasses.replace(run, policy="ufp4") for run in runs]
    losses = dict(zip([*runs, *fp4], (2.0, 4.0, 2.02, 4.08), strict=True))
    found = gaps([row(run, loss) for run, loss in losses.items()])
    assert found[1].gaps == pytest.approx((1.0, 2.0))
    assert found[1].seeds == (0, 1)
    assert found[1].own_gaps == found[1].gaps
    assert spread(found) == pytest.approx((np.std((1.0, 2.0), ddof=1), 1))


def test_the_deviation_is_within_groups_of_what_is_finite():
    groups = [(0.0, 2.0), (5.0, 7.0, np.nan), (9.0,)]
    assert pooled(groups) == pytest.approx((np.sqrt(2), 2))
    assert pooled(groups[2:]) is None


def gap(*values, first=0):
    return Gap(
        policy="p",
        losses=values,
        seeds=tuple(range(first, first + len(values))),
        gaps=values,
        own_gaps=(),
        tokens_per_s=1.0,
        diverged=0,
    )


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"),
    [
        (1.0, Deviation(0.1, 4), "worse"),
        (-1.0, Deviation(0.1, 4), "better"),
        (0.1, Deviation(0.1, 4), "within seeds"),
        (0.35, Deviation(0.1, 4), "within seeds"),  # t is 2.78
        (0.35, Deviation(0.1, 20), "worse"),  # and 2.09
        (np.nan, Deviation(0.1, 4), "diverged"),
    ],
)
def test_single_seeds_are_told_apart_by_student_s_t(mean, deviation, expected):
    assert difference(gap(mean), gap(0.0), deviation).word == expected
    assert difference(gap(mean), gap(0.0), None) is None


def test_several_seeds_are_told_apart_pair_by_pair():
    a, b = gap(0.0, 1.1, 1.9, 3.3), gap(0.5, 1.4, 2.5, 3.5)
    found = difference(a, b, Deviation(9.0, 9))  # seeds move both alike
    low, high = stats.ttest_rel(a.gaps, b.gaps).confidence_interval(0.95)
    assert found == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert str(found) == f"-0.40 ({low:+.2f} to {high:+.2f}), better"


def test_only_seeds_that_both_have_are_paired():
    a, b = gap(1.0, 2.0, 3.0), gap(2.5, 3.1, 9.0, first=1)
    assert difference(a, b, None) == Difference.of((2.0 - 2.5, 3.0 - 3.1))
    apart = gap(9.0, first=7)
    assert difference(a, apart, Deviation(0.1, 4)).value == 2.0 - 9.0


def test_a_difference_from_a_run_that_diverged_is_not_a_number():
    assert str(difference(gap(1.0, np.nan), gap(1.0, 2.0), None)) == "diverged"
