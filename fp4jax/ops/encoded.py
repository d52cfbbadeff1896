"""The GEMMs of square blocks under powers of two, each array encoded once for FP8.

A square has one scale, whichever axis a GEMM contracts. Kernels write the E4M3 codes of
a matrix and those of its transpose from one read, so that tensor cores find both GEMMs
of x, of w and of dy contiguous along what they contract:

    y = x w,  dx = dy w^T,  dw = x^T dy:   a b^T of [m, k], [n, k] each

For the backward pass the codes of x and of w are kept, a byte an element, beside the
arrays themselves, which a GEMM reads whose operands do not fit. A w that is packed, or
comes together from several devices as codes of 4 bits, is kept as that.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import fp8 as kernels
from fp4jax.kernels.choice import KERNELS, chosen
from fp4jax.kernels.partition import is_whole
from fp4jax.kernels.quantize.backends import MOSAIC, XLA, Mosaic
from fp4jax.numerics import Site, random_bits
from fp4jax.ops import fp8, squares
from fp4jax.ops.fp8 import Scaled
from fp4jax.ops.gemms import NO_AMAXES, Amaxes, Gemms
from fp4jax.ops.levels import balance
from fp4jax.ops.noise import Noise
from fp4jax.ops.operands import STORED
from fp4jax.ops.residuals import PackedOperand, PackedWeight, unpack_operand
from fp4jax.ops.squares import Squares, encode
from fp4jax.recipes import Recipe

T = TypeVar("T")


class Encoded(NamedTuple):
    """A matrix for both of its GEMMs.

    Attributes:
      array: as it came, for a GEMM whose operands do not fit.
      rows: [r, c] in E4M3, an exponent for each row; None where it was used.
      columns: its transpose [c, r], an exponent for each column; likewise.
    """

    array: jax.Array | PackedOperand
    rows: Scaled | None
    columns: Scaled | None


@dataclasses.dataclass(frozen=True)
class EncodedGemms(Gemms):
    """The three GEMMs of matrices [m, k] and [k, n].

    Attributes:
      backend: the kernels that encode, in both passes.
    """

    backend: Mosaic = MOSAIC

    def prepared(self, lhs: Any, rhs: Any, noise: Noise) -> tuple[Any, Any]:
        """Returns both operands, encoded: so that powers of two cancel, if they can."""
        arrays = lhs.reshape(-1, lhs.shape[-1]), _matrix(rhs)
        sites = _fprop_sites(self)
        pair = [
            self._squares(x, site, axis, noise)
            for x, site, axis in zip(arrays, sites, (1, 0), strict=True)
        ]
        grids = [each.quantizer.grid for each in pair]
        a, b = (each.levels() for each in pair)
        power, cancels = balance(a, b, grids)
        of_rows, of_columns = (
            jnp.where(cancels, each, fp8.shift(grid) - top)
            for each, grid, top in zip(
                (power, -power), grids, (a.top(1), b.top(0)), strict=True
            )
        )
        of_lhs = encode(pair[0], a, powers=(of_rows, None))
        of_rhs = encode(pair[1], b, powers=(None, of_columns))
        return Encoded(arrays[0], *of_lhs), Encoded(arrays[1], *of_rhs)

    def saved(self, operands: Any, prepared: tuple[Encoded, Encoded]):
        """Returns what the backward pass reads of what was prepared."""
        lhs, rhs = prepared
        lhs = lhs._replace(rows=None)
        if self._has_codes(rhs.array):  # of which the others are made anew
            return lhs, Encoded(_matrix(operands[1]), None, None)
        return lhs, rhs._replace(columns=None)

    def forward(self, lhs: Any, rhs: Any, noise: Noise, amaxes: Amaxes) -> jax.Array:
        """Returns y of two encoded operands."""
        a, b = lhs.rows, rhs.columns
        assert a is not None and b is not None
        sums = self._sums(self.dtype)
        y = lax.switch(
            jnp.where(a.fits & b.fits, 1 - fp8.cancel(a, b).astype(jnp.int32), 2),
            (
                lambda: fp8.multiply(a, b, sums).astype(self.dtype),
                lambda: fp8.contract(a, b, sums).astype(self.dtype),
                lambda: self._emulated(lhs, rhs, Gemms.forward, noise, amaxes),
            ),
        )
        return y.reshape(*self.lhs.shape[:-1], *self.rhs.shape[1:])

    def backward(
        self, lhs: Any, rhs: Any, g: Any, noise: Noise, amaxes: Amaxes
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents, of encoded operands."""
        g = g.reshape(lhs.array.shape[0], -1)
        axis = 1 if self.weight == "rhs" else 0
        dy = self._encoded(g, Site.DGRAD_DY, axis, noise)
        w_rows = rhs.rows
        if w_rows is None:
            w_rows = self._encoded(rhs.array, Site.DGRAD_W, 1, noise).rows
        of_dlhs: tuple[Any, Any] = dy.rows, w_rows
        of_drhs: tuple[Any, Any] = lhs.columns, dy.columns

        def of_type(pair: tuple[Any, Any], dtype: Any) -> jax.Array:
            return fp8.contract(*pair, self._sums(dtype)).astype(dtype)

        def in_fp8() -> tuple[jax.Array, jax.Array]:
            return of_type(of_dlhs, self.lhs.dtype), of_type(of_drhs, self.rhs.dtype)

        # A condition takes as long as a small GEMM: one for both.
        dlhs, drhs = lax.cond(
            functools.reduce(jnp.logical_and, (x.fits for x in of_dlhs + of_drhs)),
            in_fp8,
            lambda: self._emulated(lhs, rhs, Gemms.backward, g, noise, amaxes),
        )
        dlhs, drhs = dlhs.reshape(self.lhs.shape), drhs.reshape(self.rhs.shape)
        return dlhs, drhs if self.gather is None else self.gather.store(drhs)

    def _has_codes(self, x: jax.Array | PackedOperand) -> bool:
        """Returns whether of a w, rhs, others than kernels make codes."""
        return isinstance(x, PackedOperand) or self.gather is not None

    def _squares(self, x: Any, site: Site, axis: int, noise: Noise) -> Squares:
        """Returns a matrix in square blocks."""
        quantizer, drawn = self.recipe.sites[site], None
        assert quantizer is not None
        if site.is_w and self._has_codes(x):
            is_packed = isinstance(x, PackedOperand)
            w = (
                unpack_operand(x)
                if is_packed
                else self._fprop_operand(x, "rhs", noise, NO_AMAXES, STORED)
            )
            return squares.OfCodes(self._gathered(w).decoded(), quantizer)
        if quantizer.is_stochastic:
            assert noise.key is not None
            drawn = random_bits.place(
                noise.key, site.rounding_stream, noise.start(site)
            )
        return squares.OfArray(self.backend, x, quantizer, axis, drawn)

    def _encoded(self, x: Any, site: Site, axis: int, noise: Noise) -> Encoded:
        found = self._squares(x, site, axis, noise)
        return Encoded(x, *encode(found, found.levels()))

    def _sums(self, dtype: Any) -> Any:
        """Returns what sums are in: float32 where devices may add theirs."""
        mesh = jax.sharding.get_abstract_mesh()
        return dtype if is_whole(mesh) else jnp.float32

    def _emulated(
        self, lhs: Encoded, rhs: Encoded, method: Callable[..., T], *args: Any
    ) -> T:
        """Calls a method of the GEMMs of the same matrices in bfloat16.

        What hardly ever runs is quantized by XLA, of which programs are made sooner.
        """
        fields = _fields(self)
        fields["recipe"] = dataclasses.replace(self.recipe, compute="bf16")
        for name, x in (("lhs", lhs.array), ("rhs", rhs.array)):
            if not isinstance(x, PackedOperand):
                fields[name] = jax.typeof(x)
        with KERNELS(dataclasses.replace(chosen(), quantize=XLA)):
            return method(Gemms(**fields), lhs.array, rhs.array, *args)


def where_it_can(gemms: Gemms, packed_w: PackedWeight | None = None) -> Gemms:
    """Returns the same GEMMs, of encoded operands if kernels make them here.

    Under `jax.vmap` both ways to multiply run, and what does not fit decides lane by
    lane which of them counts.
    """
    backend = kernels.encoder()
    if backend is None or not _can(gemms, backend):
        return gemms
    if packed_w is not None and len(gemms.rhs.shape) != 2:
        return gemms
    return EncodedGemms(**_fields(gemms), backend=backend)


def _fields(gemms: Gemms) -> dict[str, Any]:
    return {f.name: getattr(gemms, f.name) for f in dataclasses.fields(Gemms)}


def _matrix(rhs: Any) -> Any:
    """Returns rhs as a matrix; what is packed is one."""
    return rhs if isinstance(rhs, PackedOperand) else rhs.reshape(rhs.shape[0], -1)


def _can(gemms: Gemms, backend: Mosaic) -> bool:
    recipe, sites = gemms.recipe, gemms.recipe.sites
    if recipe.compute != "fp8" or not _quantizes_once(recipe):
        return False
    if gemms.batch or gemms.out_sharding or gemms.precision:
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
