"""Means and bands over seeds that have come differently far."""

import numpy as np

from experiments.report.curves import Band, gap, smooth


def test_a_band_takes_the_seeds_that_there_are():
    first = (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, np.nan]))
    second = (np.array([2.0, 3.0]), np.array([4.0, 5.0]))
    band = Band.of([first, second])
    np.testing.assert_array_equal(band.tokens, [1, 2, 3])
    np.testing.assert_array_equal(band.mean, [1, 3, 5])
    np.testing.assert_array_equal(band.spread, [np.nan, np.sqrt(2), np.nan])


def test_one_seed_has_no_band():
    band = Band.of([(np.array([1.0]), np.array([2.0]))])
    assert band.mean.tolist() == [2] and np.isnan(band.spread).all()


def test_a_step_without_a_loss_is_left_out_of_the_mean():
    found = smooth([2.0, np.nan, 2.0, np.inf], 0.5)
    np.testing.assert_array_equal(found, [2, np.nan, 2, np.nan])


def test_gaps_are_of_steps_that_both_have():
    assert gap({1: 2.0, 2: 3.0}, {2: 2.0, 3: 1.0}) == {2: 50.0}
