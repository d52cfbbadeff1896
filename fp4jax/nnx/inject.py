"""Quantizing a model that exists: its linear layers get a recipe by their path."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.nnx.arguments import check_rngs
from fp4jax.nnx.gemm import DotGeneral, Einsum, Gemm
from fp4jax.nnx.grouped import GroupedLinear, RaggedDot
from fp4jax.policies import Policy
from fp4jax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that takes a recipe, and where it keeps what computes its product.

    Attributes:
      path: such as "blocks/0/attention/query".
      module: an `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` or `GroupedLinear`.
      attribute: of the module, that holds a function or a `Gemm`.
      default: the functions that an unquantized layer has there.
      make: returns what a quantized layer has there.
      shape: of the kernel of one layer.
    """

    path: str
    module: Any
    attribute: str
    default: tuple[Callable | None, ...]
    make: Callable[..., Gemm]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: str, module: Any) -> "Layer | None":
        """Returns the layer that a module is, or None."""
        match module:
            case nnx.Linear():
                shape = (module.in_features, module.out_features)
            case nnx.LinearGeneral():
                sizes = tuple(module.batch_axis.values())
                shape = (*sizes, *module.in_features, *module.out_features)
            case nnx.Einsum():
                shape = tuple(module.kernel_shape)
                return cls(path, module, "einsum_op", (jnp.einsum,), Einsum, shape)
            case GroupedLinear():
                shape = module.kernel_shape
                make = functools.partial(RaggedDot, groups=shape[0])
                return cls(path, module, "ragged_dot", (lax.ragged_dot,), make, shape)
            case _:
                return None
        default = (lax.dot_general, None)
        return cls(path, module, "dot_general", default, DotGeneral, shape)

    @property
    def gemm(self) -> Gemm | None:
        """What quantizes the layer; None where nothing does."""
        found = getattr(self.module, self.attribute)
        return found if isinstance(found, Gemm) else None

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of the kernel of layers that are stacked for a scan.

        Raises:
          ValueError: the axes that stack the layers are not the first.
        """
        shape = self.module.kernel.get_value().shape
        stack = shape[: len(shape) - len(self.shape)]
        if shape != (*stack, *self.shape):
            raise ValueError(
                "fp4jax: axes that stack layers must be the first of a kernel, got "
                f"shape={shape} at {self.path!r}, where one layer has {self.shape}. "
                "Stack them with out_axes=0."
            )
        return stack

    def check(self) -> None:
        """Raises unless a recipe would have an effect on the layer.

        Raises:
          ValueError: the layer computes its product by a function of its own, or is one
            of a stack along another axis than the first.
        """
        name, found = self.attribute, getattr(self.module, self.attribute)
        if getattr(self.module, "dot_general_cls", None) is not None:
            name, found = "dot_general_cls", self.module.dot_general_cls
        if found not in self.default and not isinstance(found, Gemm):
            raise ValueError(
                f"quantize_model: {name} must be Flax's default, or the recipe has no "
                f"effect, got {found!r} at {self.path!r}. Set the layer's {name} back "
                "first."
            )
        _ = self.stack

    def set_recipe(self, recipe: Recipe, *, rngs: nnx.Rngs) -> None:
        """Quantizes the layer, or replaces the recipe of one that is."""
        if self.gemm is not None:
            self.gemm.set_recipe(recipe)
            return
        gemm = self.make(recipe, rngs=rngs, stack=self.stack)
        setattr(self.module, self.attribute, nnx.data(gemm))


def layers(model: nnx.Module) -> Iterator[Layer]:
    """Yields every layer of a model that takes a recipe; tied layers once."""
    for path, module in nnx.iter_modules(model):
        layer = Layer.of("/".join(map(str, path)), module)
        if layer is not None:
            yield layer


def quantize_model(
    model: nnx.Module, policy: Policy | Recipe, *, rngs: nnx.Rngs
) -> None:
    """Gives the linear layers of a model their recipes, in place.

    These are `nnx.Linear`, `nnx.LinearGeneral`, with it the projections of
    `nnx.MultiHeadAttention`, `nnx.Einsum`, and `fp4jax.nnx.GroupedLinear`, an output
    head among them: a rule such as `Rule("head", recipes.bf16())` leaves it out. What
    multiplies elsewhere is not reached: convolutions, `nnx.Embed.attend`, the products
    of queries, keys and values.

    Layers stacked for a scan are recognized by the leading axes of their kernels. A
    model that is quantized already changes its recipes and keeps its keys, so one call
    moves it to the next phase of a `Schedule`. A call that raises changes nothing.

    A recipe acts where a layer multiplies by its `dot_general` or `einsum_op`. In a
    subclass whose `__call__` does not, it has no effect: `fp4jax.explain(model, x)`
    shows such a layer as not called.

    Args:
      model: any module.
      policy: maps layer paths such as "blocks/0/attention/query" to recipes; the path
        of stacked layers has no index. A recipe alone is for all layers.
      rngs: its stream "quant" provides the keys.

    Raises:
      ValueError: a rule that matches no layer; a layer with a `dot_general`,
        `dot_general_cls`, `einsum_op` or `ragged_dot` of its own; layers stacked along
        another axis than the first; layers that share a `DotGeneral` and would take
        different recipes; a model without linear layers; `rngs` without the stream.
      TypeError: `policy` is neither a policy nor a recipe; `rngs` is no `nnx.Rngs`.

    Example:
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(attention, recipes.ufp4(), rngs=nnx.Rngs(1))
      >>> [layer.path for layer in fp4jax.nnx.layers(attention)]
      ['key', 'out', 'query', 'value']
    """
    policy = Policy.of(policy, "quantize_model")
    check_rngs(rngs, "quantize_model", "quant")
    found = list(layers(model))
    if not found:
        raise ValueError(
            "quantize_model: model must have an nnx.Linear, nnx.LinearGeneral, "
            f"nnx.Einsum or GroupedLinear, got {type(model).__name__} without."
        )
    policy.check(layer.path for layer in found)
    for layer in found:
        layer.check()
    _check_shared(found, policy)
    for layer in found:
        layer.set_recipe(policy.recipe(layer.path), rngs=rngs)


def _check_shared(found: list[Layer], policy: Policy) -> None:
    """Raises where layers with one `Gemm` would get different recipes from a policy."""
    first: dict[int, Layer] = {}
    for layer in found:
        other = first.setdefault(id(layer.gemm), layer)
        if layer.gemm is None or policy.recipe(other.path) == policy.recipe(layer.path):
            continue
        raise ValueError(
            "quantize_model: layers that share a DotGeneral must have one recipe, got "
            f"different ones for {other.path!r} and {layer.path!r}. Give each its own, "
            "or let one rule match both."
        )
