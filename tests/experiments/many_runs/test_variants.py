from experiments.ablation import grids
from experiments.many_runs.found import STUDIES, Found
from experiments.many_runs.shapes import SHAPES
from experiments.many_runs.variants import POLICIES
from fp4jax.numerics import E2M1, E2M1_TO_2, NEAREST, UNIFORM
from tests.experiments.many_runs.cases import about


def test_every_policy_suits_every_shape():
    for shape in SHAPES.values():
        for policy in POLICIES.values():
            policy(shape).check(shape.layer_paths)


def test_variants_change_what_their_names_say():
    recipe = lambda name: POLICIES[name](SHAPES["dense_2m"]).default
    rotated = lambda name: [
        gemm
        for gemm in ("fprop", "dgrad", "wgrad")
        if all(q.rotation for q in vars(getattr(recipe(name), gemm)).values())
    ]
    assert rotated("ufp4_no_rht") == []
    for scope, pair in grids.SCOPES.items():
        gemms = [] if scope == "none" else sorted(scope.split(", "))
        assert [sorted(rotated(name)) for name in pair] == [gemms, gemms]
        assert [recipe(name).wgrad.x.grid for name in pair] == [E2M1, UNIFORM]
    assert rotated("ufp4_rht_fprop_wgrad") == ["fprop", "wgrad"]
    assert rotated("ue5m3_rht") == ["wgrad"]
    assert recipe("e2m1_to_2_rht").fprop.x.grid == E2M1_TO_2
    drawn = recipe("ufp4_sr_dgrad")
    assert drawn.dgrad.dy.is_stochastic and not drawn.wgrad.dy.is_stochastic
    assert not recipe("ti2d_rows").wgrad.x.is_square
    assert recipe("ti2d_square_w").dgrad.w.is_square
    assert not recipe("ti2d_square_w").wgrad.dy.is_square
    assert recipe("ti2d_nearest_dy").wgrad.dy.rounding == NEAREST
    assert recipe("ti2d_block_8").fprop.x.block == (8, 8)
    assert recipe("ue5m3_every_200").fprop.x.tensor_scale.every == 200
    assert "mxfp8" not in str(POLICIES["ti2d_fp4_qk"](SHAPES["dense_2m"]).rules)


def test_every_variant_is_in_a_study():
    runs = [run for name in STUDIES for run in about(name).queue(Found([]), 2e-3)]
    unused = set(POLICIES) - {run.policy for run in runs}
    assert unused == {"mxfp4_tseng", "mxfp8", "four_over_six", "int2"}
