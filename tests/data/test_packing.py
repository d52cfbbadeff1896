"""Documents become rows, every target once."""

import numpy as np

from fp4jax.data import Documents
from fp4jax.data.packing import Rows

END = 299


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_rows_by_hand():
    tokens = np.uint16([1, 2, 3, END, 4, END, 5, 6, 7, 8, END])
    rows = Rows(Documents(tokens, np.array([4, 6, 11])), 5)
    assert len(rows) == 2
    assert_equal(
        rows[0],
        {
            "inputs": np.array([1, 2, 3, 4, 5]),
            "targets": np.array([2, 3, END, END, 6]),
            "segment_ids": np.array([1, 1, 1, 2, 3]),
            "positions": np.array([0, 1, 2, 0, 0]),
            "loss_mask": np.ones(5),
        },
    )
    assert_equal(
        rows[np.array([1, 2])],
        {
            "inputs": np.array([[6, 7, 8, 0, 0], [0] * 5]),
            "targets": np.array([[7, 8, END, 0, 0], [0] * 5]),
            "segment_ids": np.array([[1, 1, 1, 0, 0], [0] * 5]),
            "positions": np.array([[0, 1, 2, 0, 0], [0] * 5]),
            "loss_mask": np.array([[1, 1, 1, 0, 0], [0] * 5]),
        },
    )
