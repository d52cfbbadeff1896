from experiments.many_runs import show
from experiments.many_runs.found import Found
from experiments.many_runs.tuning import RATES, tuning
from tests.experiments.many_runs.cases import row


def test_a_rate_at_an_end_of_the_grid_is_named():
    tokens = {"dense_2m": 10_000_000, "dense_4m": 20_000_000}
    slow, fast = (tuning(Found([]), *each) for each in tokens.items())
    rows = [row(run, loss=1 + run.lr) for run in slow]
    rows += [row(run, loss=abs(run.lr - RATES[1])) for run in fast]
    page = show.of_rates(Found(rows), tokens)
    assert page.endswith("At an end of the rates that were tried: `dense_2m`.")
    assert "At an end" not in show.of_rates(Found(rows[4:]), tokens)
