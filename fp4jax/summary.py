"""What a recipe does to captured operands, in a few figures for each site."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fp4jax.numerics import QTensor, Site, dequantize, quantize, stats
from fp4jax.ops import fp8
from fp4jax.ops.noise import Noise
from fp4jax.ops.operands import Asked, make_operand
from fp4jax.recipes import Recipe
from fp4jax.taps import Operands

Figures = dict[str, jax.Array]

# The axis of x [m, k], w [k, n] or dy [m, n] that the GEMM of a site contracts.
_CONTRACTED = {
    Site.FPROP_X: -1,
    Site.FPROP_W: -2,
    Site.DGRAD_DY: -1,
    Site.DGRAD_W: -1,
    Site.WGRAD_X: -2,
    Site.WGRAD_DY: -2,
}
# Where a recipe's `source` may be the values of another site.
_FROM_FPROP = {Site.DGRAD_W: Site.FPROP_W, Site.WGRAD_X: Site.FPROP_X}


def summarize(
    operands: Operands, recipe: Recipe, *, key: jax.Array | None = None
) -> dict[str, Figures]:
    """Returns the key figures of every quantized operand of a layer, as plain values.

    Of each site, from the functions of `fp4jax.stats` of the same names: `qsnr`,
    `shrinkage`, `bias`, `grid_use`, `zero_rate`, `top_rate`, `saturation_rate`,
    `scale_underflow_rate` and `nonfinite_rate`; with `compute="fp8"` also
    `fp8_fallback`, 1 where scales lie too far apart for FP8. The first two are of the
    operand that was captured, even where a recipe quantizes what fprop made of it. Runs
    under `jax.jit`, so a training step can return it beside its loss.

    Args:
      operands: of a layer, from `fp4jax.capture`.
      recipe: that of the layer or any other, for what it would do.
      key: Threefry key, for recipes that draw; its noise is not that of the step.

    Returns:
      By site, "fprop_x" to "wgrad_dy", and by figure: float32 scalars, or one for each
      stacked layer. Tensor amaxes are fresh. Sites that are not quantized are left out.

    Raises:
      ValueError: a recipe that draws, without a key.
      TypeError: what is not operands, or not a recipe.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import Operands, recipes
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> shapes = ((64, 32), (32, 16), (64, 16))
      >>> operands = Operands(*map(jax.random.normal, keys, shapes))
      >>> fprop = recipes.Recipe(recipes.ufp4().fprop)  # of one GEMM
      >>> found = summarize(operands, fprop)
      >>> list(found), bool(found["fprop_x"]["qsnr"] > 20)
      (['fprop_x', 'fprop_w'], True)
    """
    if not isinstance(operands, Operands):
        raise TypeError(
            "summarize: operands must be the Operands of one layer, got "
            f"{type(operands).__name__}. fp4jax.capture returns them by path."
        )
    if not isinstance(recipe, Recipe):
        raise TypeError(f"summarize: recipe must be a Recipe, got {recipe!r}.")

    def of_layer(operands: Operands) -> dict[str, Figures]:
        return {
            site.name.lower(): _figures(operands, key, recipe=recipe, site=site)
            for site, quantizer in recipe.sites.items()
            if quantizer is not None
        }

    for _ in range(operands.stack):
        of_layer = jax.vmap(of_layer)
    return of_layer(dataclasses.replace(operands, stack=0))


# Compiled as one: eagerly, each of some hundred operations is a program.
@functools.partial(jax.jit, static_argnames=("recipe", "site"))
def _figures(
    operands: Operands, key: jax.Array | None, *, recipe: Recipe, site: Site
) -> Figures:
    x = (operands.x, operands.w, operands.dy)[site.operand]
    source = x
    if recipe.source == "fprop" and site in _FROM_FPROP:
        q = _quantize(x, _FROM_FPROP[site], recipe, key)
        source = dequantize(dataclasses.replace(q, dtype=jnp.dtype(jnp.float32)))
    axis = _CONTRACTED[site] % 2  # also of a dy that dgrad has drawn for both
    if recipe.share_dy and site == Site.WGRAD_DY:
        site = Site.DGRAD_DY
    q = _quantize(source, site, recipe, key)
    x_dq = dequantize(dataclasses.replace(q, dtype=jnp.dtype(jnp.float32)))
    figures = {
        "qsnr": stats.qsnr(x, x_dq),
        "shrinkage": stats.shrinkage(x, x_dq),
        "bias": stats.bias(source, q),
        "grid_use": stats.grid_use(q),
        "zero_rate": stats.zero_rate(q),
        "top_rate": stats.top_rate(q),
        "saturation_rate": stats.saturation_rate(source, q),
        "scale_underflow_rate": stats.scale_underflow_rate(source, q),
        "nonfinite_rate": stats.nonfinite_rate(q),
    }
    quantizer = recipe.sites[site]
    if quantizer and recipe.compute == "fp8" and fp8.takes(quantizer):
        asked = Asked(quantizer, site, Noise(key))
        operand = make_operand(source, asked, axis=axis, batch=0)
        fits = fp8.scaled(operand, quantizer).fits
        figures["fp8_fallback"] = 1 - fits.astype(jnp.float32)
    return figures


def _quantize(
    x: jax.Array, site: Site, recipe: Recipe, key: jax.Array | None
) -> QTensor:
    """Quantizes along the axis that the GEMM of a site contracts."""
    quantizer, axis = recipe.sites[site], _CONTRACTED[site]
    assert quantizer is not None
    other = -3 - axis if quantizer.is_square else None
    return quantize(x, quantizer, axis=axis, other=other, key=key, site=site)
