"""The numbers that name streams of random bits."""

from fp4jax.numerics import Site
from fp4jax.numerics.sites import OPERANDS


def test_numbers_are_fixed_for_good():
    assert [(site.name, site.rounding_stream, site.signs_stream) for site in Site] == [
        ("FPROP_X", 0, 8),
        ("FPROP_W", 1, 8),
        ("DGRAD_DY", 2, 9),
        ("DGRAD_W", 3, 9),
        ("WGRAD_X", 4, 10),
        ("WGRAD_DY", 5, 10),
    ]


def test_no_stream_serves_two_purposes():
    rounding = {site.rounding_stream for site in Site}
    assert len(rounding) == len(Site)
    assert not rounding & {site.signs_stream for site in Site}


def test_a_site_knows_its_operand_and_its_gemm():
    for site in Site:
        gemm, operand = site.name.lower().split("_")
        assert OPERANDS[site.operand] == operand
        assert site.is_w == (operand == "w")
        assert site.is_wgrad == (gemm == "wgrad")
