import numpy as np
import pytest

from experiments.many_runs.run import Run
from experiments.many_runs.shapes import SHAPES, TRAINING
from fp4jax import models, train
from tests.experiments.many_runs.cases import RUN


def test_rates_are_those_of_the_schedule():
    schedule = train.make_schedule(RUN.optim, steps=RUN.steps)
    np.testing.assert_allclose(RUN.rates, [schedule(i) for i in range(RUN.steps)])


@pytest.mark.parametrize("model", TRAINING)
def test_a_whole_run_sees_twenty_tokens_a_parameter_in_some_3000_steps(model):
    run = Run.whole(model, 1e-3)
    assert 2400 <= run.steps <= 3400
    assert round(run.tokens / models.num_params(SHAPES[model])) in (20, 21)
