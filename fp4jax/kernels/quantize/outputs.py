"""What a fused quantization writes."""

import dataclasses
import enum

import jax


class Output(enum.StrEnum):
    """An array made of a quantized one.

    Attributes:
      OPERAND: values scale, in bfloat16: the input of a GEMM.
      CODES: uint8 codes of the elements, of 4-bit grids two a byte along the axis.
      SCALES: of each block: uint8 codes, or float32 scales of `F32`.
    """

    OPERAND = "operand"
    CODES = "codes"
    SCALES = "scales"


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized array, as far as it was asked for.

    Attributes:
      arrays: one for each output; the contraction axis is padded to whole runs.
      tensor_scale: float32 [] that multiplies every scale, or None.
      signs: float32 signs of the rotation, or None.
    """

    arrays: dict[Output, jax.Array]
    tensor_scale: jax.Array | None
    signs: jax.Array | None
