"""The value that describes how one operand is quantized."""

import dataclasses
import math
from typing import Any

from fp4jax.numerics import checks
from fp4jax.numerics.formats import GRIDS, Format
from fp4jax.numerics.hadamard import Hadamard
from fp4jax.numerics.rounding import (
    NEAREST,
    MSEden,
    Nearest,
    Rounding,
    Stochastic,
)
from fp4jax.numerics.scaling import OVERSHOOT, Fresh, Held, Scale, TensorScale


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one operand of a GEMM is quantized.

    q = round(H(x) inv),  operand = q scale

    Attributes:
      grid: element grid: `E2M1`, `UNIFORM`, `INT2`, `E2M1_TO_2`, `E4M3` or `E5M2`.
      block: elements that share a scale: B in a row along the contraction axis, or
        (B, B) for squares.
      scale: format and rule of the block scale.
      tensor_scale: `Fresh(target)` or `Held(every, target)` for a second, float32 level
        over the block scales; only with a block scale of 3 mantissa bits, and `Held`
        without a rotation, for it serves all GEMMs of an operand.
      rounding: `NEAREST`, `Stochastic()`, or `MSEden(group)`, which needs a rotation
        and two levels.
      rotation: a `Hadamard` applied along the contraction axis before; not with
        square blocks, whose scales would no longer survive a transposition.
    """

    grid: Format
    block: int | tuple[int, int] = 16
    scale: Scale = Scale()
    tensor_scale: TensorScale | None = None
    rounding: Rounding = NEAREST
    rotation: Hadamard | None = None

    def __post_init__(self):
        self._check_types()
        self._check_block()
        self.scale.check_grid(self.grid)
        self._check_tensor_scale()
        self._check_rounding()

    def _check_tensor_scale(self) -> None:
        scale, tensor_scale = self.scale, self.tensor_scale
        if tensor_scale is not None and not scale.rounds_mantissa:
            raise ValueError(
                "Quantizer: tensor_scale must be None unless the block scale is one of "
                f"E4M3, UE5M3, UE5M3_FN, got scale.format={scale.format}."
            )
        if tensor_scale is not None and tensor_scale.target > scale.format.max:
            raise ValueError(
                "Quantizer: tensor_scale.target must be at most the largest block "
                f"scale, {scale.format.max}, got target={tensor_scale.target}."
            )
        if isinstance(tensor_scale, Held) and self.rotation is not None:
            raise ValueError(
                "Quantizer: tensor_scale must not be Held with a rotation, whose amax "
                f"differs between GEMMs, got rotation={self.rotation}. Use Fresh."
            )

    def _check_rounding(self) -> None:
        rounding, scale = self.rounding, self.scale
        if scale.candidates and (rounding != NEAREST or self.tensor_scale is None):
            raise ValueError(
                "Quantizer: scale.candidates need a tensor scale and rounding=NEAREST, "
                f"got tensor_scale={self.tensor_scale}, rounding={rounding}."
            )
        if not isinstance(rounding, MSEden):
            return
        if self.rotation is None or self.tensor_scale is None or scale.pad:
            raise ValueError(
                "Quantizer: rounding=MSEden needs a rotation and a tensor scale, and "
                f"no scale.pad, got rotation={self.rotation}, tensor_scale="
                f"{self.tensor_scale}, scale.pad={scale.pad}."
            )
        size, run, group = self.block_size, self.rotation.size, rounding.group
        if group % size or run % group:
            raise ValueError(
                "Quantizer: rounding.group must be a multiple of the block and divide "
                f"the rotation, got group={group}, block={size}, rotation of {run}."
            )

    def _check_types(self) -> None:
        kinds = {
            "grid": (Format,),
            "scale": (Scale,),
            "tensor_scale": (Fresh, Held, type(None)),
            "rounding": (Nearest, Stochastic, MSEden),
            "rotation": (Hadamard, type(None)),
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                allowed = " or ".join(k.__name__ for k in kind)
                raise TypeError(
                    f"Quantizer: {name} must be {allowed.replace('NoneType', 'None')}, "
                    f"got {name}={value!r}.{_hint(value, kind)}"
                )
        if self.grid not in GRIDS:
            raise ValueError(
                f"Quantizer: grid must be one of {GRIDS}, got grid={self.grid!r}."
            )

    def _check_block(self) -> None:
        block = self.block
        sizes = block if isinstance(block, tuple) and len(block) == 2 else (block,)
        positive = all(checks.is_integer(size) and size >= 1 for size in sizes)
        if not positive or len(set(sizes)) > 1:
            raise ValueError(
                "Quantizer: block must be an integer B >= 1 or a square (B, B), got "
                f"block={block!r}."
            )
        if self.is_square and self.rotation is not None:
            raise ValueError(
                "Quantizer: rotation must be None with square blocks, got "
                f"rotation={self.rotation}, block={block}. Use block={sizes[0]}."
            )

    @property
    def block_size(self) -> int:
        """Elements of a block along the contraction axis."""
        return self.block[0] if isinstance(self.block, tuple) else self.block

    @property
    def multiple(self) -> int:
        """What the contraction axis is zero-padded to a multiple of."""
        run = 1 if self.rotation is None else self.rotation.size
        return math.lcm(self.block_size, run)

    @property
    def is_square(self) -> bool:
        """Whether blocks are squares over the contraction axis and another."""
        return isinstance(self.block, tuple)

    @property
    def is_stochastic(self) -> bool:
        """Whether elements are rounded with random bits."""
        return isinstance(self.rounding, Stochastic)

    @property
    def holds(self) -> bool:
        """Whether the tensor scale is made of a held amax."""
        return isinstance(self.tensor_scale, Held)

    @property
    def draws(self) -> bool:
        """Whether a key is needed: for rounding bits or for signs of each step."""
        rotates_anew = self.rotation is not None and self.rotation.draws
        return not isinstance(self.rounding, Nearest) or rotates_anew

    @property
    def pads(self) -> bool:
        """Whether g_max is divided by 17/16 when the scale is computed."""
        if self.scale.pad is not None:
            return self.scale.pad
        return self.is_stochastic and self.scale.rounds_mantissa

    @property
    def headroom(self) -> float:
        """What g_max is divided by when the scale is computed."""
        if isinstance(self.rounding, MSEden):
            return self.rounding.headroom
        return OVERSHOOT if self.pads else 1.0


def _hint(value: Any, kinds: tuple[type, ...]) -> str:
    """Returns what to write in place of a value that is nearly of a kind, or ""."""
    if value in kinds:
        return f" Use {value.__name__}()."
    if Scale in kinds and isinstance(value, Format):
        return f" Use Scale({value!r})."
    return ""
