"""Weights that are quantized once a step, however often the layers are called in it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from fp4jax.nnx.gemm import DotGeneral, Gemm
from fp4jax.nnx.grouped import GroupedLinear, RaggedDot
from fp4jax.nnx.inject import Layer, layers
from fp4jax.numerics import Site
from fp4jax.ops.dims import flatten
from fp4jax.ops.dot_general import pack_w
from fp4jax.ops.grouped_dot import pack_experts
from fp4jax.ops.residuals import PackedWeight

_SITES = (Site.FPROP_W, Site.DGRAD_W)


def quantize_weights(model: nnx.Module) -> None:
    """Quantizes the weights of a model, for all of its calls until the next `set_step`.

    Call it after `set_step`, with the parameters of that step. The products of fprop
    and dgrad are the same bit for bit, and the gradients those of the parameters. A
    recipe that draws for w draws once, with the key of the step, as the microbatches of
    a batch would; one that holds the amax of w samples it here, where it is due.

    Layers take part whose kernel is known to be w: `GroupedLinear` called with tiles,
    `nnx.Linear`, `nnx.LinearGeneral` without batch axes, and subclasses with a
    `__call__` of their own which declare `multiplies_kernel = True`: that it multiplies
    by the kernel as it is, contracting the first axis. Others quantize in every call,
    `nnx.Einsum` among them, and `GroupedLinear` called with the sizes of groups.

    Args:
      model: any module on which `set_step` was called; stacked layers are quantized
        together.

    Raises:
      ValueError: `set_step` was not called.

    Example:
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(model, recipes.ufp4(), rngs=nnx.Rngs(1))
      >>> fp4jax.nnx.set_step(model, 0)
      >>> fp4jax.nnx.quantize_weights(model)
      >>> model.dot_general.weight.get_value().fprop.codes.shape
      (32, 32)
    """
    shared = _shared(model)
    for layer in layers(model):
        gemm, w = layer.gemm, _weight(layer)
        if (
            w is None
            or not isinstance(gemm, DotGeneral | RaggedDot)
            or id(gemm) in shared
        ):
            continue
        if any(gemm.recipe.sites[site] for site in _SITES):
            gemm.weight.set_value(_packed(gemm, w))


def _weight(layer: Layer) -> jax.Array | None:
    """Returns [*stack, k, *n], what the layer multiplies by, or None if unknown."""
    module, kernel = layer.module, layer.module.kernel.get_value()
    if isinstance(module, GroupedLinear) or getattr(module, "multiplies_kernel", False):
        return kernel
    if getattr(module, "promote_dtype", None) is not dtypes.promote_dtype:
        return None
    stack, call = len(layer.stack), type(module).__call__
    if isinstance(module, nnx.Linear) and call is nnx.Linear.__call__:
        contracting = 1
    elif isinstance(module, nnx.LinearGeneral) and call is nnx.LinearGeneral.__call__:
        if module.batch_axis or module.dot_general_cls is not None:
            return None
        contracting = len(module.in_features)
    else:
        return None
    kernel = kernel if module.dtype is None else jnp.asarray(kernel, module.dtype)
    return flatten(kernel, stack, stack + contracting)


def _packed(gemm: Gemm, w: jax.Array) -> PackedWeight:
    step = gemm.step.get_value()
    if step is None:
        raise ValueError(
            "quantize_weights: model must know its step, got none. Call "
            "fp4jax.nnx.set_step(model, step) before."
        )
    recipe, key = gemm.recipe, gemm.key.get_value()
    of_one = pack_experts if isinstance(gemm, RaggedDot) else pack_w

    def pack(w: jax.Array, key: jax.Array, step: jax.Array, held: Any) -> PackedWeight:
        key = jax.random.fold_in(key, step)
        when = step if recipe.holds else None
        return of_one(w, recipe=recipe, key=key, held=held, step=when)

    for _ in key.shape:
        pack = jax.vmap(pack)
    return pack(w, key, step, gemm.held.get_value() if recipe.holds else None)


def _shared(model: nnx.Module) -> set[int]:
    """Returns the ids of what serves several layers, whose weights differ."""
    nodes = dict(nnx.iter_graph(model))
    duplicates = nnx.find_duplicates(model, only=lambda _, node: isinstance(node, Gemm))
    return {id(nodes[path]) for paths in duplicates for path in paths if path in nodes}
