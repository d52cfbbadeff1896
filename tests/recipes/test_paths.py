"""The list of layers in an error."""

import pytest

from fp4jax.recipes.paths import listed


@pytest.mark.parametrize(
    ("paths", "near", "expected"),
    [
        (["up", "down", "att/key", "att/query"], "atention/qery", "att/query, att/key"),
        (
            [f"b/{i}/f/{j}" for i in (0, 1, 3) for j in (0, 1)],
            "",
            "b/{0..1,3}/f/{0..1}",
        ),
        (["Dense_0", "Dense_2", "Dense_10"], "Dense", "Dense_{0,2,10}"),
        ([f"b/{i}" for i in range(0, 52, 2)], "b", "b/{0,2,4,6,...,50}"),
        (["layer01", "layer02", "{x}"], "layer", "layer0{1..2}, {x}"),
        ([""], "head", "(the model)"),
        ([], "head", "none"),
    ],
)
def test_paths_that_differ_in_numbers_are_one_and_the_nearest_is_first(
    paths, near, expected
):
    found = listed(paths, near=near)
    assert found.startswith(expected)
    assert all(name in found for name in ("up", "down") if name in paths)


def test_a_long_list_is_cut_behind_the_nearest():
    found = listed(
        [f"{letter}_proj" for letter in "abcdefghijklmnopqrst"], near="q_prj"
    )
    assert found.startswith("q_proj, ") and found.endswith(", 4 more")
