from experiments.many_runs.found import Found
from experiments.many_runs.tuning import RATES, tuned, tuning
from tests.experiments.many_runs.cases import row


def test_the_rate_is_that_of_the_least_loss_once_all_are_there():
    rows = [
        row(run, loss=abs(run.lr - RATES[2])) for run in tuning("dense_2m", 10_000_000)
    ]
    assert tuned(Found(rows), "dense_2m", 10_000_000) == RATES[2]
    rows[2] |= {"diverged": True}
    assert tuned(Found(rows), "dense_2m", 10_000_000) == RATES[1]
    assert tuned(Found(rows[1:]), "dense_2m", 10_000_000) is None
    assert tuned(Found(rows[1:]), "dense_2m", 10_000_000, assumed=0.5) == 0.5
