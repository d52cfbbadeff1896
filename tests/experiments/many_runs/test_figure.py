import numpy as np
import pytest

from experiments.many_runs import figure


@pytest.mark.parametrize("count", [2, 6])
def test_curves_are_means_of_the_last_losses(count):
    rows = [{"policy": "bf16", "losses": [1.0] * count}] * 2
    curve = figure.curves(rows)["bf16"]
    np.testing.assert_allclose(curve.values, 1.0)
    assert curve.ends.tolist() == list(range(min(count, 5), count + 1))
