import math

import numpy as np
import pytest
from scipy import stats

from experiments.many_runs.gaps import Deviation
from experiments.scaling import fit
from experiments.scaling.fit import Law, Point


def test_the_law_that_made_the_losses_is_found():
    true, flops = Law(1.5, 1.2, 0.15), np.geomspace(1e15, 1e18, 5)
    points = [Point(c, float(true(c))) for c in flops]
    np.testing.assert_allclose(fit.law(points), true, rtol=1e-3)
    *_, power = fit.intervals(fit.law, points, noise=Deviation(1e-3, 8))
    assert power.low < true.power < power.high
    *_, power = fit.intervals(fit.law, points, noise=None)
    assert math.isnan(power.low)


def test_the_slope_is_of_a_tenfold_compute():
    points = [Point(10.0**n, 3.0 - 0.5 * n) for n in range(3)]
    assert fit.slope(points) == pytest.approx(-0.5)


def test_an_interval_of_a_slope_is_that_of_student():
    points = [Point(10.0**n, 0.0) for n in range(4)]
    of = lambda points: [fit.slope(points)]
    (found,) = fit.intervals(of, points, noise=Deviation(0.1, 3))
    error = 0.1 / math.sqrt(5)  # the exponents are 5 squares from their mean
    width = stats.t.ppf(0.975, 3) * error
    assert found.high == pytest.approx(width, rel=0.2)
    assert found.low == pytest.approx(-width, rel=0.2)


@pytest.mark.parametrize("function", [fit.law, fit.slope])
def test_one_compute_is_not_enough(function):
    with pytest.raises(ValueError, match="different computes, got 1"):
        function([Point(1.0, 2.0), Point(1.0, 2.1)])


def test_smaller_differences_need_more_seeds():
    assert fit.seeds_needed(1.0, 0.5) == 2
    assert fit.seeds_needed(0.1, 0.5) == 200
    assert fit.seeds_needed(0.1, None) is None


def test_deviation_is_pooled_over_computes():
    points = [Point(1.0, 0.0), Point(1.0, 2.0), Point(2.0, 5.0), Point(2.0, 7.0)]
    assert fit.deviation(points) == (pytest.approx(math.sqrt(2)), 2)
    assert fit.deviation(points[::2]) is None
