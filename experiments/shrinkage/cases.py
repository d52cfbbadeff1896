"""What is quantized how, and what a separate simulation in float64 found for it.

The expected figures are those of a numpy simulation that shares no code with the
library: percent, decibels and plain numbers, rounded as it printed them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    UE5M3,
    UNIFORM,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)

# How far a figure may be from the expected one: percentage points, dB, plain numbers.
TOLERANCE = {
    "alpha - 1": 0.1,
    "bias": 0.1,
    "geometric": 0.1,
    "QSNR": 0.2,
    "QSNR of squares": 0.2,
    "B_eff": 0.02,
    "crest": 0.02,
    "saturated": 0.1,
    "scale differs": 1.0,
    "value differs": 1.0,
    "view error": 0.005,
    "output error": 0.002,
    "eta - 1": 0.1,
}
GRIDS = {"E2M1": E2M1, "UNIFORM": UNIFORM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table.

    Attributes:
      section: the table.
      data: name of the distribution.
      label: how the row's quantizer reads.
      grid: name of the element grid.
      quantizer: of the array; of both operands, in the section "gemm".
      expected: figures by name, those that the simulation has.
    """

    section: str
    data: str
    label: str
    grid: str
    quantizer: Quantizer
    expected: Mapping[str, float]


def data_cases() -> list[Case]:
    """Distributions with and without RHT 16: blocks of 16, float32 scales, nearest."""
    found = []
    for (data, label), rows in _DATA.items():
        for grid, row in zip(GRIDS, rows, strict=True):
            rotation = Hadamard(16) if label == "RHT" else None
            found.append(
                Case(
                    section="data",
                    data=data,
                    label=label,
                    grid=grid,
                    quantizer=Quantizer(GRIDS[grid], rotation=rotation),
                    expected=dict(zip(_FIGURES, row, strict=True)),
                )
            )
    return found


_FIGURES = ("alpha - 1", "bias", "geometric", "QSNR", "B_eff", "crest")
# By distribution and rotation: E2M1, then UNIFORM.
_DATA = {
    ("gauss", "plain"): (
        (-0.40, -0.67, -2.25, 20.52, 0.98, 2.07),
        (0.07, -0.30, 0.0, 21.39, 0.91, 2.07),
    ),
    ("laplace", "plain"): (
        (-0.32, -0.77, -1.92, 20.81, 0.96, 2.39),
        (0.04, -0.85, 0.0, 19.89, 0.81, 2.39),
    ),
    ("laplace", "RHT"): (
        (-0.41, -0.67, -2.31, 20.43, 0.97, 2.02),
        (0.07, -0.27, 0.0, 21.72, 0.92, 2.02),
    ),
    ("student", "plain"): (
        (-0.26, -0.75, -1.88, 21.05, 0.95, 2.45),
        (-0.04, -0.81, 0.0, 18.97, 0.79, 2.45),
    ),
    ("student", "RHT"): (
        (-0.24, -0.66, -2.35, 20.17, 0.97, 1.99),
        (0.08, -0.24, 0.0, 22.33, 0.93, 1.99),
    ),
    ("channels", "plain"): (
        (-0.19, -0.92, -2.10, 21.25, 0.98, 2.19),
        (-0.64, -1.07, 0.0, 18.60, 0.86, 2.19),
    ),
    ("channels", "RHT"): (
        (0.48, -0.63, -2.43, 18.86, 0.95, 1.98),
        (0.10, -0.19, 0.0, 25.06, 0.97, 1.98),
    ),
    ("spikes", "plain"): (
        (-0.11, -0.80, -2.22, 28.51, 1.00, 2.11),
        (-0.10, -0.51, 0.0, 28.39, 0.90, 2.11),
    ),
    ("spikes", "RHT"): (
        (4.24, -0.02, -2.06, 23.57, 0.97, 2.04),
        (1.73, -0.15, 0.0, 26.95, 0.94, 2.04),
    ),
}


_E4M3 = Scale(E4M3, pad=False)
_PADDED = Scale(E4M3, pad=True)
_CEIL = Scale(E8M0, "truncation_free")
_FLOOR = Scale(E8M0, "floor")
_TSENG = Scale(E8M0, "floor", prescale=0.75)
_SR = Stochastic()

# On a Gaussian: label, grid, quantizer, expected.
_SCALES = (
    ("F32, 16", "E2M1", Quantizer(E2M1), (-0.40, 20.52)),
    ("E4M3, 16", "E2M1", Quantizer(E2M1, 16, _E4M3), (-0.44, 20.43)),
    ("UE5M3, 16", "E2M1", Quantizer(E2M1, 16, Scale(UE5M3)), (-0.44, 20.43)),
    ("F32, 32", "E2M1", Quantizer(E2M1, 32), (-0.58, 19.91)),
    ("E8M0 floor, 32", "E2M1", Quantizer(E2M1, 32, _FLOOR), (-1.97, 18.78, 2.3)),
    ("E8M0 floor 3/4, 32", "E2M1", Quantizer(E2M1, 32, _TSENG), (-0.89, 18.58)),
    ("E8M0 ceil, 32", "E2M1", Quantizer(E2M1, 32, _CEIL), (-1.01, 18.75)),
    ("E8M0 ceil, 32", "UNIFORM", Quantizer(UNIFORM, 32, _CEIL), (0.10, 16.84)),
)
_STOCHASTIC = (
    ("F32, 16", "E2M1", Quantizer(E2M1, rounding=_SR), (0.0, 17.49)),
    ("F32, 16", "UNIFORM", Quantizer(UNIFORM, rounding=_SR), (0.0, 18.38)),
    ("E4M3, 16", "E2M1", Quantizer(E2M1, 16, _E4M3, rounding=_SR), (-0.35, None, 3.5)),
    ("E4M3 17/16, 16", "E2M1", Quantizer(E2M1, 16, _PADDED, rounding=_SR), (0.0,)),
    ("E8M0 floor, 32", "E2M1", Quantizer(E2M1, 32, _FLOOR, rounding=_SR), (-1.0,)),
)


def scale_cases() -> list[Case]:
    """Scale formats, nearest and stochastic."""
    names = ("alpha - 1", "QSNR", "saturated")
    return [
        Case(
            section=section,
            data="gauss",
            label=label,
            grid=grid,
            quantizer=quantizer,
            expected=_known(names, row),
        )
        for section, rows in (("scales", _SCALES), ("stochastic", _STOCHASTIC))
        for label, grid, quantizer, row in rows
    ]


# Data, label, grid, block, scale; then what differs between a matrix and its transpose
# in percent, the norm of the difference, QSNR of rows and of squares.
_VIEWS = (
    ("gauss", "E4M3, 16", "E2M1", 16, _E4M3, (86, 76, 0.130, 20.43, 19.06)),
    ("gauss", "E4M3, 16", "UNIFORM", 16, _E4M3, (None, None, None, None, 17.98)),
    ("gauss", "E8M0 ceil, 32", "E2M1", 32, _CEIL, (17, 5.5, 0.057, 18.76, 16.47)),
    ("gauss", "E8M0 ceil, 32", "UNIFORM", 32, _CEIL, (None, None, None, None, 13.51)),
    ("gauss", "E8M0 floor, 32", "E2M1", 32, _FLOOR, (34.6, 8.2, 0.065, 18.79, 18.79)),
    ("student", "E4M3, 16", "E2M1", 16, _E4M3, (None, None, None, 20.88, 14.81)),
    ("student", "E4M3, 16", "UNIFORM", 16, _E4M3, (None, None, None, None, 11.22)),
    ("student", "E8M0 ceil, 32", "E2M1", 32, _CEIL, (57, 26, 0.156, 16.47, 8.97)),
    ("student", "E8M0 ceil, 32", "UNIFORM", 32, _CEIL, (None, None, None, None, 5.97)),
    ("student", "E8M0 floor, 32", "E2M1", 32, _FLOOR, (60, 24.2, 0.127, 16.97, 10.81)),
)


def view_cases() -> list[Case]:
    """A matrix and its transpose in rows; the same in squares, by its QSNR."""
    names = ("scale differs", "value differs", "view error", "QSNR", "QSNR of squares")
    return [
        Case(
            section="views",
            data=data,
            label=label,
            grid=grid,
            quantizer=Quantizer(GRIDS[grid], block, scale),
            expected=_known(names, row),
        )
        for data, label, grid, block, scale, row in _VIEWS
    ]


def gemm_cases() -> list[Case]:
    """Both operands of a GEMM of Gaussians."""
    return [
        Case(
            section="gemm",
            data="gauss",
            label="E4M3, 16",
            grid=grid,
            quantizer=Quantizer(GRIDS[grid], 16, _E4M3),
            expected=_known(("eta - 1", "output error"), row),
        )
        for grid, row in (("E2M1", (-0.87, 0.134)), ("UNIFORM", (0.0, 0.122)))
    ]


def _known(names: Sequence[str], row: Sequence[float | None]) -> dict[str, float]:
    """Returns the figures that a row of the simulation has."""
    pairs = zip(names, row, strict=False)
    return {name: value for name, value in pairs if value is not None}
