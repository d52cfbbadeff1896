"""The products of an NNX model, whose layers are watched while it is traced."""

import math
from typing import Any

import jax
from flax import nnx
from jax import lax

from fp4jax.explanation.matmul import Matmul
from fp4jax.explanation.trace import Note, Trace
from fp4jax.nnx import GroupedLinear, layers
from fp4jax.nnx.inject import Layer
from fp4jax.recipes import Recipe


def matmuls(model: nnx.Module, inputs: Any, kwargs: Any) -> list[Matmul]:
    """Returns the rows of a model: of its layers alone where no inputs are given."""
    if not inputs and not kwargs:
        return [_of_kernel(layer) for layer in layers(model)]
    watched, trace = nnx.clone(model), Trace()
    for layer in layers(watched):
        _watch(layer, trace)
    graph, state = nnx.split(watched)

    def call(state, *inputs, **kwargs):
        return nnx.merge(graph, state, copy=True)(*inputs, **kwargs)

    with trace:
        jaxpr = jax.make_jaxpr(call)(state, *inputs, **kwargs)
    rows = trace.matmuls(jaxpr.jaxpr)
    called = {row.path for row in rows if row.reachable}
    idle = (
        _of_kernel(layer, is_called=False)
        for layer in layers(model)
        if layer.gemm is not None and layer.path not in called
    )
    return [*rows, *idle]


def _of_kernel(layer: Layer, *, is_called: bool = True) -> Matmul:
    """Returns the product of a layer whose inputs are not known."""
    module, recipe = layer.module, None if layer.gemm is None else layer.gemm.recipe
    n = math.prod(layer.shape)
    match module:
        case nnx.Linear():
            k = module.in_features
        case nnx.LinearGeneral():
            k = math.prod(module.in_features)
            n //= math.prod(module.batch_axis.values())
        case GroupedLinear():
            groups, k, _ = layer.shape
            n //= groups
        case _:
            spec = module.einsum_str.replace(" ", "").split("->")[0].split(",")
            sizes = zip(spec[1], layer.shape, strict=False)
            k = math.prod(size for label, size in sizes if label in spec[0])
    sizes = (None, None, k, n // k)
    return Matmul(layer.path, sizes, recipe, layer.stack, is_called=is_called)


def _watch(layer: Layer, trace: Trace) -> None:
    """Makes a layer of a copied model name itself where it multiplies."""
    module = layer.module
    note = Note(layer.path, lambda _: layer.stack, [math.prod(layer.shape)])
    make = getattr(module, "dot_general_cls", None)
    if make is not None:
        module.dot_general_cls = nnx.static(lambda: _Watched(make(), note, trace))
        return
    product = getattr(module, layer.attribute) or lax.dot_general
    setattr(module, layer.attribute, nnx.data(_Watched(product, note, trace)))


class _Watched(nnx.Module):
    """The product of a layer, traced in the layer's name."""

    def __init__(self, product: Any, note: Note, trace: Trace):
        is_module = isinstance(product, nnx.Module)
        self.product = nnx.data(product) if is_module else nnx.static(product)
        self.note, self.trace = nnx.static(note), nnx.static(trace)

    @property
    def recipe(self) -> Recipe | None:
        """That of the product, which its layer may ask for."""
        return getattr(self.product, "recipe", None)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        with self.trace.layer(self.note):
            return self.product(*args, **kwargs)
