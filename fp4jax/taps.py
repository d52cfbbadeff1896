"""Capture: the operands of chosen layers of a model at a step, as plain arrays.

Each chosen layer of a copy of the model gets taps: identities with an extra argument, a
probe of zeros, whose cotangent is by definition the value that passes (x, w) or its
cotangent (dy). So operands leave as gradients of the probes, through jit, scan, remat
and vmap, and nothing that is computed otherwise changes. A model that is not captured
holds nothing of this.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp4jax.nnx.inject import Layer
from fp4jax.nnx.inject import layers as layers_of
from fp4jax.nnx.step import is_compiling
from fp4jax.numerics.groups import Groups
from fp4jax.ops.dims import DimensionNumbers, Dims, flatten
from fp4jax.ops.einsum import einsum_with
from fp4jax.recipes import Recipe
from fp4jax.recipes.paths import listed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What the three GEMMs of a layer multiply, before quantization, as matrices.

    y = x w,  dx = dy w^T,  dw = x^T dy

    Attributes:
      x: [*stack, *batch, m, k] input, in the dtype that arrives at the product.
      w: [*stack, *batch, k, n] kernel.
      dy: [*stack, *batch, m, n] cotangent of the output. Of a `GroupedLinear`, x and dy
        are rows or tiles of all groups, and w is [*stack, groups, k, n].
      stack: number of leading axes that count stacked layers.
    """

    x: jax.Array
    w: jax.Array
    dy: jax.Array
    stack: int = dataclasses.field(default=0, metadata={"static": True})


def capture(
    loss_fn: Callable[..., jax.Array],
    model: nnx.Module,
    *args: Any,
    layers: str = "*",
) -> dict[str, Operands]:
    """Returns the operands of some layers of a model in one step.

    The model is copied and stays as it is. Runs eagerly or inside `jax.jit`, as the
    step to watch does; the forward and the backward pass are those of that step, for
    the same step and noise, bit for bit where the compiler rounds as it is told
    (`xla_allow_excess_precision` off, as in this library's training step).

    Args:
      loss_fn: function of the model and `args` to a scalar loss; calls `set_step`, if
        the recipes draw.
      model: any module with layers as `fp4jax.nnx.layers` lists them, quantized or not.
      *args: of `loss_fn`, a batch for instance.
      layers: shell pattern of the paths of layers, as `fp4jax.nnx.layers` has them; "*"
        crosses slashes. The path of stacked layers has no index: their operands have a
        leading axis of layers.

    Returns:
      The operands by path.

    Raises:
      ValueError: no layer matches; a chosen layer is not called, does not contribute to
        the loss, or is called several times in a step, by a loop or by lanes of a vmap
        that share it. Where that is not known before the program runs, inside
        `jax.jit`, all operands of the layer are NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import fp4jax
      >>> model = nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: model(x).sum()
      >>> found = fp4jax.capture(loss_fn, model, jnp.ones((3, 4)))
      >>> found[""].dy.shape, found[""].dy.sum().item()
      ((3, 2), 6.0)
    """
    (_, operands), _ = value_and_grad(loss_fn, layers=layers)(model, *args)
    return operands


def value_and_grad(
    loss_fn: Callable[..., jax.Array], *, layers: str = "*"
) -> Callable[..., tuple[tuple[jax.Array, dict[str, Operands]], nnx.State]]:
    """Returns a function of a model to its loss, its gradients and its operands.

    Args:
      loss_fn: as of `capture`.
      layers: as of `capture`.

    Returns:
      `f(model, *args) -> ((loss, operands), grads)`, the gradients those of `nnx.Param`
      as `nnx.value_and_grad` gives them. What `loss_fn` changes in the model, batch
      statistics for instance, changes in a copy only.
    """

    def function(model: nnx.Module, *args: Any):
        model = nnx.clone(model)
        taps = _insert(model, layers)
        _find_shapes(loss_fn, model, args)
        for path, tap in taps.items():
            tap.make_probes(path)
        graph, params, probes, rest = nnx.split(model, nnx.Param, Probe, ...)

        def loss_of(params, probes):
            merged = nnx.merge(graph, params, probes, rest, copy=True)
            return loss_fn(merged, *args)

        loss, (grads, captured) = jax.value_and_grad(loss_of, (0, 1))(params, probes)
        nnx.update(model, captured)
        return (loss, {path: tap.operands(path) for path, tap in taps.items()}), grads

    return function


class Probe(nnx.Variable):
    """Zeros whose cotangent is what passes a tap."""


class _Note:
    """What the abstract run finds of a layer: a mutable value, equal to itself only."""

    def __init__(self):
        self.call: tuple[Any, ...] | None = None


class _Tap(nnx.Module):
    """Stands in for what multiplies in a layer, and records.

    Attributes:
      inner: the function or the `fp4jax.nnx.Gemm` that stood there.
      note: of the layer.
      stack: leading axes of the layer's kernel.
      x, w, dy: probes, None until the shapes are known.
      calls: a probe of zeros, one for each layer of the stack, that counts calls.
    """

    def __init__(self, inner: Any, stack: tuple[int, ...]):
        self.inner = nnx.data(inner) if isinstance(inner, nnx.Module) else inner
        self.note = _Note()
        self.stack = stack
        self.x, self.w, self.dy, self.calls = (Probe(None) for _ in range(4))

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes as `inner`: of (lhs, rhs, dimension_numbers) or (spec, lhs, rhs)."""
        first = int(isinstance(args[0], str))
        before, (x, w), after = args[:first], args[first : first + 2], args[first + 2 :]
        if self.x.get_value() is None:
            y = self.inner(*before, x, w, *after, **kwargs)
            how = _how(before[0] if before else after[0])
            self.note.call = (how, *map(jax.typeof, (x, w, y)))
            return y
        x = _record(x, self.x.get_value())
        w = _record(w, self.w.get_value())
        y = self.inner(*before, x, w, *after, **kwargs)
        return _record_cotangent(y, self.dy.get_value(), self.calls.get_value())

    @property
    def recipe(self) -> Recipe | None:
        """That of the product, which its layer may ask for."""
        return getattr(self.inner, "recipe", None)

    def make_probes(self, path: str) -> None:
        """Makes the probes, in the shapes that were found.

        Raises:
          ValueError: the layer was not called.
        """
        if self.note.call is None:
            raise ValueError(
                "capture: every chosen layer must be called by loss_fn, got none of "
                f"{path!r}. Leave it out by the pattern of layers."
            )
        _, x, w, y = self.note.call
        for probe, value in ((self.x, x), (self.w, w), (self.dy, y)):
            probe.set_value(jnp.zeros((*self.stack, *value.shape), value.dtype))
        self.calls.set_value(jnp.zeros(self.stack))

    def operands(self, path: str) -> Operands:
        """Returns what the probes received, as matrices."""
        assert self.note.call is not None
        how = self.note.call[0]
        once = self.calls.get_value() == 1
        if not isinstance(once, jax.core.Tracer):
            _check_called_once(self.calls.get_value().astype(int).tolist(), path)

        def matrices(once, *arrays):
            return [jnp.where(once, x, jnp.nan) for x in _matrices(how, *arrays)]

        for _ in self.stack:
            matrices = jax.vmap(matrices)
        arrays = (self.x, self.w, self.dy)
        x, w, dy = matrices(once, *(probe.get_value() for probe in arrays))
        return Operands(x, w, dy, stack=len(self.stack))


def _how(argument: Any) -> str | DimensionNumbers | None:
    """Returns what says how two operands are contracted; None where groups are."""
    return None if isinstance(argument, jax.Array | np.ndarray | Groups) else argument


def _check_called_once(calls: Any, path: str) -> None:
    """Raises unless each layer of a stack, or the one there is, had one cotangent."""
    if 0 in jax.tree.leaves(calls):
        raise ValueError(
            "capture: every chosen layer must contribute to the loss, got no gradient "
            f"of what {path!r} returns ({calls} times one). Use its output, without a "
            "stop_gradient behind it, or leave the layer out by the pattern of layers."
        )
    if set(jax.tree.leaves(calls)) != {1}:
        raise ValueError(
            f"capture: a layer must be called once in a step, got {calls} calls of "
            f"{path!r}. A loop or the lanes of a vmap that share a layer count each."
        )


def _insert(model: nnx.Module, pattern: str) -> dict[str, _Tap]:
    """Puts a tap into every layer of a model whose path matches, and returns them."""
    found = list(layers_of(model))
    chosen = [layer for layer in found if fnmatch.fnmatchcase(layer.path, pattern)]
    if not chosen:
        paths = listed((layer.path for layer in found), near=pattern)
        raise ValueError(
            f"capture: layers must match the path of a layer, got layers={pattern!r}. "
            f"The layers are {paths}."
        )
    return {layer.path: _tapped(layer) for layer in chosen}


def _tapped(layer: Layer) -> _Tap:
    module = layer.module
    if getattr(module, "dot_general_cls", None) is not None:
        raise ValueError(
            "capture: a layer must not have a dot_general_cls, which would hide the "
            f"tap, got {module.dot_general_cls!r} at {layer.path!r}. Inject a "
            "dot_general instead."
        )
    inner = getattr(module, layer.attribute) or lax.dot_general
    tap = _Tap(inner, layer.stack)
    setattr(module, layer.attribute, nnx.data(tap))
    return tap


def _find_shapes(loss_fn: Callable, model: nnx.Module, args: tuple[Any, ...]) -> None:
    """Runs the loss once, abstractly where it is compiled, so that taps take notes."""
    graph, state = nnx.split(model)

    def run():
        return loss_fn(nnx.merge(graph, state, copy=True), *args)

    jax.eval_shape(run) if is_compiling() else run()


def _matrices(
    how: str | DimensionNumbers | None, x: jax.Array, w: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the operands of one product as [*batch, m, k], [k, n] and [m, n].

    Args:
      how: the dimension numbers or the einsum string that x and w were given with; None
        of groups, whose operands are left as they are.
      x: as the layer gave it, like `w`.
      w: the kernel.
      dy: cotangent of the product.
    """
    if how is None:
        return x, w, dy

    def product(dot):
        return einsum_with(dot, how, x, w) if isinstance(how, str) else dot(x, w, how)

    def without_product(lhs, rhs, dimension_numbers, **_):
        seen.append((lhs, rhs, Dims.of(dimension_numbers)))
        dot = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
        return jnp.zeros(jax.eval_shape(dot, lhs, rhs).shape, dy.dtype)

    seen: list[tuple[jax.Array, jax.Array, Dims]] = []
    product(without_product)
    lhs, rhs, dims = seen[0]
    lhs, rhs = dims.canonical_lhs(lhs), dims.canonical_rhs(rhs)
    batch, last = len(dims.lhs_batch), lhs.ndim - 1
    # What an einsum does to the product, undone: its transpose, of the cotangent.
    shape = (*lhs.shape[:last], *rhs.shape[batch + 1 :])
    restore = jax.linear_transpose(
        lambda y: product(lambda *_, **__: y), jax.ShapeDtypeStruct(shape, dy.dtype)
    )
    (dy,) = restore(dy)
    return (
        flatten(lhs, batch, last),
        flatten(rhs, batch + 1, rhs.ndim),
        flatten(flatten(dy, last, dy.ndim), batch, last),
    )


@jax.custom_vjp
def _record(x: jax.Array, probe: jax.Array) -> jax.Array:
    """Returns x, which is also the cotangent of the probe."""
    return x


_record.defvjp(lambda x, probe: (x, x), lambda x, dx: (dx, x))


@jax.custom_vjp
def _record_cotangent(y: jax.Array, probe: jax.Array, calls: jax.Array) -> jax.Array:
    """Returns y; the cotangent of the probe is that of y, and that of `calls` is 1."""
    return y


_record_cotangent.defvjp(
    lambda y, probe, calls: (y, jnp.ones_like(calls)),
    # Made of dy, so that every lane of a vmap that shares the layer counts.
    lambda one, dy: (dy, dy, jnp.where(jnp.any(dy != 0), one, one)),
)
