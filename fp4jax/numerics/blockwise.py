"""Quantization of an array in blocks: the one algorithm behind every recipe."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import (
    arguments,
    blocks,
    candidates,
    eden,
    exact,
    formats,
    hadamard,
    packing,
    random_bits,
    rounding,
    scaling,
    spread,
)
from fp4jax.numerics.formats import Format
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.rounding import MSEden, Nearest
from fp4jax.numerics.sites import Site


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A quantized array, split into blocks.

    Attributes:
      values: float32 members of the grid, axes split by `tiling`.
      scale: float32 members of the scale's format, 1 on the axes inside a block.
      tensor_scale: float32 that multiplies every scale, or None: a scalar, or of groups
        [t, 1, ...], broadcastable to the array.
      signs: float32 signs of the rotation, or None.
      tiling: how the axes were split.
      axis: the contraction axis.
    """

    values: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    signs: jax.Array | None
    tiling: blocks.Tiling
    axis: int

    def operand(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns values scale, joined: the input of the GEMM, no tensor scale yet."""
        return self.tiling.join(exact.cast(self.values * self.scale, dtype))

    def codes(self, grid: Format) -> jax.Array:
        """Returns uint8 codes, joined; of 4-bit grids two a byte along the axis."""
        codes = formats.encode(self.tiling.join(self.values), grid)
        if not packing.fits_half_a_byte(grid):
            return codes
        return packing.pack(
            blocks.pad_to_multiple(codes, {self.axis: 2}), axis=self.axis
        )

    def scales(self, fmt: Format) -> jax.Array:
        """Returns one scale for each block: uint8 codes, or float32 of `F32`."""
        scales = lax.squeeze(self.scale, self.tiling.inside)
        return scales if fmt == formats.F32 else formats.encode_magnitude(scales, fmt)

    def dequantized(self) -> jax.Array:
        """Returns float32 values like those of the array, still padded."""
        x = self.operand(jnp.float32)
        # A rounded product that enters a sum may be contracted with it: this one waits.
        if self.signs is not None:
            x = hadamard.rotate_back(x, self.signs, self.axis)
        return x if self.tensor_scale is None else x * self.tensor_scale


def quantize_blocks(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    start: tuple[jax.Array, jax.Array] | None = None,
    tokens: jax.Array | None = None,
    groups: Groups | None = None,
    site: Site = Site.FPROP_X,
) -> Blocks:
    """Rotates, scales and rounds `x` in blocks along `axis`; see `quantize`.

    Where `x` is a part of an array, `start` says at which row and column of it, and `x`
    gets the random bits that it has there; it begins with a block. Where `x` is
    [t, a, f] with tokens from anywhere along its first two axes, `tokens`, uint32
    [t, a], says which. Entries of the first axis in one of `groups` share a tensor
    scale, and `amax` is then of shape [groups].
    """
    arguments.check(x, quantizer, key=key, amax=amax, groups=groups)
    axis, other = arguments.checked_axes(x, quantizer, axis=axis, other=other)
    padded = _padded_shape(x.shape, quantizer, axis)
    tiling = _tiling(padded, quantizer, axis=axis, other=other)
    with spread.explaining(x, dict.fromkeys(tiling.sizes, quantizer.multiple)):
        arrays = fp4_quantize(
            x,
            key,
            amax,
            start,
            tokens,
            groups,
            quantizer=quantizer,
            axis=axis,
            other=other,
            site=site,
        )
    return Blocks(*arrays, tiling=tiling, axis=axis)


# A call of its own, by which traced programs and profiles show every quantization.
@functools.partial(jax.jit, static_argnames=("quantizer", "axis", "other", "site"))
def fp4_quantize(
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None,
    start: tuple[jax.Array, jax.Array] | None,
    tokens: jax.Array | None = None,
    groups: Groups | None = None,
    *,
    quantizer: Quantizer,
    axis: int,
    other: int | None,
    site: Site,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the arrays of `Blocks`."""
    x, signs = _padded_and_rotated(
        lax.stop_gradient(x), quantizer, axis=axis, key=key, site=site
    )
    tiling = _tiling(x.shape, quantizer, axis=axis, other=other)
    x = tiling.split(x.astype(jnp.float32))
    block_amax = blocks.amax(x, tiling.inside)
    factor, tensor_amax, tensor_scale = _tensor_level(
        block_amax, amax, quantizer, groups
    )
    if tensor_scale is not None and tensor_scale.ndim:
        tensor_scale = lax.squeeze(tensor_scale, tiling.inside)
    if quantizer.scale.candidates is not None:
        assert factor is not None and tensor_amax is not None
        values, scale = _best_candidate(
            x, block_amax, quantizer, tiling=tiling, factor=factor, amax=tensor_amax
        )
        return values, scale, tensor_scale, signs
    scale, inverse = scaling.block_scale(
        block_amax,
        quantizer.scale,
        quantizer.grid,
        headroom=quantizer.headroom,
        factor=factor,
    )
    t = x * inverse
    if isinstance(quantizer.rounding, Nearest):
        return rounding.to_grid(t, quantizer.grid), scale, tensor_scale, signs
    assert key is not None
    words = random_bits.key_words(key, site.rounding_stream)
    if quantizer.is_stochastic:
        positions = blocks.positions(tiling, axis, start, tokens)
        bits = random_bits.uniform16(words, *positions)
        values = rounding.to_grid(t, quantizer.grid, tiling.split(bits))
        return values, scale, tensor_scale, signs
    values = rounding.to_grid(t, quantizer.grid)
    of_blocks = _block_positions(scale.shape, quantizer, axis, start, tokens)
    bits = random_bits.uniform16(words, *of_blocks)
    scale = eden.corrected_scales(scale, t, values, quantizer, axis=axis, bits=bits)
    return values, scale, tensor_scale, signs


def _tiling(
    shape: tuple[int, ...], quantizer: Quantizer, *, axis: int, other: int | None
) -> blocks.Tiling:
    axes = (axis,) if other is None else (axis, other)
    return blocks.Tiling(shape, dict.fromkeys(axes, quantizer.block_size))


def _padded_shape(shape: tuple[int, ...], quantizer: Quantizer, axis: int):
    """Returns the shape with whole blocks and rotation runs along the contraction."""
    multiple = quantizer.multiple
    return tuple(n + -n % multiple if i == axis else n for i, n in enumerate(shape))


def _padded_and_rotated(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    key: jax.Array | None,
    site: Site,
) -> tuple[jax.Array, jax.Array | None]:
    """Pads the array to whole blocks, and rotates it if so asked; returns the signs."""
    padded = _padded_shape(x.shape, quantizer, axis)
    x = blocks.pad_to_multiple(x, {axis: max(padded[axis], 1)})
    if quantizer.rotation is None:
        return x, None
    signs = hadamard.sign_vector(quantizer.rotation, key, site.signs_stream)
    return hadamard.rotate(x, signs, axis), signs


def _block_positions(
    shape: tuple[int, ...],
    quantizer: Quantizer,
    axis: int,
    start: tuple[jax.Array, jax.Array] | None,
    tokens: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns row and column of the blocks of an array in which blocks are counted."""
    size = quantizer.block_size
    if start is not None:
        start = start[0], start[1] // size
    if tokens is not None and axis == 1:
        tokens = tokens[:, ::size]  # where a block begins: of no other block
    return blocks.positions(blocks.Tiling(shape, {}), axis, start, tokens)


def _tensor_level(
    block_amax: jax.Array,
    amax: jax.Array | None,
    quantizer: Quantizer,
    groups: Groups | None,
):
    """Returns s_enc, the amax that it is made of, and what multiplies every scale.

    They are scalars, or of groups [t, 1, ...], one entry for each of the first axis.
    """
    if quantizer.tensor_scale is None:
        amax = None
    else:
        if amax is None:
            amax = (blocks if groups is None else groups).amax(block_amax)
        amax = jnp.asarray(amax, jnp.float32)
        if groups is not None:
            amax = groups.spread(amax, block_amax.ndim)
    factor, tensor_scale = tensor_level(quantizer, amax)
    return factor, amax, tensor_scale


def tensor_level(
    quantizer: Quantizer, amax: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns s_enc, and what multiplies every scale: 1 / s_enc, or 1 / prescale.

    Args:
      quantizer: of one or two levels; of one, s_enc is None.
      amax: float32, of what has a tensor scale in common; None where nothing has.
    """
    if quantizer.tensor_scale is None:
        prescale = quantizer.scale.prescale
        return None, None if prescale is None else jnp.float32(1 / prescale)
    assert amax is not None
    # A padded scale leaves the tensor's level alone; MS-EDEN's headroom is of both.
    g_max = quantizer.grid.max
    if isinstance(quantizer.rounding, MSEden):
        g_max = g_max / quantizer.rounding.headroom
    factor = scaling.tensor_factor(amax, quantizer.tensor_scale, g_max)
    return factor, exact.reciprocal(factor)


def _best_candidate(
    x: jax.Array,
    block_amax: jax.Array,
    quantizer: Quantizer,
    *,
    tiling: blocks.Tiling,
    factor: jax.Array,
    amax: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and scales of the least error among the candidates."""
    grid, choices = quantizer.grid, []
    assert quantizer.tensor_scale is not None
    for candidate in quantizer.scale.candidates or ():
        scale, inverse = scaling.candidate_scale(
            block_amax, quantizer.scale, grid, candidate, factor
        )
        choices.append((rounding.to_grid(x * inverse, grid), scale))
    return candidates.best(
        x,
        choices,
        amax=amax,
        denominator=grid.max * quantizer.tensor_scale.target,
        inside=tiling.inside,
    )
