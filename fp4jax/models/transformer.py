"""A dense decoder-only transformer whose linear layers take their recipe by path."""

import itertools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax import policies
from fp4jax.models.attention import Attention, document_mask, rope
from fp4jax.models.config import ModelConfig
from fp4jax.models.layers import LINEAR_OUTPUT, Embed, Head, RMSNorm, SwiGLU
from fp4jax.nnx import layers
from fp4jax.policies import Policy, Schedule
from fp4jax.recipes import Recipe

SITES = (
    "attention/query",
    "attention/key",
    "attention/value",
    "attention/out",
    "mlp/gate",
    "mlp/up",
    "mlp/down",
)

# By name, not by operation: the product inside a quantized linear has float32 sums.
_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        self.attention_norm = RMSNorm(config, rngs=rngs)
        self.attention = Attention(config, recipes, rngs=rngs)
        self.mlp_norm = RMSNorm(config, rngs=rngs)
        self.mlp = SwiGLU(config, recipes, rngs=rngs)

    def __call__(self, x: jax.Array, **context) -> jax.Array:
        """Returns x [b, t, d] after both; `context` is of the attention."""
        x = x + self.attention(self.attention_norm(x), **context)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Embedding, blocks, norm and head; `policy` chooses the recipe of every linear.

    Consecutive layers with equal recipes are stacked, every array with a leading layer
    axis, and run as one scan; `stacks` holds these runs in order. The keys of a layer
    depend on its index alone, so initial parameters are the same under every policy.

    Args:
      config: the shape.
      policy: maps layer paths, as `layer_paths` lists them, to recipes. Under a
        schedule layers are stacked whose recipes are equal in each of its phases, so
        that all phases share one state; the model starts in the first.
      rngs: streams `params` and `quant`.

    Raises:
      ValueError: a policy has a rule that no layer path matches.
    """

    def __init__(
        self, config: ModelConfig, policy: Policy | Schedule, *, rngs: nnx.Rngs
    ):
        schedule = Schedule.of(policy)
        schedule.check(layer_paths(config))
        self.config = config
        self.embed = Embed(config, rngs=rngs)
        params_keys = jax.random.split(rngs.params(), config.num_layers)
        quant_keys = jax.random.split(rngs.quant(), config.num_layers)
        self.stacks = nnx.List()
        for run, recipes in _runs(config, schedule):
            self.stacks.append(
                _stack(
                    config,
                    recipes,
                    params_keys=params_keys[run],
                    quant_keys=quant_keys[run],
                )
            )
        self.norm = RMSNorm(config, rngs=rngs)
        self.head = None if config.tie_embeddings else Head(config, rngs=rngs)
        for phase in reversed(schedule.policies):
            self.set_policy(phase)  # so that it has the state of every phase

    def set_policy(self, policy: Policy) -> None:
        """Gives every linear its recipe under another policy; its state stays.

        Raises:
          ValueError: the policy has a rule that no layer path matches, or tells layers
            apart that are stacked.
        """
        policy.check(layer_paths(self.config))
        first = 0
        for stack in self.stacks:
            end = first + len(stack.attention_norm.scale.get_value())
            for layer in layers(stack):
                paths = [f"blocks/{i}/{layer.path}" for i in range(first, end)]
                recipe, *others = {policy.recipe(path) for path in paths}
                if others:
                    raise ValueError(
                        "set_policy: policy must have one recipe for layers that are "
                        f"stacked, got {1 + len(others)} for {paths[0]} to {paths[-1]}."
                        " Build the Transformer with a Schedule of all its policies."
                    )
                assert layer.gemm is not None  # every linear of ours has one
                layer.gemm.set_recipe(recipe)
            first = end

    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of every next token.

        Args:
          inputs: [b, t] int32 tokens.
          segment_ids: [b, t] int32, the document of each token; a token sees only its
            own. None: a row is one document.
          positions: [b, t] int32 within the document. None: counted along the row.

        Returns:
          [b, t, v] float32.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(inputs)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        config = self.config
        rotation = rope(positions, head_dim=config.head_dim, theta=config.rope_theta)
        context = {"mask": document_mask(segment_ids), "rotation": rotation}
        x = self.embed(inputs)
        for stack in self.stacks:
            x = _apply(stack, x, config=config, **context)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


def layer_paths(config: ModelConfig) -> list[str]:
    """Returns the path of every linear that takes a recipe, as `blocks/3/mlp/up`."""
    return [f"blocks/{i}/{site}" for i in range(config.num_layers) for site in SITES]


def num_params(config: ModelConfig) -> int:
    """Returns the number of parameters, allocating none."""
    model = nnx.eval_shape(
        lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    )
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _runs(
    config: ModelConfig, schedule: Schedule
) -> Iterator[tuple[slice, Mapping[str, Recipe]]]:
    """Yields the layers of each longest run of equal blocks, and their recipes."""

    def recipes(layer):
        paths = {site: f"blocks/{layer}/{site}" for site in SITES}
        return [
            {site: policy.recipe(path) for site, path in paths.items()}
            for policy in schedule.policies
        ]

    for run, indices in itertools.groupby(range(config.num_layers), recipes):
        first, *others = indices
        yield slice(first, first + 1 + len(others)), run[0]


def _stack(
    config: ModelConfig,
    recipes: Mapping[str, Recipe],
    *,
    params_keys: jax.Array,
    quant_keys: jax.Array,
) -> Block:
    """Returns equal blocks as one, its arrays stacked; the keys are [layers]."""

    @nnx.vmap
    def make(params_key, quant_key):
        rngs = nnx.Rngs(params=params_key, quant=quant_key)
        return Block(config, recipes, rngs=rngs)

    return make(params_keys, quant_keys)


def _apply(stack: Block, x: jax.Array, *, config: ModelConfig, **context) -> jax.Array:
    """Runs the layers of a stack one after another."""
    graph, layers = nnx.split(stack)

    def body(x, layer):
        return nnx.merge(graph, layer)(x, **context), None

    if config.remat != "none":
        policy = _REMAT_POLICIES[config.remat]
        body = jax.checkpoint(body, policy=policy, prevent_cse=not config.scan_layers)
    return lax.scan(body, x, layers, unroll=1 if config.scan_layers else True)[0]
