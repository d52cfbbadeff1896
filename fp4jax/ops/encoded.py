"""The GEMMs of square blocks under powers of two, each array encoded once for FP8.

A square has one scale, whichever axis a GEMM contracts. Kernels write the E4M3 codes of
a matrix and those of its transpose from one read, so that tensor cores find both GEMMs
of x, of w and of dy contiguous along what they contract:

    y = x w,  dx = dy w^T,  dw = x^T dy:   a b^T of [m, k], [n, k] each

For the backward pass the codes of x and of w are kept, a byte an element, beside the
arrays themselves, which a GEMM reads whose operands do not fit.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import fp8 as kernels
from fp4jax.kernels.choice import KERNELS, chosen
from fp4jax.kernels.quantize.backends import MOSAIC, XLA, Mosaic
from fp4jax.numerics import Quantizer, Site, exact, random_bits, scaling
from fp4jax.ops import fp8
from fp4jax.ops.fp8 import Scaled
from fp4jax.ops.gemms import Amaxes, Gemms
from fp4jax.ops.noise import Noise
from fp4jax.recipes import Recipe

# The largest scale is brought to the top of E4M3 by a float32 power of two.
_LOWEST_TOP = -115


class Encoded(NamedTuple):
    """A matrix for both of its GEMMs.

    Attributes:
      array: as it came, for a GEMM whose operands do not fit.
      rows: [r, c] in E4M3, an exponent for each row; None where it was used.
      columns: its transpose [c, r], an exponent for each column; likewise.
    """

    array: jax.Array
    rows: Scaled | None
    columns: Scaled | None


def encode(
    backend: Mosaic,
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    site: Site,
    noise: Noise,
) -> Encoded:
    """Quantizes a matrix in square blocks.

    Args:
      backend: the kernels.
      x: float32 or bfloat16 [r, c].
      quantizer: of square blocks under powers of two.
      axis: the contraction axis, for quantizers that draw.
      site: whose stream of the key they draw from.
      noise: of the call.
    """
    side, grid = quantizer.block_size, quantizer.grid
    amax = kernels.amax(backend, x, side)
    scale, _ = scaling.block_scale(amax, quantizer.scale, grid)
    is_zero, exponent = amax == 0, (exact.bits_of(scale) >> 23) - 127
    tops, fits = [], []
    for along in (1, 0):
        top = jnp.max(jnp.where(is_zero, fp8.LOWEST, exponent), along, keepdims=True)
        top = jnp.maximum(top, _LOWEST_TOP)
        inside = is_zero | (top - exponent <= fp8.window(grid))
        tops.append(top)
        fits.append(jnp.all(inside & jnp.isfinite(scale)))
    shift = fp8.shift(grid)
    powers = [jnp.broadcast_to(exact.pow2(shift - t), scale.shape) for t in tops]
    drawn = None
    if quantizer.is_stochastic:
        assert noise.key is not None
        drawn = random_bits.place(noise.key, site.rounding_stream, noise.start(site))
    rows, columns = kernels.encode(
        backend, x, quantizer, jnp.stack(powers), axis=axis, noise=drawn
    )
    of_rows, of_columns = (jnp.repeat(t.reshape(-1, 1) - shift, side, 0) for t in tops)
    return Encoded(
        x, Scaled(rows, of_rows, fits[0]), Scaled(columns, of_columns, fits[1])
    )


@dataclasses.dataclass(frozen=True)
class EncodedGemms(Gemms):
    """The three GEMMs of matrices [m, k] and [k, n].

    Attributes:
      backend: the kernels that encode, in both passes.
    """

    backend: Mosaic = MOSAIC

    def prepared(self, lhs: Any, rhs: Any, noise: Noise) -> tuple[Any, Any]:
        """Returns both operands, encoded."""
        of_lhs, of_rhs = _fprop_sites(self)
        lhs = self._encode(lhs.reshape(-1, lhs.shape[-1]), of_lhs, 1, noise)
        return lhs, self._encode(rhs.reshape(rhs.shape[0], -1), of_rhs, 0, noise)

    def saved(self, operands: Any, prepared: tuple[Encoded, Encoded]):
        """Returns what the backward pass reads of what was prepared."""
        del operands
        lhs, rhs = prepared
        return lhs._replace(rows=None), rhs._replace(columns=None)

    def forward(self, lhs: Any, rhs: Any, noise: Noise, amaxes: Amaxes) -> jax.Array:
        """Returns y of two encoded operands."""
        a, b = lhs.rows, rhs.columns
        assert a is not None and b is not None
        y = lax.cond(
            a.fits & b.fits,
            lambda: fp8.contract(a, b, self.dtype),
            lambda: self._emulated(lhs, rhs, "forward", noise, amaxes),
        )
        return y.reshape(*self.lhs.shape[:-1], *self.rhs.shape[1:])

    def backward(
        self, lhs: Any, rhs: Any, g: Any, noise: Noise, amaxes: Amaxes
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents, of encoded operands."""
        g = g.reshape(lhs.array.shape[0], rhs.array.shape[1])
        dy = self._encode(g, Site.DGRAD_DY, 1 if self.weight == "rhs" else 0, noise)
        of_dlhs: tuple[Any, Any] = dy.rows, rhs.rows
        of_drhs: tuple[Any, Any] = lhs.columns, dy.columns

        def in_fp8() -> tuple[jax.Array, jax.Array]:
            return (
                fp8.contract(*of_dlhs, self.lhs.dtype),
                fp8.contract(*of_drhs, self.rhs.dtype),
            )

        # A condition takes as long as a small GEMM: one for both.
        dlhs, drhs = lax.cond(
            functools.reduce(jnp.logical_and, (x.fits for x in of_dlhs + of_drhs)),
            in_fp8,
            lambda: self._emulated(lhs, rhs, "backward", g, noise, amaxes),
        )
        return dlhs.reshape(self.lhs.shape), drhs.reshape(self.rhs.shape)

    def _encode(self, x: jax.Array, site: Site, axis: int, noise: Noise) -> Encoded:
        quantizer = self.recipe.sites[site]
        assert quantizer is not None
        how: dict[str, Any] = {"axis": axis, "site": site, "noise": noise}
        return encode(self.backend, x, quantizer, **how)

    def _emulated(self, lhs: Encoded, rhs: Encoded, method: str, *args: Any) -> Any:
        """Calls a method of the GEMMs of the same matrices in bfloat16.

        What hardly ever runs is quantized by XLA, of which programs are made sooner.
        """
        fields = _fields(self)
        fields["recipe"] = dataclasses.replace(self.recipe, compute="bf16")
        fields |= {"lhs": jax.typeof(lhs.array), "rhs": jax.typeof(rhs.array)}
        with KERNELS(dataclasses.replace(chosen(), quantize=XLA)):
            return getattr(Gemms(**fields), method)(lhs.array, rhs.array, *args)


def where_it_can(gemms: Gemms) -> Gemms:
    """Returns the same GEMMs, of encoded operands if kernels make them here.

    Under `jax.vmap` both ways to multiply run, and what does not fit decides lane by
    lane which of them counts.
    """
    backend = kernels.encoder()
    if backend is None or not _can(gemms, backend):
        return gemms
    return EncodedGemms(**_fields(gemms), backend=backend)


def _fields(gemms: Gemms) -> dict[str, Any]:
    return {f.name: getattr(gemms, f.name) for f in dataclasses.fields(Gemms)}


def _can(gemms: Gemms, backend: Mosaic) -> bool:
    recipe, sites = gemms.recipe, gemms.recipe.sites
    if recipe.compute != "fp8" or not _quantizes_once(recipe):
        return False
    if gemms.batch or gemms.gather or gemms.out_sharding or gemms.precision:
        return False
    m, k = math.prod(gemms.lhs.shape[:-1]), gemms.lhs.shape[-1]
    n = math.prod(gemms.rhs.shape[1:])
    of_lhs, of_rhs = _fprop_sites(gemms)
    matrices = (
        (of_lhs, (m, k), gemms.lhs.dtype),
        (of_rhs, (k, n), gemms.rhs.dtype),
        (Site.DGRAD_DY, (m, n), gemms.dtype),
    )
    return all(
        kernels.supports(backend, jax.ShapeDtypeStruct(shape, dtype), quantizer)
        for site, shape, dtype in matrices
        if (quantizer := sites[site]) is not None
    )


def _fprop_sites(gemms: Gemms) -> tuple[Site, Site]:
    """Returns the sites of lhs and rhs in the forward pass."""
    x, w = Site.FPROP_X, Site.FPROP_W
    return (x, w) if gemms.weight == "rhs" else (w, x)


def _quantizes_once(recipe: Recipe) -> bool:
    """Returns whether both GEMMs of each array take it as one and the same squares."""
    sites = recipe.sites
    if not recipe.share_dy or recipe.residuals == "packed":
        return False
    if any(q is None or not q.is_square or not fp8.takes(q) for q in sites.values()):
        return False
    fixed = Site.FPROP_X, Site.FPROP_W, Site.WGRAD_X, Site.DGRAD_W
    return (
        not recipe.draws(*fixed)
        and sites[Site.FPROP_X] == sites[Site.WGRAD_X]
        and sites[Site.FPROP_W] == sites[Site.DGRAD_W]
        and all(q.scale.prescale is None for q in sites.values() if q is not None)
    )
