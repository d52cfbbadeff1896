"""The layers every block is made of; parameters in float32, activations in bfloat16."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp4jax.kernels.sums import float32_sums
from fp4jax.models.config import PARTS, ModelConfig
from fp4jax.nnx import DotGeneral, Gemm
from fp4jax.numerics import Quantizer, Site
from fp4jax.ops.dot_general import pack_x
from fp4jax.ops.gather import Gather
from fp4jax.ops.residuals import PackedOperand
from fp4jax.recipes import Recipe
from fp4jax.sharding import constrain, num_shards, spec, used

ACTIVATION_DTYPE = jnp.bfloat16
LINEAR_OUTPUT = "linear_output"  # what rematerialization may save


def _as_they_are(arrays, /, **_):
    return arrays


class Linear(nnx.Linear):
    """y = x W without bias, its three GEMMs computed as `recipe` says.

    The float32 kernel reaches the recipe as it is, so that a quantizer rounds once and
    not through bfloat16; `nnx.Linear` would promote both operands to one dtype first.

    Args:
      in_features: rows of the kernel.
      out_features: columns of the kernel.
      axes: what rows and columns are, which says how they are spread over a mesh.
      recipe: how fprop, dgrad and wgrad quantize their operands.
      init_std: standard deviation of the truncated normal that the kernel starts from,
        in units of 1 / sqrt(in_features).
      rngs: streams `params` (the kernel) and `quant` (the noise key).
    """

    multiplies_kernel = True  # so that it can be quantized once for several calls

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None],
        recipe: Recipe,
        init_std: float = 1.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(
                init_std**2, "fan_in", "truncated_normal"
            ),
            dot_general=DotGeneral(recipe, rngs=rngs),
            promote_dtype=_as_they_are,
            preferred_element_type=ACTIVATION_DTYPE,
            kernel_metadata={"axes": axes},
            rngs=rngs,
        )
        self.axes = axes

    def __call__(
        self, x: jax.Array, *, packed: PackedOperand | None = None
    ) -> jax.Array:
        """Returns y [*b, out_features] bfloat16 of x [*b, in_features].

        Args:
          x: float32 or bfloat16.
          packed: from `packed_once`, what layers that take the same x save of it.
        """
        y = self.dot_general(
            x,
            self.kernel[...],
            (((x.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=ACTIVATION_DTYPE,
            packed=packed,
            gather=gathered(*self.axes),
        )
        y = constrain(y, "batch", *(None,) * (y.ndim - 2), self.axes[1])
        return checkpoint_name(y, LINEAR_OUTPUT)


def gathered(*axes: str | None) -> Gather | None:
    """Returns how products take a weight with such axes; None where it lies so."""
    if num_shards("embed") == 1:
        return None
    return Gather(stored=spec(*axes), used=used(*axes))


def packed_once(x: jax.Array, *layers: Linear) -> PackedOperand | None:
    """Returns one copy of x for the backward pass of all layers that take it.

    None where they save x as it is, which is one array as well, and where each must
    pack x for itself: their recipes quantize it differently, with noise, or by an amax
    that each holds.
    """
    recipe = shared_recipe(*(layer.dot_general for layer in layers))
    return None if recipe is None else pack_x(x, recipe=recipe)


def shared_recipe(*gemms: Any) -> Recipe | None:
    """Returns by which recipe one packed x serves all products, None where by none."""
    # A product that something else watches saves for itself.
    recipes = [gemm.recipe for gemm in gemms if isinstance(gemm, Gemm)]
    sharing = {_sharing(recipe) for recipe in recipes}
    if len(recipes) < len(gemms) or sharing & {None} or len(sharing) > 1:
        return None
    return recipes[0]


def _sharing(recipe: Recipe) -> tuple[Site, Quantizer] | None:
    """Returns what recipes that can share a packed x have in common, or None."""
    site, x_period = recipe.packed_site, recipe.every[0]
    if recipe.residuals != "packed" or site is None or x_period is not None:
        return None
    quantizer = recipe.sites[site]
    return None if quantizer is None or quantizer.draws else (site, quantizer)


class RMSNorm(nnx.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * scale, in float32, returned in x's dtype."""

    def __init__(self, size: int, *, epsilon: float, rngs: nnx.Rngs):
        super().__init__(size, epsilon=epsilon, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes each vector of x [*b, size]."""
        return super().__call__(x).astype(x.dtype)


class LayerNorm(nnx.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps), in float32, returned in x's dtype.

    It has no parameters, as in OLMo.

    References: Groeneveld et al., OLMo, 2024.
    """

    def __init__(self, size: int, *, epsilon: float, rngs: nnx.Rngs):
        super().__init__(
            size, epsilon=epsilon, use_bias=False, use_scale=False, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes each vector of x [*b, size]."""
        x_f32 = x.astype(jnp.float32)
        return super().__call__(x_f32).astype(x.dtype)


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> RMSNorm | LayerNorm:
    """Returns the norm before each part of a block and before the output head."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.d_model, epsilon=config.norm_eps, rngs=rngs)


class Embed(nnx.Module):
    """The table of token vectors [v, d]; also the output head where the two are tied.

    Vectors are looked up in float32 and only then rounded to bfloat16, so that the
    gradient of a frequent token is summed in float32.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.d_model)
        normal = jax.random.normal(rngs.params(), shape, jnp.float32)
        # XLA would merge the factor with that of the normal numbers: the barrier keeps
        # compiled ones equal to those that are not, bit for bit.
        normal = lax.optimization_barrier(normal)
        self.embedding = nnx.Param(
            normal * jnp.float32(config.d_model**-0.5),
            axes=("vocab", "embed"),
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the vectors [b, t, d] of tokens [b, t]."""
        # A device looks up its features for all tokens of those that share the table.
        tokens = constrain(tokens, "replica", None)
        x = self.embedding[...][tokens].astype(ACTIVATION_DTYPE)
        x = constrain(x, "replica", None, "embed")
        return constrain(x, "batch", None, "embed")

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns the float32 logits [b, t, v] of x [b, t, d]."""
        return _logits(x, self.embedding[...], axis=1)


class Head(nnx.Module):
    """The output head [d, v] of a model whose embeddings are not tied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(
            init(rngs.params(), (config.d_model, config.vocab_size), jnp.float32),
            axes=("embed", "vocab"),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the float32 logits [b, t, v] of x [b, t, d]."""
        return _logits(x, self.kernel[...], axis=0)


def residual_std(config: ModelConfig) -> float:
    """Returns the scale of a kernel that writes to the residual stream.

    Every part of a block writes once, so the stream's variance then does not grow with
    depth.

    References: Radford et al., GPT-2, 2019.
    """
    return 1 / math.sqrt(sum(len(PARTS[kind]) for kind in config.kinds))


def _logits(x: jax.Array, kernel: jax.Array, *, axis: int) -> jax.Array:
    """Returns the logits [b, t, v] of x [b, t, d] and a kernel, whose d is its axis."""
    names = ("embed", "vocab") if axis == 0 else ("vocab", "embed")
    return constrain(_head(gathered(*names), axis, x, kernel), "batch", None, "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head(
    gather: Gather | None, axis: int, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Returns the float32 sums of products of bfloat16 operands, backward too.

    The gradient of the kernel stays float32: that of a bfloat16 operand is rounded, and
    over parts of a batch once for each.
    """
    return _sums(*_operands(gather, x, kernel), (x.ndim - 1,), (axis,))


def _head_fwd(gather: Gather | None, axis: int, x: jax.Array, kernel: jax.Array):
    return _head(gather, axis, x, kernel), (x, kernel)


def _head_bwd(
    gather: Gather | None,
    axis: int,
    saved: tuple[jax.Array, jax.Array],
    g: jax.Array,
):
    x, kernel = _operands(gather, *saved)
    g = g.astype(ACTIVATION_DTYPE)
    dx = _sums(g, kernel, (g.ndim - 1,), (1 - axis,))
    tokens = tuple(range(g.ndim - 1))
    dkernel = _sums(*((x, g) if axis == 0 else (g, x)), tokens, tokens)
    if gather is not None:
        dkernel = gather.store(dkernel)
    return dx.astype(saved[0].dtype), dkernel.astype(saved[1].dtype)


_head.defvjp(_head_fwd, _head_bwd)


def _sums(
    a: jax.Array, b: jax.Array, of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> jax.Array:
    """Returns the float32 sums of products over these axes of both."""
    return float32_sums(a, b, dimension_numbers=((of_a, of_b), ((), ())))


def _operands(
    gather: Gather | None, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x = x.astype(ACTIVATION_DTYPE)
    if gather is None:
        return x, kernel.astype(ACTIVATION_DTYPE)
    return x, gather.cast(kernel, ACTIVATION_DTYPE)
