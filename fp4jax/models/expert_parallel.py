"""Experts that are spread over a mesh: each device computes those that it has."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from fp4jax.nnx import GroupedLinear, Held, QuantizedWeight, RaggedDot
from fp4jax.ops.gather import Gather
from fp4jax.ops.grouped_dot import gather_experts, part_of_experts
from fp4jax.sharding import DATA, FSDP, RULES, context_mesh, spec, spreads_rows

T = TypeVar("T")

_EXPERTS = P(RULES["expert"])
_HELD = P((DATA, FSDP), RULES["expert"])


def is_spread(layers: Sequence[GroupedLinear], rows: int) -> bool:
    """Returns whether the mesh of the context spreads layers of experts.

    Not rows that it does not divide, and no layers that something watches: these run as
    on one device.
    """
    is_whole = all(isinstance(layer.ragged_dot, RaggedDot) for layer in layers)
    return is_whole and spreads_rows(rows)


def over_devices(
    function: Callable[..., T], layers: Sequence[GroupedLinear], *tokens: Any
) -> T:
    """Calls `function(layers, *tokens)` on every device, with its parts of them.

    Weights are quantized where they are stored and gathered over fsdp as codes; their
    gradients are summed and scattered back in float32.

    Args:
      function: of layers that have the experts of a device and the tokens of a device
        to arrays of a row for each row of the tokens.
      layers: of experts.
      *tokens: arrays [b, ...], whose rows the mesh spreads.
    """
    graphs, states = zip(*map(_with_codes, layers), strict=True)

    def of_device(states: Any, *tokens: jax.Array) -> T:
        pairs = zip(graphs, states, layers, strict=True)
        return function([_merged(*pair) for pair in pairs], *tokens)

    rows = spec("batch")
    return jax.shard_map(
        of_device,
        in_specs=(tuple(map(_specs, states)), *(rows for _ in tokens)),
        out_specs=rows,
        check_vma=False,
    )(states, *tokens)


def _with_codes(layer: GroupedLinear) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a layer that has its weights as codes, gathered over fsdp."""
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, state, copy=True)
    dot, w, stored = _dot(layer), layer.kernel[...], _stored(layer)
    gather = Gather(stored=stored, used=P(stored[0], None, None))
    packed = gather_experts(w, dot.packed(w), gather, recipe=dot.recipe)
    dot.weight.set_value(lax.stop_gradient(packed))
    if (held := dot.held.get_value()) is not None:
        dot.held.set_value(_copies(held))
    return nnx.split(layer)


def _merged(graph: Any, state: nnx.State, whole: GroupedLinear) -> GroupedLinear:
    """Returns the layer of a device's experts."""
    layer = nnx.merge(graph, state)
    dot, w = _dot(layer), layer.kernel[...]
    dot.weight.set_value(part_of_experts(dot.weight.get_value(), w.shape[0]))
    if (held := dot.held.get_value()) is not None:
        dot.held.set_value(held[0])
    # Products have codes: this is what the gradient is of, and no program computes it.
    (axis,) = (i for i, axes in enumerate(_stored(whole)) if axes and FSDP in axes)
    layer.kernel.set_value(lax.all_gather(w, FSDP, axis=axis, tiled=True))
    return layer


def _dot(layer: GroupedLinear) -> RaggedDot:
    assert isinstance(layer.ragged_dot, RaggedDot)  # as `is_spread` has checked
    return layer.ragged_dot


def _stored(layer: GroupedLinear) -> P:
    """Returns how a kernel is stored."""
    return spec(*layer.kernel.get_metadata()["axes"])


def _specs(state: nnx.State) -> Any:
    """Returns how the variables of a layer lie where devices take their parts."""

    def of(variable: nnx.Variable) -> Any:
        if isinstance(variable, nnx.Param):
            return spec(*variable.get_metadata()["axes"])
        if isinstance(variable, Held):
            return _HELD
        if isinstance(variable, QuantizedWeight):
            # Codes, scales and amaxes are of experts; signs of a rotation are not, be
            # there as many, nor is a factor of all.
            is_signs = lambda path: path[-1] == jax.tree_util.GetAttrKey("signs")
            return jax.tree_util.tree_map_with_path(
                lambda path, x: P() if is_signs(path) or not x.ndim else _EXPERTS,
                variable,
            )
        return P()

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


@jax.custom_vjp
def _copies(held: jax.Array) -> jax.Array:
    """Returns the amaxes for each device along data and fsdp, float32 [devices, e, 3].

    Their cotangents, new amaxes, combine by maximum.
    """
    mesh = context_mesh()
    assert mesh is not None
    held = lax.convert_element_type(held, jnp.float32)
    copies = mesh.shape[DATA] * mesh.shape[FSDP]
    return jnp.broadcast_to(held[None], (copies, *held.shape))


def _copies_fwd(held: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _copies(held), held


def _copies_bwd(held: jax.Array, new: jax.Array) -> tuple[jax.Array]:
    return (lax.convert_element_type(jnp.max(new, 0), held.dtype),)


_copies.defvjp(_copies_fwd, _copies_bwd)
