from experiments.many_runs import show
from experiments.many_runs.found import Found
from experiments.many_runs.tuning import RATES, tuning
from tests.experiments.many_runs.cases import row


def test_a_rate_at_an_end_of_the_grid_is_named():
    models = "dense_2m", "dense_4m"
    slow, fast = (tuning(Found([]), model) for model in models)
    rows = [row(run, loss=1 + run.lr) for run in slow]
    rows += [row(run, loss=abs(run.lr - RATES[1])) for run in fast]
    page = show.of_rates(Found(rows), models)
    assert page.endswith("At an end of the rates that were tried: `dense_2m`.")
    assert "At an end" not in show.of_rates(Found(rows[4:]), models)
