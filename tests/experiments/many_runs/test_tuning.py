from experiments.many_runs.found import Found
from experiments.many_runs.run import Run
from experiments.many_runs.tuning import MOST, RATES, tuned, tuning
from tests.experiments.many_runs.cases import row

MODEL = "dense_2m"


def rows_of(found, best):
    return [row(run, loss=abs(run.lr - best)) for run in tuning(found, MODEL)]


def rate(rows):
    return tuned(Found(rows), MODEL).lr


def test_the_rate_is_that_of_the_least_loss_once_all_are_there():
    rows = rows_of(Found([]), RATES[2])
    assert rate(rows) == RATES[2]
    rows[2] |= {"diverged": True}
    assert rate(rows) == RATES[1]
    assert tuned(Found(rows[1:]), MODEL) is None
    assert tuned(Found(rows[1:]), MODEL, assumed=0.5) == Run.whole(MODEL, 0.5)


def test_larger_rates_are_tried_while_the_largest_is_the_best():
    rows = rows_of(Found([]), 2 * RATES[-1])
    assert tuned(Found(rows), MODEL) is None
    rows = rows_of(Found(rows), 2 * RATES[-1])
    assert [row["lr"] for row in rows] == [*RATES, 2 * RATES[-1]]
    assert tuned(Found(rows), MODEL) is None  # the largest is the best again
    rows = rows_of(Found(rows), 2 * RATES[-1])
    assert rate(rows) == 2 * RATES[-1]


def test_the_largest_rate_of_all_is_the_last():
    rows = []
    for _ in range(9):
        rows = rows_of(Found(rows), 1.0)
    assert rate(rows) == MOST == rows[-1]["lr"]


def test_a_model_that_diverges_at_every_rate_has_none():
    rows = [each | {"diverged": True} for each in rows_of(Found([]), RATES[2])]
    assert tuned(Found(rows), MODEL) is None
