"""The policies of runs: the published ones, and what studies change of them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from fp4jax import policies, recipes
from fp4jax.models import ModelConfig
from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E8M0,
    NEAREST,
    NVFP4_SIGNS,
    Fresh,
    Hadamard,
    PerStepSigns,
    Scale,
)
from fp4jax.policies import Policy
from fp4jax.recipes import Recipe

PolicyOf = Callable[[ModelConfig], Policy]

_GEMMS = frozenset({"fprop", "dgrad", "wgrad"})


def _replaced(recipe: Recipe, gemms: Iterable[str] = _GEMMS, **fields) -> Recipe:
    """Returns a recipe with other fields in the quantizers of some GEMMs, or of all."""

    def gemm(name: str):
        old = getattr(recipe, name)
        quantizers = {
            operand: quantizer and dataclasses.replace(quantizer, **fields)
            for operand, quantizer in vars(old).items()
        }
        return dataclasses.replace(old, **quantizers)

    return dataclasses.replace(recipe, **{name: gemm(name) for name in gemms})


def _ufp4_rotated(*gemms: str) -> Recipe:
    """Returns `recipes.ufp4`, rotated in some GEMMs only."""
    return _replaced(recipes.ufp4(), _GEMMS.difference(gemms), rotation=None)


def _ufp4_stochastic(*gemms: str) -> Recipe:
    """Returns `recipes.ufp4`, dy rounded stochastically in some GEMMs only."""
    return _replaced(recipes.ufp4(), _GEMMS.difference(gemms), rounding=NEAREST)


def _ue5m3_rotated() -> Recipe:
    """Returns `recipes.ue5m3` with the rotation of `recipes.nvfp4` in wgrad.

    The amax there is that of the tensor at hand: a rotated one is not held.
    """
    return _replaced(
        recipes.ue5m3(),
        {"wgrad"},
        rotation=Hadamard(16, NVFP4_SIGNS),
        tensor_scale=Fresh(),
    )


def _ti2d_rows() -> Recipe:
    """Returns `recipes.ti2d` with blocks of 1x32 along the contraction."""
    return _replaced(dataclasses.replace(recipes.ti2d(), share_dy=False), block=32)


def _ti2d_square_w() -> Recipe:
    """Returns `recipes.ti2d` with such blocks of x and dy, and squares of w."""
    square, rows = recipes.ti2d(), _ti2d_rows()
    return dataclasses.replace(
        rows,
        fprop=dataclasses.replace(rows.fprop, w=square.fprop.w),
        dgrad=dataclasses.replace(rows.dgrad, w=square.dgrad.w),
    )


def _ti2d(recipe: Recipe) -> PolicyOf:
    """Returns `policies.ti2d` with another recipe in place of `recipes.ti2d`."""

    def policy(config: ModelConfig) -> Policy:
        return dataclasses.replace(policies.ti2d(config), default=recipe)

    return policy


def _whole(recipe: Recipe) -> PolicyOf:
    return lambda config: Policy(recipe)


def _named(recipes: Mapping[str, Recipe]) -> dict[str, PolicyOf]:
    return {name: _whole(recipe) for name, recipe in recipes.items()}


def _ues(**options: Iterable) -> dict[str, Recipe]:
    return {
        f"ue5m3_{name}_{value:g}": recipes.ue5m3(**{name: value})
        for name, values in options.items()
        for value in values
    }


UFP4 = _named(
    {
        "ufp4_no_rht": _ufp4_rotated(),
        "ufp4_rht_wgrad": _ufp4_rotated("wgrad"),
        "ufp4_rht_dgrad_wgrad": _ufp4_rotated("dgrad", "wgrad"),
        "ufp4_rht_fprop_wgrad": _ufp4_rotated("fprop", "wgrad"),
        "ufp4_no_sr": _ufp4_stochastic(),
        "ufp4_sr_dgrad": _ufp4_stochastic("dgrad"),
        "ufp4_sr_wgrad": _ufp4_stochastic("wgrad"),
        "ufp4_signs_3": recipes.ufp4(seed=3),
        "ufp4_signs_6": recipes.ufp4(seed=6),
        "ufp4_signs_per_step": _replaced(
            recipes.ufp4(), rotation=Hadamard(16, PerStepSigns())
        ),
        "ufp4_e4m3": recipes.ufp4(Scale(E4M3)),
        "e2m1_no_rht": _replaced(_ufp4_rotated(), grid=E2M1),
        "e2m1_rht": _replaced(recipes.ufp4(), grid=E2M1),
        "e2m1_to_2_rht": _replaced(recipes.ufp4(), grid=E2M1_TO_2),
    }
)

UE5M3 = _named(
    {
        "ue5m3_plain": recipes.ue5m3(),
        **_ues(every=(1, 10, 200), target=(64.0, 2048.0)),
        "ue5m3_e4m3": recipes.ue5m3(scale=Scale(E4M3, pad=False)),
        "ue5m3_rht": _ue5m3_rotated(),
    }
)

TI2D: dict[str, PolicyOf] = {
    "ti2d_rows": _ti2d(_ti2d_rows()),
    "ti2d_square_w": _ti2d(_ti2d_square_w()),
    "ti2d_floor": _ti2d(recipes.ti2d(scale=Scale(E8M0, "floor"))),
    "ti2d_nearest_dy": _ti2d(_replaced(recipes.ti2d(), rounding=NEAREST)),
    "ti2d_fp4_qk": _whole(recipes.ti2d()),
    **{f"ti2d_block_{size}": _ti2d(recipes.ti2d(block=size)) for size in (8, 16, 64)},
}

POLICIES: Mapping[str, PolicyOf] = MappingProxyType(
    {**policies.PRESETS, **UFP4, **UE5M3, **TI2D}
)
