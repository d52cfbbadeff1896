"""How the state of a run lies on a mesh, and which meshes divide it."""

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.models import ModelConfig, Transformer
from fp4jax.models.config import PARTS
from fp4jax.nnx import GroupedLinear, layers
from fp4jax.nnx.inject import Layer
from fp4jax.numerics import Site
from fp4jax.sharding import RULES, context_mesh, num_shards, spec, used

T = TypeVar("T")


def partitioning(tree: Any) -> Any:
    """Returns a `PartitionSpec` for every variable and every other array of a tree.

    A variable lies as the axes in its metadata say; a stack of layers is not spread
    over its leading axes. What names no axes is whole on every device.
    """

    def of(x: Any) -> P:
        axes = x.get_metadata().get("axes") if isinstance(x, nnx.Variable) else None
        if axes is None:
            return P()
        return spec(*(None,) * (len(x.shape) - len(axes)), *axes)

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def spread(tree: T) -> T:
    """Makes the arrays of a tree lie on the context's mesh as `partitioning` says."""
    if context_mesh() is None:
        return tree
    return lax.with_sharding_constraint(tree, partitioning(tree))


# What the blocks of a site run along: the contraction, and the other side of squares.
_ALONG = {
    Site.FPROP_X: ("k", "tokens"),
    Site.FPROP_W: ("k", "n"),
    Site.DGRAD_DY: ("n", "tokens"),
    Site.DGRAD_W: ("n", "k"),
    Site.WGRAD_X: ("tokens", "k"),
    Site.WGRAD_DY: ("tokens", "n"),
}


def check_mesh(model: Transformer, mesh: Mesh, *, tokens: int) -> None:
    """Raises unless a mesh divides a model, whole blocks of its recipes a device.

    Args:
      model: may have shapes in place of arrays.
      mesh: from `make_mesh`.
      tokens: of a batch, or of a microbatch, on one device.

    Raises:
      ValueError: a size or a block that does not divide.
    """
    for name, axis, size in _sizes(model.config):
        if size % (shards := num_shards(axis, mesh)):
            sizes = " or ".join(each for each in RULES[axis] if mesh.shape[each] > 1)
            raise ValueError(
                f"check_mesh: {name} must be a multiple of {' * '.join(RULES[axis])} = "
                f"{shards} of the mesh, got {name}={size}. Give the mesh a smaller "
                f"{sizes}, or the model another {name}, such as "
                f"{math.ceil(size / shards) * shards}."
            )
    for layer in layers(model):
        for site, axis, multiple, size in _divided(layer, mesh, tokens=tokens):
            if size % multiple:
                raise ValueError(
                    f"check_mesh: {axis} of {layer.path!r} must be a multiple of "
                    f"{multiple} on a device, whole blocks and rotations of "
                    f"{site.name}, got {size}. Divide it less: give the mesh smaller "
                    "sizes, or make the model or the batch larger."
                )


def _divided(
    layer: Layer, mesh: Mesh, *, tokens: int
) -> Iterator[tuple[Site, str, int, int]]:
    """Yields where blocks run along a divided axis: their multiple, a device's size."""
    axes, shape = layer.module.kernel.get_metadata().get("axes"), layer.shape[-2:]
    if layer.gemm is None or axes is None:
        return
    for site, quantizer in layer.gemm.recipe.sites.items():
        if quantizer is None:
            continue
        layout = P(*(spec if site.is_w else used)(*axes)[-2:])
        part = NamedSharding(mesh, layout).shard_shape(shape)
        of_axes = zip("kn", part, shape, strict=True)
        sizes = {axis: size for axis, size, whole in of_axes if size < whole}
        in_tiles = isinstance(layer.module, GroupedLinear)  # of whole blocks anyhow
        if num_shards("batch", mesh) > 1 and not in_tiles:
            sizes["tokens"] = tokens
        for axis in _ALONG[site] if quantizer.is_square else _ALONG[site][:1]:
            if axis in sizes:
                yield site, axis, quantizer.multiple, sizes[axis]


def _sizes(config: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """Yields what a mesh divides: its name, which axis it is, its size."""
    parts = {part for kind in config.kinds for part in PARTS[kind]}
    yield "vocab_size", "vocab", config.vocab_size
    yield "d_model", "embed", config.d_model
    if "attention" in parts:
        yield "num_heads", "heads", config.num_heads
        yield "num_kv_heads", "heads", config.num_kv_heads
    if "mlp" in parts:
        yield "d_ff", "mlp", config.d_ff
    if config.moe is not None:
        yield "moe.num_experts", "expert", config.moe.num_experts
        if config.moe.d_shared:
            yield "moe.d_shared", "mlp", config.moe.d_shared
