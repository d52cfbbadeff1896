"""An array that a kernel for matrices quantizes."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.kernels.view import View
from fp4jax.numerics import Quantizer, Stochastic, hadamard, random_bits
from fp4jax.numerics.blockwise import tensor_level
from fp4jax.numerics.rounding import Nearest


@dataclasses.dataclass(frozen=True)
class Scalars:
    """What a kernel reads besides its matrix.

    Attributes:
      noise: uint32 [4], two words of a key, row and column of the first element; None
        where nothing is drawn.
      factor: float32 [2 n], s_enc and then 1 / s_enc of two levels, n of 1, or of each
        row of the matrix; or None.
      signs: of the rotation: numbers, or where they are drawn a float32 array; None
        without a rotation.
      tokens: uint32 [r], whose random bits each row of the matrix gets, or None.
    """

    noise: jax.Array | None = None
    factor: jax.Array | None = None
    signs: Sequence[float] | jax.Array | None = None
    tokens: jax.Array | None = None

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """Those that are arrays, by name."""
        return {k: v for k, v in vars(self).items() if isinstance(v, jax.Array)}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An array and what it is quantized with, as a kernel for matrices reads them.

    Attributes:
      view: the array.
      scalars: what else is read.
      tensor_scale: as of `Quantized`.
      shape_of_scales: of the scales of the array.
    """

    view: View
    scalars: Scalars
    tensor_scale: jax.Array | None
    shape_of_scales: tuple[int, ...]

    @classmethod
    def of(cls, x: jax.Array, way: Way, inputs: Inputs) -> "Prepared":
        """Returns that of a call of `reference.quantize`.

        Where there is a tensor scale, of an amax that is given.
        """
        view, quantizer, site = View.of(x, way.axis), way.quantizer, way.site
        key, tokens, rotation = inputs.key, inputs.tokens, quantizer.rotation
        if tokens is not None:  # then it does not matter in which matrix a row stands
            tokens, rows = tokens.reshape(-1), view.matrix.shape[0]
            view = dataclasses.replace(view, period=rows)
        signs = noise = None
        if rotation is not None:
            signs = hadamard.signs_of(rotation, key, site.signs_stream)
        factor, tensor_scale = tensor_level(quantizer, inputs.amax)
        if factor is not None and tensor_scale is not None:
            factor = _of_rows(jnp.stack([factor, tensor_scale]), view.matrix.shape[0])
            tensor_scale = by_entry(tensor_scale, x.ndim)
        if quantizer.is_stochastic:
            assert key is not None
            noise = random_bits.place(key, site.rounding_stream, inputs.start)
        shape_of_scales = tuple(
            n // quantizer.block_size if i in way.axes else n
            for i, n in enumerate(x.shape)
        )
        scalars = Scalars(noise, factor, signs, tokens)
        return cls(view, scalars, tensor_scale, shape_of_scales)

    def quantized(self, matrices: dict[Output, jax.Array]) -> Quantized:
        """Returns the result, given the outputs of the kernel."""
        arrays = {
            output: matrix.reshape(
                self.shape_of_scales
                if output == Output.SCALES
                else self.view.shape_of(matrix)
            )
            for output, matrix in matrices.items()
        }
        signs = self.scalars.signs
        signs = None if signs is None else jnp.asarray(signs, jnp.float32)
        return Quantized(arrays, self.tensor_scale, signs)


def _of_rows(numbers: jax.Array, rows: int) -> jax.Array:
    """Returns numbers [2], or [2, t] of parts of a matrix for each row, as a vector."""
    if numbers.ndim > 1:
        each = rows // numbers.shape[1]
        numbers = lax.broadcast_in_dim(numbers, (*numbers.shape, each), (0, 1))
    return numbers.reshape(-1)


def by_entry(of_entries: jax.Array | None, ndim: int) -> jax.Array | None:
    """Returns what is of entries [t] of an array's first axis as [t, 1, ...]."""
    if of_entries is None or of_entries.ndim == 0:
        return of_entries
    return lax.expand_dims(of_entries, range(1, ndim))


def unsupported(x: jax.Array, quantizer: Quantizer) -> str | None:
    """Returns what of a call no kernel can do, or None."""
    rounding = quantizer.rounding
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x must be float32 or bfloat16, got {x.dtype}"
    if quantizer.scale.candidates or not isinstance(rounding, Nearest | Stochastic):
        return f"scales must be of one candidate, and rounding not {rounding}"
    return None


def unsupported_axes(x: jax.Array, way: Way) -> str | None:
    """Returns why squares do not lie in matrices, or None."""
    if {*way.axes} != {x.ndim - 2, x.ndim - 1}:
        axes = f"{way.axis}, {way.other}"
        return f"square blocks must lie along the last two axes, got {axes}"
    return None
