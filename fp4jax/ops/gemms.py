"""The three GEMMs of a linear layer, on canonical operands."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fp4jax.kernels.quantize import Output
from fp4jax.kernels.sums import float32_sums, in_turn
from fp4jax.numerics import Quantizer, Site, blocks
from fp4jax.numerics.groups import Groups
from fp4jax.ops import fp8, native, packed
from fp4jax.ops.dims import flatten
from fp4jax.ops.gather import Gather
from fp4jax.ops.noise import Noise
from fp4jax.ops.operands import (
    MULTIPLIED,
    STORED,
    Asked,
    Operand,
    make_both,
    make_operand,
    transposed,
)
from fp4jax.ops.residuals import PackedOperand, pack_operand, unpack_operand
from fp4jax.recipes import Recipe

Position = Literal["lhs", "rhs"]
Input = jax.Array | PackedOperand
Outputs = tuple[Output, ...] | None  # None: those that the product of a site reads
# Of x, w and dy; None where an amax is not held.
Amaxes = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
NO_AMAXES: Amaxes = (None, None, None)

# What operands are in where no tensor cores take their codes.
COMPUTE = {
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "fp8": jnp.bfloat16,
    "native": jnp.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Gemms:
    """What is static about the three GEMMs of one call.

    Operands are canonical: lhs [*batch, *m, k], rhs [*batch, k, *n], and the cotangent
    of the result g [*batch, *m, *n].

    Attributes:
      recipe: what to quantize.
      batch: number of batch axes.
      weight: which operand is w.
      precision: of the products, as `lax.dot_general` takes it.
      dtype: of the result.
      out_sharding: of the result.
      lhs: abstract value of lhs: its shape, dtype and sharding.
      rhs: likewise.
      gather: how w, which is rhs, comes together; None where it lies as products want.
      caller: the function whose products they are.
    """

    caller: ClassVar[str] = "dot_general"
    recipe: Recipe
    batch: int
    weight: Position
    precision: Any
    dtype: Any
    out_sharding: Any
    lhs: Any
    rhs: Any
    gather: Gather | None = None

    @classmethod
    def of_one(cls, operand: jax.Array, recipe: Recipe) -> "Gemms":
        """Returns that of products without batch axes of which one operand is known."""
        aval = jax.typeof(operand)
        return cls(recipe, 0, "rhs", None, operand.dtype, None, aval, aval)

    def prepared(self, lhs: Any, rhs: Any, noise: Noise) -> tuple[Any, Any]:
        """Returns lhs and rhs as the forward pass takes them."""
        del noise
        return lhs, rhs

    def saved(self, operands: tuple[Any, Any], prepared: tuple[Any, Any]):
        """Returns what the backward pass takes of the operands, or of the prepared."""
        del prepared
        return operands

    def forward(
        self, lhs: Input, rhs: Input, noise: Noise, amaxes: Amaxes
    ) -> jax.Array:
        """Returns y, [*batch, *m, *n], of arrays or of what they were packed to."""
        return self._multiply(
            self._fprop_operand(lhs, "lhs", noise, amaxes),
            self._fprop_operand(rhs, "rhs", noise, amaxes),
            dtype=self.dtype,
            out_sharding=self.out_sharding,
        )

    def backward(
        self, lhs: Input, rhs: Input, g: jax.Array, noise: Noise, amaxes: Amaxes
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents of lhs and rhs, from that of the result.

        Args:
          lhs: the array, or where it is packed its `PackedOperand`.
          rhs: likewise.
          g: the cotangent of the result.
          noise: of the call.
          amaxes: of the call.
        """
        g_dlhs, g_drhs = self._cotangents(g, noise, amaxes)
        dlhs = self._multiply(
            g_dlhs,
            self._saved_operand(rhs, "rhs", noise, amaxes),
            dtype=self.lhs.dtype,
            out_sharding=_explicit_sharding(self.lhs),
        )
        drhs = self._multiply(
            self._saved_operand(lhs, "lhs", noise, amaxes),
            g_drhs,
            dtype=self.rhs.dtype,
            out_sharding=_explicit_sharding(self.rhs),
        )
        return dlhs, drhs if self.gather is None else self.gather.store(drhs)

    def pack(self, x: jax.Array, noise: Noise, amaxes: Amaxes) -> PackedOperand:
        """Returns what the backward pass needs of x, in few bits."""
        site, position = self.recipe.packed_site, self.x_position
        assert site is not None
        quantizer = self.recipe.sites[site]
        if site == Site.FPROP_X:
            operand = self._fprop_operand(x, position, noise, amaxes, STORED)
        else:
            operand = self._backward_operand(x, position, noise, amaxes, STORED)
        assert quantizer is not None
        return pack_operand(operand, quantizer)

    def pack_w(
        self, w: jax.Array, noise: Noise, amaxes: Amaxes
    ) -> tuple[PackedOperand | None, PackedOperand | None]:
        """Returns w as fprop and dgrad multiply by it, None where not quantized."""
        of_fprop, of_dgrad = (
            self.recipe.sites[site] for site in (Site.FPROP_W, Site.DGRAD_W)
        )
        fprop = self._fprop_operand(w, self.weight, noise, amaxes, STORED)
        packed = None if of_fprop is None else pack_operand(fprop, of_fprop)
        if of_dgrad is None:
            return packed, None
        if self.recipe.source == "fprop":
            w = fprop.dequantized(w.shape)
        dgrad = self._backward_operand(w, self.weight, noise, amaxes, STORED)
        return packed, pack_operand(dgrad, of_dgrad)

    @property
    def sizes(self) -> tuple[int, int | None, int, int]:
        """Batch, tokens m or None where their number is data, features k and n."""
        lhs, rhs = self.lhs.shape, self.rhs.shape
        m, n = math.prod(lhs[self.batch : -1]), math.prod(rhs[self.batch + 1 :])
        m, n = (n, m) if self.weight == "lhs" else (m, n)
        return math.prod(lhs[: self.batch]), m, lhs[-1], n

    @property
    def tokens(self) -> int:
        """Rows of x in each element of the batch dimensions."""
        if self.x_position == "lhs":
            return math.prod(self.lhs.shape[self.batch : -1])
        return math.prod(self.rhs.shape[self.batch + 1 :])

    @property
    def x_position(self) -> Position:
        """Which operand is x."""
        return "lhs" if self.weight == "rhs" else "rhs"

    def _operand(
        self,
        x: jax.Array,
        axis: int,
        site: Site,
        noise: Noise,
        amaxes: Amaxes,
        outputs: Outputs = None,
    ) -> Operand:
        """Quantizes along one contraction axis as the recipe says for a site."""
        asked = self._asked(site, noise, amaxes, outputs)
        return make_operand(x, asked, axis=axis, batch=self.batch)

    def _asked(
        self, site: Site, noise: Noise, amaxes: Amaxes, outputs: Outputs = None
    ) -> Asked:
        """Returns what the operand of a site shall be."""
        quantizer = self.recipe.sites[site]
        holds = quantizer is not None and quantizer.holds
        return Asked(
            quantizer,
            site,
            noise,
            amax=amaxes[site.operand] if holds else None,
            groups=self._groups(site),
            outputs=outputs or self._outputs(site),
        )

    def _outputs(self, site: Site) -> tuple[Output, ...]:
        """Returns what a product reads of an operand."""
        compute = self.recipe.compute
        emulated = compute == "bf16" or (
            compute == "fp8" and not fp8.takes(self.recipe.sites[site])
        )
        is_gathered = self.gather is not None and site.is_w
        return MULTIPLIED if emulated and not is_gathered else STORED

    def _groups(self, site: Site) -> Groups | None:
        """Returns the groups of an operand that have a tensor scale each."""
        del site
        return None

    def _fprop_operand(
        self,
        x: Input,
        position: Position,
        noise: Noise,
        amaxes: Amaxes,
        outputs: Outputs = None,
    ) -> Operand:
        if isinstance(x, PackedOperand):
            return unpack_operand(x)
        site = Site.FPROP_W if position == self.weight else Site.FPROP_X
        axis = x.ndim - 1 if position == "lhs" else self.batch
        return self._operand(x, axis, site, noise, amaxes, outputs)

    def _backward_operand(
        self,
        x: jax.Array,
        position: Position,
        noise: Noise,
        amaxes: Amaxes,
        outputs: Outputs = None,
    ) -> Operand:
        """Quantizes lhs [*batch, m, k] along m, or rhs [*batch, k, n] along n."""
        site = Site.DGRAD_W if position == self.weight else Site.WGRAD_X
        if position == "lhs":
            x, axis = flatten(x, self.batch, x.ndim - 1), self.batch
        else:
            x, axis = flatten(x, self.batch + 1, x.ndim), self.batch + 1
        return self._operand(x, axis, site, noise, amaxes, outputs)

    def _saved_operand(
        self, x: Input, position: Position, noise: Noise, amaxes: Amaxes
    ) -> Operand:
        """Returns the operand of the backward pass that is not the cotangent."""
        if isinstance(x, PackedOperand):
            operand = unpack_operand(x)
        elif self.recipe.source == "fprop":
            operand = self._fprop_operand(x, position, noise, amaxes, STORED)
        else:
            return self._backward_operand(x, position, noise, amaxes)
        if operand.site not in (Site.FPROP_X, Site.FPROP_W):
            return operand
        shape = (self.lhs if position == "lhs" else self.rhs).shape
        values = operand.dequantized(shape)
        return self._backward_operand(values, position, noise, amaxes)

    def _cotangents(
        self, g: jax.Array, noise: Noise, amaxes: Amaxes
    ) -> tuple[Operand, Operand]:
        """Returns dy as the GEMM of dlhs contracts it, and as that of drhs does."""
        middle = len(self.lhs.shape) - 1
        g_n = flatten(g, middle, g.ndim)  # [*batch, *m, n]
        g_m = flatten(g, self.batch, middle)  # [*batch, m, *n]
        sites = (Site.DGRAD_DY, Site.WGRAD_DY)
        dlhs, drhs = sites if self.weight == "rhs" else sites[::-1]
        views = {dlhs: (g_n, g_n.ndim - 1), drhs: (g_m, self.batch)}
        if not self.recipe.share_dy:
            asked = [self._asked(site, noise, amaxes) for site in views]
            g_dlhs, g_drhs = make_both(g, self.batch, middle, asked) or (
                self._operand(view, axis, site, noise, amaxes)
                for site, (view, axis) in views.items()
            )
            return g_dlhs, g_drhs
        # Squares serve either contraction: quantized once, as dgrad sees it.
        view, axis = views[Site.DGRAD_DY]
        operand = self._operand(view, axis, Site.DGRAD_DY, noise, amaxes)
        view, axis = views[Site.WGRAD_DY]
        shared = transposed(operand, view.shape, axis=axis, site=Site.WGRAD_DY)
        return (operand, shared) if dlhs == Site.DGRAD_DY else (shared, operand)

    def _multiply(
        self, a: Operand, b: Operand, *, dtype: Any, out_sharding: Any
    ) -> jax.Array:
        """Contracts one axis of each operand, and applies their tensor scales."""
        a, b = self._gathered(a), self._gathered(b)
        factors = [
            self._scale_of_result(operand)
            for operand in sorted((a, b), key=lambda operand: operand.site)
            if operand.tensor_scale is not None
        ]
        if self.recipe.compute == "native" and a.blocks and b.blocks:
            y = self._multiply_natively(a, b)
        elif self._takes_fp8(a, b):
            y = self._multiply_in_fp8(a, b, out_sharding)
        elif self._takes_packed(out_sharding) and (
            (found := packed.product(a, b, factors=factors, dtype=dtype)) is not None
        ):
            return found
        else:
            return self._emulate(a, b, factors, out_sharding=out_sharding, dtype=dtype)
        return in_turn(y, factors).astype(dtype)

    def _gathered(self, operand: Operand) -> Operand:
        """Returns the operand, of w brought together as codes."""
        if self.gather is None or not operand.site.is_w:
            return operand
        if (quantizer := self.recipe.sites[operand.site]) is not None:
            return self.gather.operand(operand, quantizer)
        assert operand.array is not None
        array = self.gather.cast(operand.array, COMPUTE[self.recipe.compute])
        return dataclasses.replace(operand, array=array)

    def _scale_of_result(self, operand: Operand) -> jax.Array:
        """Returns the tensor scale of an operand as the product is multiplied by it."""
        assert operand.tensor_scale is not None
        return operand.tensor_scale

    def _emulate(
        self,
        a: Operand,
        b: Operand,
        factors: Sequence[jax.Array] = (),
        *,
        out_sharding: Any,
        dtype: Any,
    ) -> jax.Array:
        """Returns the product of arrays times the tensor scales."""
        batch = tuple(range(self.batch))
        y = float32_sums(
            *self._arrays(a, b),
            dimension_numbers=(((a.axis,), (b.axis,)), (batch, batch)),
            precision=self._precision,
            out_sharding=out_sharding,
        )
        return in_turn(y, factors).astype(dtype)

    def _takes_fp8(self, a: Operand, b: Operand) -> bool:
        sites = self.recipe.sites
        exact = fp8.takes(sites[a.site]) and fp8.takes(sites[b.site])
        return self.recipe.compute == "fp8" and exact

    def _takes_packed(self, out_sharding: Any) -> bool:
        """Returns whether operands may be multiplied as they are packed."""
        is_plain = not self.batch and self.precision is None and out_sharding is None
        return is_plain and COMPUTE[self.recipe.compute] == jnp.bfloat16

    def _multiply_in_fp8(self, a: Operand, b: Operand, out_sharding: Any) -> jax.Array:
        return fp8.matmul(
            a,
            b,
            quantizers=(self._quantizer(a), self._quantizer(b)),
            batch=self.batch,
            out_sharding=out_sharding,
            otherwise=lambda: self._emulate(
                a, b, out_sharding=out_sharding, dtype=jnp.float32
            ),
        )

    def _quantizer(self, operand: Operand) -> Quantizer:
        """Returns what made an operand of blocks."""
        quantizer = self.recipe.sites[operand.site]
        assert quantizer is not None
        return quantizer

    def _arrays(self, a: Operand, b: Operand) -> tuple[jax.Array, jax.Array]:
        """Returns the arrays of two operands, of one size where they are contracted."""
        # Blocks of other sizes, or none, may have padded one operand further.
        k = max(a.shape[a.axis], b.shape[b.axis], 1)
        first, second = (
            blocks.pad_to_multiple(x.values(COMPUTE[self.recipe.compute]), {x.axis: k})
            for x in (a, b)
        )
        return first, second

    @property
    def _precision(self) -> Any:
        if self.precision is None and self.recipe.compute == "f32":
            return lax.Precision.HIGHEST
        return self.precision

    def _multiply_natively(self, a: Operand, b: Operand) -> jax.Array:
        y = native.matmul(
            a.decoded(),
            b.decoded(),
            quantizers=(self._quantizer(a), self._quantizer(b)),
            batch=self.batch,
        )
        return y.reshape(*a.free, *b.free[self.batch :])


def _explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an abstract value on explicit mesh axes, or None."""
    explicit = AxisType.Explicit in x.sharding.mesh.axis_types
    return x.sharding if explicit else None
