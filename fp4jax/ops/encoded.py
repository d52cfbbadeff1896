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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import fp8 as kernels
from fp4jax.kernels.choice import KERNELS, chosen
from fp4jax.kernels.quantize.backends import MOSAIC, XLA, Mosaic
from fp4jax.numerics import Quantizer, Site, exact, random_bits
from fp4jax.ops import fp8
from fp4jax.ops.fp8 import Scaled
from fp4jax.ops.gemms import Amaxes, Gemms
from fp4jax.ops.levels import Levels, balance, levels
from fp4jax.ops.noise import Noise
from fp4jax.recipes import Recipe


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
    found: Levels,
    powers: Sequence[jax.Array | None] = (None, None),
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
      found: its levels.
      powers: exponents of what rows and columns of blocks are multiplied by, int32
        [r, 1] and [1, c]; None: what brings the largest to the top.
      axis: the contraction axis, for quantizers that draw.
      site: whose stream of the key they draw from.
      noise: of the call.
    """
    grid, side = quantizer.grid, quantizer.block_size
    of_rows, of_columns = (
        fp8.shift(grid) - found.top(along) if power is None else power
        for along, power in zip((1, 0), powers, strict=True)
    )
    drawn = None
    if quantizer.is_stochastic:
        assert noise.key is not None
        drawn = random_bits.place(noise.key, site.rounding_stream, noise.start(site))
    shape = found.exponent.shape
    multipliers = [
        jnp.broadcast_to(exact.pow2(power), shape) for power in (of_rows, of_columns)
    ]
    rows, columns = kernels.encode(
        backend, x, quantizer, jnp.stack(multipliers), axis=axis, noise=drawn
    )

    def scaled(array: jax.Array, power: jax.Array, along: int) -> Scaled:
        exponent = jnp.repeat(-power.reshape(-1, 1), side, 0)
        return Scaled(array, exponent, found.fit(along, grid))

    return Encoded(x, scaled(rows, of_rows, 1), scaled(columns, of_columns, 0))


@dataclasses.dataclass(frozen=True)
class EncodedGemms(Gemms):
    """The three GEMMs of matrices [m, k] and [k, n].

    Attributes:
      backend: the kernels that encode, in both passes.
    """

    backend: Mosaic = MOSAIC

    def prepared(self, lhs: Any, rhs: Any, noise: Noise) -> tuple[Any, Any]:
        """Returns both operands, encoded: so that powers of two cancel, if they can."""
        arrays = lhs.reshape(-1, lhs.shape[-1]), rhs.reshape(rhs.shape[0], -1)
        sites = _fprop_sites(self)
        a, b = (self._levels(x, site) for x, site in zip(arrays, sites, strict=True))
        power, cancels = balance(a, b, [self._quantizer(site).grid for site in sites])
        of_rows, of_columns = (
            jnp.where(cancels, each, fp8.shift(self._quantizer(site).grid) - top)
            for each, site, top in zip(
                (power, -power), sites, (a.top(1), b.top(0)), strict=True
            )
        )
        lhs, rhs = arrays
        return (
            self._encode(lhs, sites[0], 1, noise, a, (of_rows, None)),
            self._encode(rhs, sites[1], 0, noise, b, (None, of_columns)),
        )

    def saved(self, operands: Any, prepared: tuple[Encoded, Encoded]):
        """Returns what the backward pass reads of what was prepared."""
        del operands
        lhs, rhs = prepared
        return lhs._replace(rows=None), rhs._replace(columns=None)

    def forward(self, lhs: Any, rhs: Any, noise: Noise, amaxes: Amaxes) -> jax.Array:
        """Returns y of two encoded operands."""
        a, b = lhs.rows, rhs.columns
        assert a is not None and b is not None
        y = lax.switch(
            jnp.where(a.fits & b.fits, 1 - fp8.cancel(a, b).astype(jnp.int32), 2),
            (
                lambda: fp8.multiply(a, b, self.dtype),
                lambda: fp8.contract(a, b, self.dtype),
                lambda: self._emulated(lhs, rhs, "forward", noise, amaxes),
            ),
        )
        return y.reshape(*self.lhs.shape[:-1], *self.rhs.shape[1:])

    def backward(
        self, lhs: Any, rhs: Any, g: Any, noise: Noise, amaxes: Amaxes
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents, of encoded operands."""
        g = g.reshape(lhs.array.shape[0], rhs.array.shape[1])
        axis = 1 if self.weight == "rhs" else 0
        found = self._levels(g, Site.DGRAD_DY)
        dy = self._encode(g, Site.DGRAD_DY, axis, noise, found)
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

    def _quantizer(self, site: Site) -> Quantizer:
        quantizer = self.recipe.sites[site]
        assert quantizer is not None
        return quantizer

    def _levels(self, x: jax.Array, site: Site) -> Levels:
        return levels(self.backend, x, self._quantizer(site))

    def _encode(
        self, x: jax.Array, site: Site, axis: int, noise: Noise, *of: Any
    ) -> Encoded:
        how: dict[str, Any] = {"axis": axis, "site": site, "noise": noise}
        return encode(self.backend, x, self._quantizer(site), *of, **how)

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
