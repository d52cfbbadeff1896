import numpy as np

from experiments.many_runs import text
from fp4jax import data
from fp4jax.data.packing import Rows
from tests.experiments.many_runs.cases import RUN


def test_the_text_on_the_device_is_what_the_trainer_draws(bytes_of_two, corpus):
    whole, rows = text.read(corpus, RUN.length), RUN.batches(bytes_of_two)
    batches, orders = (
        data.train_batches(corpus, rows),
        text.orders(corpus, rows, steps=2),
    )
    for order in (next(orders), next(orders)):
        for each in order:
            found = text.batch(whole, each)
            for name, value in text.without_documents(next(batches)).items():
                np.testing.assert_array_equal(found[name], value)


def test_rows_end_in_padding_as_those_of_the_trainer_do(corpus):
    whole = text.read(corpus, RUN.length)
    rows = Rows(corpus.domains[0].train, RUN.length)
    last = rows[np.arange(len(rows) - 2, len(rows))]
    found = text.batch(whole, np.arange(len(rows) - 2, len(rows)))
    assert last["loss_mask"].min() == 0
    for name, value in text.without_documents(last).items():
        np.testing.assert_array_equal(found[name], value)
