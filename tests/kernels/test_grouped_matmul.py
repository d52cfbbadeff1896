"""Segments of grouped products: every row once, whole ones first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels.grouped_matmul.segments import Segments, Sums, piece
from fp4jax.numerics.groups import Groups

COUNT = 3
ORDERS = {
    "sorted": [0] * 3 + [1] + [2] * 5,
    "of no group, some": [2, 2, 2, 3, 3, 0, 3, 2, 2],
    "apart": [0, 2, 0, 2, 0, 2, 0, 3, 0],
    "one": [1] * 9,
    "none": [3] * 9,
}


def groups_of(name):
    return Groups(jnp.array(ORDERS[name], jnp.int32), COUNT)


segments_of, sums_of = (
    jax.jit(f.of, static_argnames=("rows", "most")) for f in (Segments, Sums)
)


@pytest.mark.parametrize("rows, most", [(16, 64), (32, 64), (48, 64), (128, 64)])
@pytest.mark.parametrize("name", ORDERS)
def test_segments_are_rows_of_one_group_that_follow_each_other(name, rows, most):
    groups = groups_of(name)
    found = segments_of(groups, rows=rows, most=most)
    first, size, group, number = map(np.asarray, found)
    used = slice(int(number[0]))
    expected = np.repeat(groups.of, rows)
    np.testing.assert_array_equal(np.repeat(group[used], size[used]), expected)
    ends = np.cumsum(size[used])
    np.testing.assert_array_equal(first[used], ends - size[used])
    assert (size[used] > 0).all() and (size <= most).all()
    assert (size % piece(rows, most) == 0).all()
    # Only the end of a group ends a segment early.
    followed = group[used][:-1] == group[used][1:]
    assert (size[used][:-1][followed] == most).all()
    assert (size[number[0] :] == 0).all() and (group[number[0] :] == COUNT).all()


@pytest.mark.parametrize("name", ORDERS)
def test_sums_have_the_segments_of_each_group_long_ones_first(name):
    groups, rows, most = groups_of(name), 16, 64
    first, size, bounds = map(np.asarray, sums_of(groups, rows=rows, most=most))
    for i in range(COUNT):
        start, short, end = bounds[2 * i : 2 * i + 3]
        assert (size[start:short] == most).all() and (size[short:end] < most).all()
        rows_of = [np.arange(*pair) for pair in zip(first, first + size, strict=True)]
        found = np.concatenate([[], *rows_of[start:end]])
        expected = np.flatnonzero(np.repeat(groups.of, rows) == i)
        np.testing.assert_array_equal(np.sort(found), expected)
