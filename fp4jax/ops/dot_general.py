"""`lax.dot_general` whose three training GEMMs are quantized as a recipe says."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fp4jax.numerics import Site, blocks, checks, exact
from fp4jax.numerics.blockwise import quantize_blocks
from fp4jax.ops.dims import DimensionNumbers, Dims, flatten
from fp4jax.recipes import Recipe

_COMPUTE = {"bf16": jnp.bfloat16, "f32": jnp.float32}


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    weight: Literal["lhs", "rhs"] = "rhs",
) -> jax.Array:
    """Computes a `lax.dot_general` whose forward and backward operands are quantized.

    y = Q(x) Q(w),  dx = Q(dy) Q(w)^T,  dw = Q(x)^T Q(dy)

    Each of the six Q is the recipe's quantizer of that site, along the axis that its
    GEMM contracts; operands are quantized from the dtype that arrives. Sums are
    float32. A gradient is the product of its quantized operands, not the derivative of
    the quantized forward pass, and has its operand's dtype.

    Works under jit, vmap, scan, remat and reverse-mode differentiation of first order;
    forward mode (`jax.jvp`) is not defined. Under `jax.vmap` an unbatched key gives
    every lane the same noise, and every lane has its own amax.

    Args:
      lhs: float32, bfloat16 or float16 array, x unless `weight` is "lhs".
      rhs: likewise, w unless `weight` is "lhs"; may differ from `lhs` in dtype.
      dimension_numbers: as for `lax.dot_general`.
      precision: as for `lax.dot_general`, of all three GEMMs.
      preferred_element_type: the dtype of the result.
      out_sharding: as for `lax.dot_general`, of the result; gradients have the sharding
        of their operand.
      recipe: what to quantize; None is `lax.dot_general` itself.
      key: Threefry key of this call, typed or raw uint32[2], read by recipes only, and
        of them by those that draw random numbers. Needed where a site of the forward
        pass draws, and to differentiate where any does.
      weight: which operand is w. It decides the quantizers, not the result's shape.

    Returns:
      What `lax.dot_general` returns: [*batch, *lhs_free, *rhs_free].

    Raises:
      ValueError: a recipe that draws, without a key; several keys; a bad `weight`.
      TypeError: operands that are not float, or whose dimensions do not match; a key
        that is none, or of another implementation than Threefry.
      NotImplementedError: a second derivative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import recipes
      >>> x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 8))
      >>> dims = (((1,), (0,)), ((), ()))
      >>> y = dot_general(x, w, dims, recipe=recipes.ufp4(), key=jax.random.key(0))
      >>> y.shape, y.dtype
      ((4, 8), dtype('float32'))
    """
    if weight not in ("lhs", "rhs"):
        raise ValueError(
            f"dot_general: weight must be 'lhs' or 'rhs', got weight={weight!r}."
        )
    lax_dot = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    if recipe is None:
        return lax_dot(lhs, rhs)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    _check(lhs, rhs, recipe=recipe, key=key)
    out = jax.eval_shape(lax_dot, lhs, rhs)  # checks the dimensions as lax does
    dims = Dims.of(dimension_numbers)
    gemms = _Gemms(
        recipe, len(dims.lhs_batch), weight, precision, out.dtype, out_sharding
    )
    return _dot(gemms, dims.canonical_lhs(lhs), dims.canonical_rhs(rhs), key)


def _check(lhs: jax.Array, rhs: jax.Array, *, recipe: Recipe, key: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"dot_general: recipe must be a Recipe, got {recipe!r}.")
    checks.check_float(lhs, "dot_general", name="lhs")
    checks.check_float(rhs, "dot_general", name="rhs")
    checks.check_key(key, "dot_general")
    if key is None and recipe.draws(Site.FPROP_X, Site.FPROP_W):
        raise ValueError(_NO_KEY.format("for the forward pass of"))


_NO_KEY = (
    "dot_general: key must be a PRNG key {} a recipe that draws random numbers, got "
    "key=None. Pass key=..., a new one at every step; in a Flax NNX model call "
    "fp4jax.nnx.set_step(model, step) inside the training step."
)


@dataclasses.dataclass(frozen=True)
class _Gemms:
    """What is static about the three GEMMs of one call.

    Operands are canonical: lhs [*batch, *m, k], rhs [*batch, k, *n].
    """

    recipe: Recipe
    batch: int
    weight: str
    precision: Any
    dtype: Any
    out_sharding: Any

    def multiply(self, a, b, *, axes, sites, key, dtype, out_sharding) -> jax.Array:
        """Quantizes two operands and contracts one axis of each."""
        operands = [
            self._operand(x, axis, site, key)
            for x, axis, site in zip((a, b), axes, sites, strict=True)
        ]
        # Blocks of other sizes, or none, may have padded one operand further.
        k = max(x.shape[axis] for (x, _), axis in zip(operands, axes, strict=True))
        a, b = (
            blocks.pad_to_multiple(x, {axis: max(k, 1)})
            for (x, _), axis in zip(operands, axes, strict=True)
        )
        batch = tuple(range(self.batch))
        y = _float32_sums(
            a,
            b,
            dimension_numbers=(((axes[0],), (axes[1],)), (batch, batch)),
            precision=self._precision,
            out_sharding=out_sharding,
        )
        # One after the other, in the order of the sites: their product may overflow.
        # The barrier keeps a compiler from moving a constant one to the end.
        for i in sorted((0, 1), key=lambda i: sites[i]):
            if operands[i][1] is not None:
                y = y * lax.optimization_barrier(operands[i][1])
        return y.astype(dtype)

    @property
    def _precision(self) -> Any:
        if self.precision is None and self.recipe.compute == "f32":
            return lax.Precision.HIGHEST
        return self.precision

    def _operand(self, x: jax.Array, axis: int, site: Site, key: jax.Array | None):
        """Returns the GEMM's input along one contraction axis, and its tensor scale."""
        quantizer, dtype = self.recipe.sites[site], _COMPUTE[self.recipe.compute]
        if quantizer is None:
            return exact.cast(x, dtype), None
        shape, other = list(x.shape), None
        if quantizer.is_square:
            # Squares run over the contraction axis and over all free axes as one.
            if axis == self.batch:
                other = axis + 1
                x = flatten(x, other, x.ndim)
            else:
                x = flatten(x, self.batch, axis)
                other, axis = self.batch, self.batch + 1
        parts = quantize_blocks(
            x, quantizer, axis=axis, other=other, key=key, site=site
        )
        operand = parts.operand(dtype)
        shape[axis if other is None or other > axis else -1] = operand.shape[axis]
        return operand.reshape(shape), parts.tensor_scale

    def forward(self, lhs: jax.Array, rhs: jax.Array, key: jax.Array | None):
        """Returns y, [*batch, *m, *n]."""
        sites = (Site.FPROP_X, Site.FPROP_W)
        return self.multiply(
            lhs,
            rhs,
            axes=(lhs.ndim - 1, self.batch),
            sites=sites if self.weight == "rhs" else sites[::-1],
            key=key,
            dtype=self.dtype,
            out_sharding=self.out_sharding,
        )

    def backward(self, lhs, rhs, g, key) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents of lhs and rhs, from that of the result."""
        first_free_n = lhs.ndim - 1
        lhs_sites = (Site.DGRAD_DY, Site.DGRAD_W)
        rhs_sites = (Site.WGRAD_X, Site.WGRAD_DY)
        if self.weight == "lhs":
            lhs_sites, rhs_sites = rhs_sites[::-1], lhs_sites[::-1]
        # [*batch, *m, n] x [*batch, k, n]
        g_n = flatten(g, first_free_n, g.ndim)
        rhs_n = flatten(rhs, self.batch + 1, rhs.ndim)
        dlhs = self.multiply(
            g_n,
            rhs_n,
            axes=(g_n.ndim - 1, rhs_n.ndim - 1),
            sites=lhs_sites,
            key=key,
            dtype=lhs.dtype,
            out_sharding=_explicit_sharding(lhs),
        )
        # [*batch, m, k] x [*batch, m, *n]
        drhs = self.multiply(
            flatten(lhs, self.batch, lhs.ndim - 1),
            flatten(g, self.batch, first_free_n),
            axes=(self.batch, self.batch),
            sites=rhs_sites,
            key=key,
            dtype=rhs.dtype,
            out_sharding=_explicit_sharding(rhs),
        )
        return dlhs, drhs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(gemms: _Gemms, lhs: jax.Array, rhs: jax.Array, key: jax.Array | None):
    return gemms.forward(lhs, rhs, key)


def _dot_fwd(gemms: _Gemms, lhs: jax.Array, rhs: jax.Array, key: jax.Array | None):
    if key is None and gemms.recipe.draws():
        raise ValueError(_NO_KEY.format("to differentiate"))
    lhs, rhs = _first_order_only(lhs), _first_order_only(rhs)
    return gemms.forward(lhs, rhs, key), (lhs, rhs, key)


def _dot_bwd(gemms: _Gemms, residuals, g: jax.Array):
    lhs, rhs, key = residuals
    lhs, rhs, g = map(_first_order_only, (lhs, rhs, g))
    return *gemms.backward(lhs, rhs, g, key), None


_dot.defvjp(_dot_fwd, _dot_bwd)


@jax.custom_vjp
def _first_order_only(x: jax.Array) -> jax.Array:
    return x


def _no_second_order(*_):
    raise NotImplementedError(
        "dot_general: the derivative must be of first order, got a second derivative "
        "through a quantized GEMM, which is not defined. Use recipe=None for it."
    )


_first_order_only.defvjp(_no_second_order, _no_second_order)


def _float32_sums(a: jax.Array, b: jax.Array, **kwargs) -> jax.Array:
    """Computes `lax.dot_general` with float32 sums.

    A CPU multiplies the same operands in float32: exact likewise, and faster.
    """
    dot = functools.partial(
        lax.dot_general, preferred_element_type=jnp.float32, **kwargs
    )
    if a.dtype == jnp.float32:
        return dot(a, b)
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: dot(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=dot,
    )


def _explicit_sharding(x: jax.Array) -> Any:
    """Returns the sharding of an operand on explicit mesh axes, or None."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None
