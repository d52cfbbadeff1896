import dataclasses

import numpy as np
import pytest

from experiments.many_runs.gaps import Deviation, Gap, gaps, pooled, spread, verdict
from tests.experiments.many_runs.cases import RUN, row


def test_gaps_are_taken_seed_by_seed():
    runs = [dataclasses.replace(RUN, seed=seed, noise=seed) for seed in range(2)]
    fp4 = [dataclasses.replace(run, policy="ufp4") for run in runs]
    losses = dict(zip([*runs, *fp4], (2.0, 4.0, 2.02, 4.08), strict=True))
    found = gaps([row(run, loss) for run, loss in losses.items()])
    assert found[1].gaps == pytest.approx((1.0, 2.0))
    assert found[1].own_gaps == found[1].gaps
    assert spread(found) == pytest.approx((np.std((1.0, 2.0), ddof=1), 1))


def test_the_deviation_is_within_groups_of_what_is_finite():
    groups = [(0.0, 2.0), (5.0, 7.0, np.nan), (9.0,)]
    assert pooled(groups) == pytest.approx((np.sqrt(2), 2))
    assert pooled(groups[2:]) is None


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"),
    [
        (1.0, Deviation(0.1, 4), "worse"),
        (-1.0, Deviation(0.1, 4), "better"),
        (0.1, Deviation(0.1, 4), "within seeds"),
        (0.35, Deviation(0.1, 4), "within seeds"),  # t is 2.78
        (0.35, Deviation(0.1, 20), "worse"),  # and 2.09
        (1.0, None, "not known"),
        (np.nan, Deviation(0.1, 4), "diverged"),
    ],
)
def test_a_verdict_is_by_student_s_t(mean, deviation, expected):
    gap = lambda value: Gap(
        policy="p",
        losses=(2.0,),
        gaps=(value,),
        own_gaps=(),
        tokens_per_s=1.0,
        diverged=0,
    )
    assert verdict(gap(mean), gap(0.0), deviation) == expected


def test_a_verdict_is_by_the_spread_of_both():
    gap = lambda *values: Gap(
        policy="p",
        losses=values,
        gaps=values,
        own_gaps=(),
        tokens_per_s=1.0,
        diverged=0,
    )
    noisy, calm = gap(-1.0, 0.0, 1.0), gap(0.9, 1.0, 1.1)
    of_all = Deviation(0.3, 18)  # most are calm
    assert verdict(noisy, calm, of_all) == "within seeds"
    assert verdict(gap(2.9, 3.0, 3.1), calm, Deviation(3.0, 18)) == "worse"
    assert verdict(gap(0.0), calm, of_all) == "better"  # its own is not known
