"""Quantizing the layers of a Linen model that exists."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import jax
from flax import linen as nn

from fp4jax.linen.gemm import dot_general_cls, einsum_layer
from fp4jax.linen.intercept import intercepting
from fp4jax.linen.state import as_floats, combine_by_max
from fp4jax.policies import Policy
from fp4jax.recipes import Recipe

# Part of the key of every jit cache: a block that `nn.jit` traced without a policy, or
# under another one, is traced anew.
_ACTIVE = jax.make_user_context()
_LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_INITS = ("init", "init_with_output", "lazy_init")


def quantize(module: nn.Module, policy: Policy | Recipe) -> nn.Module:
    """Quantizes the layers of an existing model.

    Reaches every `nn.Dense`, `nn.DenseGeneral` (so the projections of attention) and
    `nn.Einsum`, wherever they are made, under `nn.scan`, `nn.remat`, `nn.vmap` and
    `nn.jit` too. Embeddings, convolutions and the two products of attention stay as
    they are. Noise and its key are as in `DotGeneral`: an `nn.scan` or `nn.vmap` must
    list {"quant": True} in `split_rngs` for a recipe that draws, and the collection
    "_overwrite_with_gradient" in `variable_axes` for one that holds amaxes.

    A layer's path is "/".join(layer.path) from `module`, as in the parameter tree; the
    layers of an `nn.scan` share one. `init` raises for a rule that gives no layer its
    recipe: where parameters come from elsewhere, `jax.eval_shape(model.init, ...)` is
    that check.

    Args:
      module: any Linen module; a quantized one takes the new policy instead of its own,
        as between the phases of a schedule.
      policy: the recipe of each layer by its path, or one recipe for all.

    Returns:
      A module of a subclass, with the same fields, parameters and methods.

    Raises:
      TypeError: no Linen module, or no policy.
      ValueError: when called, a layer that has a `dot_general` or `dot_general_cls` of
        its own, or a subclass of a layer that does not use its.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from fp4jax import linen, recipes
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)])
      >>> model = linen.quantize(model, recipes.ufp4())
      >>> variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((4, 32)))
      >>> sorted(variables["params"])
      ['layers_0', 'layers_2']
    """
    if not isinstance(module, nn.Module):
        is_class = isinstance(module, type)
        got = f"the class {module.__name__}" if is_class else type(module).__name__
        raise TypeError(
            f"quantize: module must be a Linen module, got {got}. An NNX model takes "
            "fp4jax.nnx.quantize_model."
        )
    policy = Policy.of(policy, "quantize")
    base = getattr(type(module), "_quantizes", type(module))
    fields = (f.name for f in dataclasses.fields(module) if f.init)
    return _subclass(base, policy)(**{name: getattr(module, name) for name in fields})


@functools.cache
def _subclass(base: type[nn.Module], policy: Policy) -> type[nn.Module]:
    """Returns the class whose every entry point injects a policy."""
    own = [
        name
        for name in dir(base)
        if inspect.isfunction(inspect.getattr_static(base, name))
        and not hasattr(nn.Module, name)
        and name != "setup"
    ]
    names = {"__call__", *_INITS, *own} & {*dir(base)}
    methods = {name: _entry_point(getattr(base, name), policy) for name in names}
    methods["apply"] = _entry_point(_apply_of(base), policy)
    attributes = {"__module__": base.__module__, "_quantizes": base}
    return type(f"Quantized{base.__name__}", (base,), attributes | methods)


def _entry_point(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Wraps a method so that layers called within are quantized."""

    @nn.nowrap
    @functools.wraps(function, updated=())
    def method(self, *args, **kwargs):
        bound = self.scope is not None
        initializing = function.__name__ in _INITS or (bound and self.is_initializing())
        with _inject(policy, self.path if bound else (), initializing):
            return function(self, *args, **kwargs)

    return method


def _apply_of(base: type[nn.Module]) -> Callable[..., Any]:
    """Returns the `apply` of a class, for variables with the state of held scales."""

    @functools.wraps(base.apply, updated=())
    def apply(self, variables, *args, **kwargs):
        return as_floats(base.apply(self, combine_by_max(variables), *args, **kwargs))

    return apply


@contextlib.contextmanager
def _inject(
    policy: Policy, root: tuple[str, ...], initializing: bool
) -> Generator[None]:
    """Quantizes the layers called within, once however deeply nested."""
    if _ACTIVE.value is not None and _ACTIVE.value[0] == policy:
        yield
        return
    interceptor = _Interceptor(policy, len(root))
    # A trace of its own for each initialization, which has to see all paths.
    token = object() if initializing else None
    with _ACTIVE((policy, token)), intercepting(interceptor):
        yield
    if initializing:
        interceptor.check()


class _Interceptor:
    """Gives layers the `DotGeneral` of a policy for the time of a call."""

    def __init__(self, policy: Policy, depth: int):
        self.policy, self.depth = policy, depth
        self.paths: list[str] = []

    def __call__(self, method, args, kwargs, context) -> Any:
        """Calls a method, quantized if it is that of a layer."""
        module, function = context.module, context.orig_method.func
        layer = next((kind for kind in _LAYERS if isinstance(module, kind)), None)
        if layer is None or context.method_name != "__call__":
            return method(*args, **kwargs)
        path = "/".join(module.path[self.depth :])
        if function is inspect.unwrap(layer.__call__):
            self.paths.append(path)
            return self._quantized(path, module, method, args, kwargs)
        calls = len(self.paths)
        y = method(*args, **kwargs)
        # Lifted methods, which wrap another, may have been traced before.
        if len(self.paths) == calls and not hasattr(function, "__wrapped__"):
            raise ValueError(
                f"quantize: {path!r} must call {layer.__name__}.__call__ to be "
                f"quantized, got a {type(module).__name__} that does not."
            )
        return y

    def _quantized(self, path: str, module: Any, method, args, kwargs) -> Any:
        recipe = self.policy.recipe(path)
        if isinstance(module, nn.Einsum):
            return einsum_layer(module, recipe, *args, **kwargs)
        for name in ("dot_general", "dot_general_cls"):
            if (own := getattr(module, name)) is not None:
                raise ValueError(
                    f"quantize: {name} of {path!r} must be None, got {own!r}. Remove "
                    "it; the policy decides."
                )
        object.__setattr__(module, "dot_general_cls", dot_general_cls(recipe))
        try:
            return method(*args, **kwargs)
        finally:
            object.__setattr__(module, "dot_general_cls", None)

    def check(self) -> None:
        """Raises unless the policy met its layers."""
        if not self.paths:
            raise ValueError(
                "quantize: module must have a Dense, DenseGeneral or Einsum layer, got "
                "none."
            )
        self.policy.check(dict.fromkeys(self.paths))
