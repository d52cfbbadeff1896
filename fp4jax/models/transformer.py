"""A decoder-only model whose linear layers take their recipe by path."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.models import moe
from fp4jax.models.attention import document_mask, rope
from fp4jax.models.block import Block
from fp4jax.models.config import PARTS, ModelConfig
from fp4jax.models.layers import LINEAR_OUTPUT, Embed, Head, make_norm
from fp4jax.models.mamba2 import count_documents
from fp4jax.models.moe import Balance, Balances
from fp4jax.models.runs import Run, find_runs
from fp4jax.nnx import layers
from fp4jax.nnx.arguments import check_rngs
from fp4jax.ops.held import AMAX
from fp4jax.policies import Policy, Schedule
from fp4jax.recipes import Recipe

# By name, not by operation: the product inside a quantized linear has float32 sums.
_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT, AMAX),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Output(NamedTuple):
    """What a model returns.

    Attributes:
      logits: float32 [b, t, v], of every next token.
      balances: for each of the model's stacks how its experts were used, every array
        with a leading axis of the stacked blocks; None where there are none.
    """

    logits: jax.Array
    balances: Balances

    @property
    def aux_loss(self) -> jax.Array:
        """What is added to the loss, float32 []."""
        return moe.aux_loss(self.balances)

    @property
    def loads(self) -> jax.Array | None:
        """int32 [blocks, e], the tokens of each expert; None without experts."""
        return moe.loads(self.balances)


class Transformer(nnx.Module):
    """Embedding, blocks, norm and head; `policy` chooses the recipe of every linear.

    Units of blocks that follow one another with equal recipes are one run: each block
    of the unit is stacked with its repetitions, every array with a leading axis, and
    the units run as one scan. The keys of a block depend on its index alone, so initial
    parameters are the same under every policy.

    Args:
      config: the shape.
      policy: maps layer paths, as `config.layer_paths` lists them, to recipes. Under a
        schedule blocks are stacked whose recipes are equal in each of its phases, so
        that all phases share one state; the model starts in the first.
      rngs: streams `params` and `quant`.

    Attributes:
      runs: what the blocks repeat.
      stacks: the stacked blocks, one for each block of the unit of each run.

    Raises:
      ValueError: a policy has a rule that no layer path matches.
    """

    def __init__(
        self, config: ModelConfig, policy: Policy | Schedule, *, rngs: nnx.Rngs
    ):
        check_rngs(rngs, "Transformer", "params", "quant")
        schedule = Schedule.of(policy)
        schedule.check(config.layer_paths)
        self.config = config
        self.embed = Embed(config, rngs=rngs)
        params_keys = jax.random.split(rngs.params(), config.num_layers)
        quant_keys = jax.random.split(rngs.quant(), config.num_layers)
        recipes = _recipes(config, schedule)
        self.runs = _runs(config, recipes)
        self.stacks = nnx.List(
            _stack(
                config,
                config.kinds[place[0]],
                recipes[place[0]][0],
                params_keys=params_keys[place.start : place.stop : place.step],
                quant_keys=quant_keys[place.start : place.stop : place.step],
            )
            for place in self.places
        )
        self.norm = make_norm(config, rngs=rngs)
        self.head = None if config.tie_embeddings else Head(config, rngs=rngs)
        for phase in reversed(schedule.policies):
            self.set_policy(phase)  # so that it has the state of every phase

    @property
    def places(self) -> tuple[range, ...]:
        """For each stack, the indices of its blocks."""
        return tuple(place for run in self.runs for place in run.places)

    def set_policy(self, policy: Policy) -> None:
        """Gives every linear its recipe under another policy; its state stays.

        Raises:
          ValueError: the policy has a rule that no layer path matches, or tells layers
            apart that are stacked.
        """
        policy.check(self.config.layer_paths)
        for place, stack in zip(self.places, self.stacks, strict=True):
            for layer in layers(stack):
                paths = [f"blocks/{i}/{layer.path}" for i in place]
                recipe, *others = {policy.recipe(path) for path in paths}
                if others:
                    raise ValueError(
                        "set_policy: policy must have one recipe for layers that are "
                        f"stacked, got {1 + len(others)} for {paths[0]} to {paths[-1]}."
                        " Build the Transformer with a Schedule of all its policies."
                    )
                assert layer.gemm is not None  # every linear of ours has one
                layer.gemm.set_recipe(recipe)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of every next token, those of `forward`."""
        return self.forward(inputs, segment_ids=segment_ids, positions=positions).logits

    def forward(
        self,
        inputs: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> Output:
        """Returns the logits of every next token, and how experts were used.

        Args:
          inputs: [b, t] int32 tokens.
          segment_ids: [b, t] int32, the document of each token; a token sees only its
            own. 0 is padding, which the use of experts does not count. None: a row is
            one document.
          positions: [b, t] int32 within the document. None: counted along the row.

        Raises:
          ValueError: inputs that are no rows of tokens, or none at all.
        """
        _check_inputs(inputs)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        context = _context(inputs, segment_ids, positions, config=self.config)
        x = self.embed(inputs)
        stacks, balances = iter(self.stacks), []
        for run in self.runs:
            unit = list(itertools.islice(stacks, run.period))
            x, of_unit = _apply(unit, x, context, config=self.config)
            balances += of_unit
        x = self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return Output(logits, tuple(balances))

    def no_balances(self) -> tuple[Balance | None, ...]:
        """Returns those of a batch without tokens."""

        def of(place: range) -> Balance | None:
            experts, kind = self.config.moe, self.config.kinds[place[0]]
            if experts is None or "moe" not in PARTS[kind]:
                return None
            loads = jnp.zeros((len(place), experts.num_experts), jnp.int32)
            dropped = loads[:, 0] if experts.capacity_factor else None
            return Balance(jnp.zeros(len(place), jnp.float32), loads, dropped)

        return tuple(of(place) for place in self.places)

    def move_biases(self, balances: Balances) -> None:
        """Moves the biases of all routers, after a step, towards equal loads.

        Args:
          balances: of that step, as `forward` returns them.
        """
        for stack, balance in zip(self.stacks, balances, strict=True):
            if balance is not None:
                stack.moe.router.move_bias(balance.loads)


def _recipes(
    config: ModelConfig, schedule: Schedule
) -> list[tuple[Mapping[str, Recipe], ...]]:
    """Returns the recipes of the layers of every block, in each phase."""
    return [
        tuple(
            {path: policy.recipe(f"blocks/{i}/{path}") for path in config.layers(kind)}
            for policy in schedule.policies
        )
        for i, kind in enumerate(config.kinds)
    ]


def _runs(config: ModelConfig, recipes: Sequence[Any]) -> tuple[Run, ...]:
    """Returns the runs of blocks of equal letters and recipes."""
    blocks = list(zip(config.kinds, recipes, strict=True))
    return find_runs([blocks.index(block) for block in blocks])


def _stack(
    config: ModelConfig,
    kind: str,
    recipes: Mapping[str, Recipe],
    *,
    params_keys: jax.Array,
    quant_keys: jax.Array,
) -> Block:
    """Returns equal blocks as one, its arrays stacked; the keys are [blocks]."""

    @nnx.vmap
    def make(params_key, quant_key):
        rngs = nnx.Rngs(params=params_key, quant=quant_key)
        return Block(config, kind, recipes, rngs=rngs)

    return make(params_keys, quant_keys)


def _check_inputs(inputs: jax.Array) -> None:
    shape, dtype = jnp.shape(inputs), jnp.result_type(inputs)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if len(shape) != 2 or 0 in shape or not is_integer:
        raise ValueError(
            "Transformer: inputs must be integers [b, t], at least one token, got "
            f"shape={shape}, dtype={dtype}."
        )


def _context(
    inputs: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array,
    *,
    config: ModelConfig,
) -> dict[str, dict[str, Any]]:
    """Returns what each part of a block is called with, beside activations."""
    rotation = None
    if config.rope_theta:
        rotation = rope(positions, head_dim=config.head_dim, theta=config.rope_theta)
    # A mask of nothing would cost attention what it saves by being causal.
    mask = None if segment_ids is None else document_mask(segment_ids)
    counts = None if segment_ids is None else segment_ids != 0
    if segment_ids is None:
        segment_ids = jnp.ones_like(inputs)
    return {
        "attention": {"mask": mask, "rotation": rotation},
        "mamba": {"documents": count_documents(segment_ids)},
        "moe": {"counts": counts},
    }


def _apply(
    unit: Sequence[Block],
    x: jax.Array,
    context: Mapping[str, Mapping[str, Any]],
    *,
    config: ModelConfig,
) -> tuple[jax.Array, Balances]:
    """Runs stacks as one scan: the first blocks of all, then the second, and so on."""
    graphs, states = zip(*map(nnx.split, unit), strict=True)

    def forward(graph: nnx.GraphDef) -> Callable[[jax.Array, nnx.State], Any]:
        def call(x, state):
            return nnx.merge(graph, state)(x, context)

        if config.remat == "none":
            return call
        policy = _REMAT_POLICIES[config.remat]
        return jax.checkpoint(call, policy=policy, prevent_cse=not config.scan_layers)

    blocks = [forward(graph) for graph in graphs]

    def body(x, states):
        balances = []
        for block, state in zip(blocks, states, strict=True):
            x, balance = block(x, state)
            balances.append(balance)
        return x, tuple(balances)

    return lax.scan(body, x, states, unroll=1 if config.scan_layers else True)
