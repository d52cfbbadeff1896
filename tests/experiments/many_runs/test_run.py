import numpy as np

from fp4jax import train
from tests.experiments.many_runs.cases import RUN


def test_rates_are_those_of_the_schedule():
    schedule = train.make_schedule(RUN.optim, steps=RUN.steps)
    np.testing.assert_allclose(RUN.rates, [schedule(i) for i in range(RUN.steps)])
