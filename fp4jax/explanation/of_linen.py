"""The products of a Linen model, whose layers are intercepted while it is traced."""

import functools
import math
from typing import Any

import jax
from flax import linen, traverse_util

from fp4jax.explanation.matmul import Matmul
from fp4jax.explanation.trace import Note, Trace
from fp4jax.linen import DotGeneral
from fp4jax.linen.intercept import intercepting

_LAYERS = (linen.Dense, linen.DenseGeneral, linen.Einsum)


def matmuls(model: linen.Module, inputs: Any, kwargs: Any) -> list[Matmul]:
    """Returns the rows of a model, traced as it is initialized."""
    trace = Trace()
    kernels: dict[str, tuple[int, ...]] = {}  # shapes, known in the end

    def intercept(method, args, kwargs, context):
        module = context.module
        is_layer = isinstance(module, _LAYERS)
        if context.method_name != "__call__" or not (
            is_layer or isinstance(module, DotGeneral)
        ):
            return method(*args, **kwargs)
        path = "/".join(module.path if is_layer else module.path[:-1])
        note = Note(path, functools.partial(_stack, kernels, path))
        with trace.layer(note):
            y = method(*args, **kwargs)
        if is_layer:
            kernel = linen.meta.unbox(module.variables["params"]["kernel"])
            note.kernel.append(kernel.size)
        return y

    def call(*inputs, **kwargs):
        y, variables = model.init_with_output(jax.random.key(0), *inputs, **kwargs)
        return y, linen.meta.unbox(variables.get("params", {}))

    with trace, intercepting(intercept):
        jaxpr, (_, params) = jax.make_jaxpr(call, return_shape=True)(*inputs, **kwargs)
    for path, leaf in traverse_util.flatten_dict(params).items():
        if path[-1:] == ("kernel",):
            kernels["/".join(path[:-1])] = getattr(leaf, "shape", ())
    return trace.matmuls(jaxpr.jaxpr)


def _stack(
    kernels: dict[str, tuple[int, ...]], path: str, size: int
) -> tuple[int, ...]:
    """Returns the leading axes of a kernel of which each layer has `size` elements."""
    shape = kernels.get(path, ())
    for i in range(len(shape)):
        if math.prod(shape[i:]) == size:
            return shape[:i]
    return ()
