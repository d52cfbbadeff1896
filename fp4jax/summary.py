"""What a recipe does to captured operands, in a few figures for each site."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from fp4jax.numerics import Quantizer, Site, dequantize, quantize, stats
from fp4jax.recipes import Recipe
from fp4jax.taps import Operands

Figures = dict[str, jax.Array]

# By site: the operand, and the axis that its GEMM contracts.
_OPERANDS: dict[Site, tuple[Callable[[Operands], jax.Array], int]] = {
    Site.FPROP_X: (lambda operands: operands.x, -1),
    Site.FPROP_W: (lambda operands: operands.w, -2),
    Site.DGRAD_DY: (lambda operands: operands.dy, -1),
    Site.DGRAD_W: (lambda operands: operands.w, -1),
    Site.WGRAD_X: (lambda operands: operands.x, -2),
    Site.WGRAD_DY: (lambda operands: operands.dy, -2),
}


def summarize(
    operands: Operands, recipe: Recipe, *, key: jax.Array | None = None
) -> dict[str, Figures]:
    """Returns the key figures of every quantized operand of a layer, as plain values.

    Of each site, from the functions of `fp4jax.stats` of the same names: `qsnr`,
    `shrinkage`, `bias`, `grid_use`, `zero_rate`, `top_rate`, `saturation_rate`,
    `scale_underflow_rate` and `nonfinite_rate`. Runs under `jax.jit`, so a training
    step can return it beside its loss.

    Args:
      operands: of a layer, from `fp4jax.capture`.
      recipe: that of the layer or any other, for what it would do.
      key: Threefry key, for recipes that draw; its noise is not that of the step.

    Returns:
      By site, "fprop_x" to "wgrad_dy", and by figure: float32 scalars, or one for each
      stacked layer. Tensor amaxes are fresh. Sites that are not quantized are left out.

    Raises:
      ValueError: a recipe that draws, without a key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import Operands, recipes
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> shapes = ((64, 32), (32, 16), (64, 16))
      >>> operands = Operands(*map(jax.random.normal, keys, shapes))
      >>> found = summarize(operands, recipes.ufp4(), key=keys[0])
      >>> list(found)[:3], bool(found["fprop_x"]["qsnr"] > 20)
      (['fprop_x', 'fprop_w', 'dgrad_dy'], True)
    """

    def of_layer(operands: Operands) -> dict[str, Figures]:
        found: dict[str, Figures] = {}
        for site, quantizer in recipe.sites.items():
            if quantizer is not None:
                choose, axis = _OPERANDS[site]
                found[site.name.lower()] = _figures(
                    choose(operands), key, quantizer=quantizer, axis=axis, site=site
                )
        return found

    for _ in range(operands.stack):
        of_layer = jax.vmap(of_layer)
    return of_layer(dataclasses.replace(operands, stack=0))


# Compiled as one: eagerly, each of some hundred operations is a program.
@functools.partial(jax.jit, static_argnames=("quantizer", "axis", "site"))
def _figures(
    x: jax.Array, key: jax.Array | None, *, quantizer: Quantizer, axis: int, site: Site
) -> Figures:
    other = -3 - axis if quantizer.is_square else None
    q = quantize(x, quantizer, axis=axis, other=other, key=key, site=site)
    x_dq = dequantize(q)
    return {
        "qsnr": stats.qsnr(x, x_dq),
        "shrinkage": stats.shrinkage(x, x_dq),
        "bias": stats.bias(x, q),
        "grid_use": stats.grid_use(q),
        "zero_rate": stats.zero_rate(q),
        "top_rate": stats.top_rate(q),
        "saturation_rate": stats.saturation_rate(x, q),
        "scale_underflow_rate": stats.scale_underflow_rate(x, q),
        "nonfinite_rate": stats.nonfinite_rate(q),
    }
