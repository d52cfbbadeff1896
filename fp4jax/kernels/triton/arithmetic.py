"""The arithmetic of a fused quantization on tiles.

A tile is float32 [f, k], k elements along the contraction axis, whole blocks and runs
of them. What is computed is what `fp4jax.numerics` says.
"""

import triton
import triton.language as tl

from fp4jax.numerics import exact, formats, hadamard, scaling

_MAGNITUDE = tl.constexpr(exact.MAGNITUDE)
_EXPONENT = tl.constexpr(exact.EXPONENT)
_E8M0, _F32 = tl.constexpr(formats.E8M0), tl.constexpr(formats.F32)
_TINY_BLOCK = tl.constexpr(scaling.TINY_BLOCK)
_ONE = tl.constexpr(exact.constant_bits(1.0))
_NORMAL = tl.constexpr(2.0**-126)  # and what is larger
_INFINITY, _NAN = tl.constexpr(float("inf")), tl.constexpr(float("nan"))
_bits_of_number = triton.constexpr_function(exact.constant_bits)
_exponent_range = triton.constexpr_function(scaling.exponent_range)
_norm = triton.constexpr_function(hadamard.norm)
_replaces_zero = triton.constexpr_function(scaling.replaces_zero)


@triton.jit
def bits_of(x):
    """Returns the int32 pattern of float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Returns the float32 of an int32 pattern."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Returns the int32 pattern of |x|, also of a NaN; patterns keep the order."""
    return bits_of(x) & _MAGNITUDE


@triton.jit
def rotate(x, signs, SIZE: tl.constexpr):
    """Returns runs of SIZE, and what remains to multiply them by to get x H'.

    The butterflies are those of `hadamard`, in its order. What remains is a power of
    two, so that blocks can be multiplied by it in place of elements.
    """
    x = x * signs
    STAGES: tl.constexpr = SIZE.bit_length() - 1
    for i in tl.static_range(STAGES):
        x = _butterflies(x, 1 << i)
    if STAGES % 2 == 0:
        return x, _norm(SIZE)
    else:
        return x * _norm(SIZE), 1.0


@triton.jit
def _butterflies(x, DISTANCE: tl.constexpr):
    """Returns (a + b, a - b) of all pairs at a distance."""
    F: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (F, K // (2 * DISTANCE), 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (F, K))


@triton.jit
def amax(x, FREE: tl.constexpr, SIZE: tl.constexpr):
    """Returns the largest magnitude of every block of FREE x SIZE; NaN where one is."""
    F: tl.constexpr = x.shape[0] // FREE
    K: tl.constexpr = x.shape[1] // SIZE
    patterns = tl.reshape(magnitude_bits(x), (F, FREE, K, SIZE))
    return float_of(tl.max(tl.max(patterns, 3), 1))


@triton.jit
def spread(of_blocks, FREE: tl.constexpr, SIZE: tl.constexpr):
    """Returns for every element what its block has."""
    F: tl.constexpr = of_blocks.shape[0]
    K: tl.constexpr = of_blocks.shape[1]
    x = tl.broadcast_to(of_blocks[:, None, :, None], (F, FREE, K, SIZE))
    return tl.reshape(x, (F * FREE, K * SIZE))


@triton.jit
def block_scale(amax, QUANTIZER: tl.constexpr, factor, inverse_factor):
    """Returns `scaling.block_scale`; there are no factors where there is one level."""
    FORMAT: tl.constexpr = QUANTIZER.scale.format
    if FORMAT == _E8M0:
        value, inverse = _power_of_two(amax, QUANTIZER)
        if QUANTIZER.scale.prescale is not None:
            inverse = inverse * QUANTIZER.scale.prescale
    elif FORMAT == _F32:
        value = tl.where(amax < _TINY_BLOCK, 0.0, amax * (1 / QUANTIZER.grid.max))
        inverse = _reciprocal_or_zero(value)
    else:
        per_unit = QUANTIZER.headroom / QUANTIZER.grid.max
        if factor is not None:
            per_unit = factor * per_unit
        value = round_nearest(amax * per_unit, FORMAT)
        if _replaces_zero(FORMAT):
            value = tl.where(value == 0.0, 1.0, value)
        if factor is None:
            inverse = _reciprocal_or_zero(value)
        else:
            inverse = _reciprocal_or_zero(value * inverse_factor)
    finite = amax < _INFINITY
    if factor is not None:
        finite &= tl.abs(factor) < _INFINITY
    return tl.where(finite, value, _NAN), tl.where(finite, inverse, _NAN)


@triton.jit
def _reciprocal_or_zero(scale):
    is_normal = scale >= _NORMAL
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(is_normal, scale, one))
    return tl.where(is_normal, inverse, 0.0)


@triton.jit
def _power_of_two(amax, QUANTIZER: tl.constexpr):
    GRID: tl.constexpr = QUANTIZER.grid
    RULE: tl.constexpr = QUANTIZER.scale.rule
    bits = bits_of(amax)
    if RULE == "truncation_free":
        exponent = -((_bits_of_number(GRID.max) - bits) >> 23)
    else:
        if RULE == "even":
            bits += 1 << (22 - GRID.mantissa_bits)
        exponent = (bits >> 23) - 127 - GRID.emax
    RANGE: tl.constexpr = _exponent_range(GRID)
    exponent = tl.minimum(tl.maximum(exponent, RANGE[0]), RANGE[1])
    return float_of((127 + exponent) << 23), float_of((127 - exponent) << 23)


@triton.jit
def round_nearest(t, FORMAT: tl.constexpr):
    """Returns signed members of a format, ties to the even code; zero has no sign.

    A sum with 1.5 2^23 steps is a whole number of steps.
    """
    t = _saturated(t, FORMAT)
    anchor = _anchor(t, FORMAT)
    return (t + anchor) - anchor


@triton.jit
def round_stochastic(t, uniform, FORMAT: tl.constexpr):
    """Returns signed members around t; zero has no sign.

    |result| = ((floor(|t| / step 2^16) + uniform) >> 16) step
    """
    t = _saturated(t, FORMAT)
    anchor = _anchor(t, FORMAT)
    # 2^16 / step, as a product of powers of two is a sum of exponents.
    inverse = float_of(_bits_of_number(1.5 * 2.0**39) - bits_of(anchor) + _ONE)
    steps = ((tl.abs(t) * inverse).to(tl.uint32) + uniform) >> 16
    anchor = float_of(bits_of(anchor) | (bits_of(t) & ~_MAGNITUDE))  # with its sign
    return float_of(bits_of(anchor) + steps.to(tl.int32)) - anchor


@triton.jit
def _saturated(t, FORMAT: tl.constexpr):
    """Returns what is not beyond the format; a NaN gives its largest."""
    return tl.maximum(tl.minimum(t, FORMAT.max), -FORMAT.max)


@triton.jit
def _anchor(t, FORMAT: tl.constexpr):
    """Returns 1.5 2^23 steps of the format around t."""
    LOWEST: tl.constexpr = _bits_of_number(2.0**FORMAT.emin)
    if FORMAT.is_uniform:
        binade = tl.full(t.shape, LOWEST, tl.int32)
    else:
        binade = tl.maximum(bits_of(t) & _EXPONENT, LOWEST)
    PER_STEP: tl.constexpr = _bits_of_number(1.5 * 2.0 ** (23 - FORMAT.mantissa_bits))
    return float_of(binade + (PER_STEP - _ONE))


@triton.jit
def scale_code(x, FORMAT: tl.constexpr):
    """Returns `formats.magnitude_code` of scales."""
    return tl.where(x == x, _magnitude_code(x, FORMAT), FORMAT.nan_code)


@triton.jit
def signed_code(x, GRID: tl.constexpr):
    """Returns `formats.signed_code` of elements, of which zero has no sign."""
    SIGN: tl.constexpr = GRID.magnitude_bits
    sign = (bits_of(x) >> (31 - SIGN)) & (1 << SIGN)
    return sign | _magnitude_code(tl.abs(x), GRID)


@triton.jit
def _magnitude_code(x, FORMAT: tl.constexpr):
    """Returns codes of magnitudes that are members of a format.

    Times a power of two, its lowest binade is that of float32, subnormals included, and
    codes are what begins a pattern.
    """
    unit = tl.full((1, 1), 2.0 ** (-126 - FORMAT.emin), tl.float32)
    return bits_of(x * unit) >> (23 - FORMAT.mantissa_bits)


@triton.jit
def packed(codes):
    """Returns 4-bit codes, two in a byte, the first in its low half."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2))
    first, second = tl.split(pairs)
    return first | (second << 4)
