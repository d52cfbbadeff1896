"""Which quantizers are measured: by grid, rotation, scale format and block."""

import itertools
from collections.abc import Iterator
from typing import Any

from experiments.folder import Row
from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E8M0,
    UE5M3,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
)

GRIDS = {grid.name: grid for grid in (E2M1, UNIFORM, E2M1_TO_2)}
BOTH = ("E2M1", "UNIFORM")
ROTATIONS = (0, 16, 32, 64, 128)
BLOCKS = (16, 32, 64)
# Block scales, and those under a float32 scale of the tensor.
SCALES: dict[str, tuple[Scale, Fresh | None]] = {
    "F32": (Scale(), None),
    "E4M3 + F32": (Scale(E4M3), Fresh()),
    "E4M3": (Scale(E4M3), None),
    "UE5M3 + F32": (Scale(UE5M3), Fresh()),
    "UE5M3": (Scale(UE5M3), None),
    "E8M0": (Scale(E8M0), None),
    "E8M0 floor": (Scale(E8M0, "floor"), None),
}


def suits(grid: str, scale: str) -> bool:
    """Returns whether a scale has a meaning on a grid: floor has none on uniform."""
    return not (SCALES[scale][0].rule == "floor" and GRIDS[grid].is_uniform)


def case(
    grid: str, rotation: int = 0, scale: str = "F32", block: int = 16
) -> dict[str, Any]:
    """Returns what names a quantizer in a row; a rotation of 0 is none."""
    return {"grid": grid, "rotation": rotation, "scale": scale, "block": block}


def quantizer(row: Row) -> Quantizer:
    """Returns the quantizer that a row names; all round to nearest."""
    scale, tensor_scale = SCALES[row["scale"]]
    return Quantizer(
        GRIDS[row["grid"]],
        row["block"],
        scale,
        tensor_scale=tensor_scale,
        rotation=Hadamard(row["rotation"]) if row["rotation"] else None,
    )


def few_cases() -> Iterator[Row]:
    """Yields what is measured at every step: all grids, without and with a rotation."""
    for rotation, grid in itertools.product((0, 16), GRIDS):
        yield case(grid, rotation)


def main_cases() -> Iterator[Row]:
    """Yields what is measured at the last step first: one thing changes at a time."""
    for rotation, grid in itertools.product(ROTATIONS, GRIDS):
        yield case(grid, rotation)
    for scale, rotation, grid in itertools.product(list(SCALES)[1:], (0, 16), BOTH):
        if suits(grid, scale):
            yield case(grid, rotation, scale)
    for block, scale in itertools.product(BLOCKS[1:], ("F32", "E4M3 + F32", "E8M0")):
        for rotation, grid in itertools.product((0, block), BOTH):
            yield case(grid, rotation, scale, block)


def more_cases() -> Iterator[Row]:
    """Yields every combination on both full grids: without, of 16 and of 128."""
    for block, scale in itertools.product(BLOCKS, SCALES):
        for rotation, grid in itertools.product((0, 16, 128), BOTH):
            if suits(grid, scale):
                yield case(grid, rotation, scale, block)
