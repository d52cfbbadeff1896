"""The whole model: its layers and their recipes, its documents, scan and remat."""

import dataclasses
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import policies, recipes
from fp4jax.models import PRESETS, MambaConfig, Transformer
from fp4jax.nnx import NoiseKey
from fp4jax.policies import Policy, Rule, Schedule
from tests.cases import SMALL

CONFIG = dataclasses.replace(SMALL, num_layers=3)
HYBRID = {
    "blocks": "M-*",
    "mlp": "relu2",
    "norm": "layer",
    "qk_norm": True,
    "rope_theta": 0.0,
    "mamba": MambaConfig(num_heads=4, head_dim=8, d_state=6, chunk=4),
}
FAMILIES = pytest.mark.parametrize("family", [{}, HYBRID], ids=["dense", "hybrid"])
EVERY_POLICY = pytest.mark.parametrize("policy", policies.PRESETS)


def build(policy=policies.bf16, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return Transformer(config, policy(config), rngs=nnx.Rngs(0))


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 64, shape, dtype=np.int32)


def by_layer(model):
    """Returns the parameters of a model, those of its blocks one layer at a time."""
    params = nnx.state(model, nnx.Param)
    stacks = [dict(nnx.to_flat_state(stack)) for stack in params.pop("stacks").values()]
    layers = [
        {path: value[i] for path, value in stack.items()}
        for stack in stacks
        for i in range(len(next(iter(stack.values()))))
    ]
    return {"layers": layers, "rest": dict(nnx.to_flat_state(params))}


def test_layer_paths_name_every_linear():
    paths = CONFIG.layer_paths
    assert len(paths) == 7 * 3
    assert paths[:2] == ("blocks/0/attention/query", "blocks/0/attention/key")
    assert paths[-1] == "blocks/2/mlp/down"


def test_equal_consecutive_layers_are_one_stack():
    sizes = [
        len(stack.attention_norm.scale[...]) for stack in build(policies.nvfp4).stacks
    ]
    assert sizes == [2, 1]
    assert [len(stack.mlp_norm.scale[...]) for stack in build().stacks] == [3]


def test_a_schedule_stacks_layers_that_are_equal_in_every_phase():
    fp4, kept = (
        policies.ufp4(CONFIG),
        policies.keep(policies.ufp4(CONFIG), CONFIG, last=1),
    )
    model = build(lambda config: Schedule(((0, fp4), (5, kept))))
    assert [len(stack.mlp_norm.scale[...]) for stack in model.stacks] == [2, 1]
    before, recipe = (
        nnx.as_pure(nnx.state(model)),
        lambda i: model.stacks[i].mlp.up.dot_general.recipe,
    )
    assert recipe(0) == recipe(1) == recipes.ufp4()
    model.set_policy(kept)
    assert (recipe(0), recipe(1)) == (recipes.ufp4(), recipes.bf16())
    chex.assert_trees_all_equal(before, nnx.as_pure(nnx.state(model)))


def test_a_policy_that_tells_stacked_layers_apart_raises():
    kept = policies.keep(policies.ufp4(CONFIG), CONFIG, last=1)
    message = "stacked, got 2 for blocks/0/attention/key to blocks/2/.* Schedule of all"
    with pytest.raises(ValueError, match=message):
        build(policies.ufp4).set_policy(kept)


def test_recipes_go_where_the_policy_says():
    odd = Rule("blocks/1/mlp/down", recipes.ufp4())
    model = build(lambda _: Policy(recipes.bf16(), (odd,)))
    found = [stack.mlp.down.dot_general.recipe for stack in model.stacks]
    assert found == [recipes.bf16(), recipes.ufp4(), recipes.bf16()]
    assert model.stacks[1].mlp.up.dot_general.recipe == recipes.bf16()


def test_a_seed_is_no_rngs():
    with pytest.raises(TypeError, match="^Transformer: rngs must be nnx.Rngs, got 0"):
        Transformer(CONFIG, Policy(recipes.bf16()), rngs=0)


def test_a_rule_that_matches_no_layer_raises():
    beyond = Rule("blocks/3/*", recipes.ufp4())
    with pytest.raises(ValueError, match="blocks/3/"):
        build(lambda _: Policy(recipes.bf16(), (beyond,)))


@EVERY_POLICY
def test_initial_parameters_do_not_depend_on_the_policy(policy):
    ours, reference = by_layer(build(policies.PRESETS[policy])), by_layer(build())
    assert len(ours["layers"]) == CONFIG.num_layers
    jax.tree.map(np.testing.assert_array_equal, ours, reference)


def test_no_two_linears_share_a_noise_key():
    keys = jax.tree.leaves(nnx.state(build(policies.nvfp4), NoiseKey))
    words = np.concatenate([jax.random.key_data(key) for key in keys])
    assert len(np.unique(words, axis=0)) == 7 * CONFIG.num_layers


@EVERY_POLICY
def test_logits_are_float32_and_need_no_key(policy):
    logits = build(policies.PRESETS[policy])(tokens(2, 16))
    assert logits.dtype == jnp.float32
    assert logits.shape == (2, 16, 64)
    assert np.isfinite(logits).all()


def test_a_recipe_that_draws_needs_a_step_to_be_differentiated():
    model, inputs = build(policies.ufp4), tokens(1, 16)

    def total(model):
        return model(inputs).sum()

    with pytest.raises(ValueError, match="set_step"):
        jax.eval_shape(nnx.grad(total), model)
    fp4jax.nnx.set_step(model, 0)
    jax.eval_shape(nnx.grad(total), model)


def test_untied_head_has_parameters_of_its_own():
    model = build(tie_embeddings=False)
    assert model.head.kernel[...].shape == (32, 64)
    assert model(tokens(1, 16)).shape == (1, 16, 64)


@FAMILIES
def test_a_token_sees_no_later_one(family):
    model, inputs = nnx.jit(build(**family)), tokens(1, 16)
    changed = inputs.copy()
    changed[0, 9] ^= 1
    before, after = model(inputs), model(changed)
    np.testing.assert_array_equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(axis=-1).all()


@FAMILIES
def test_a_document_does_not_depend_on_its_neighbor(family):
    model, inputs = nnx.jit(build(**family)), tokens(1, 16)
    segment_ids = np.array([[1] * 6 + [2] * 10])
    positions = np.array([[*range(6), *range(10)]])
    documents = {"segment_ids": segment_ids, "positions": positions}
    packed = model(inputs, **documents)
    changed = inputs.copy()
    changed[0, :6] ^= 1
    beside_another = model(changed, **documents)
    np.testing.assert_array_equal(packed[0, 6:], beside_another[0, 6:])
    assert (packed[0, :6] != beside_another[0, :6]).any(axis=-1).all()
    alone = model(inputs[:, 6:])
    # Sums over masked keys are of zeros, but their order may differ.
    np.testing.assert_allclose(packed[0, 6:], alone[0], atol=0.05)


def test_defaults_are_one_document_in_order():
    model, inputs = build(), tokens(2, 16)
    ones, positions = np.ones((2, 16), np.int32), np.arange(16)[None].repeat(2, 0)
    spelled_out = model(inputs, segment_ids=ones, positions=positions)
    np.testing.assert_array_equal(model(inputs), spelled_out)


def loss_and_gradient(policy, **changes):
    """Of one batch, without the roundings that XLA may skip inside a fusion."""
    graph, params, rest = nnx.split(build(policy, **changes), nnx.Param, ...)
    inputs = tokens(2, 17)

    def loss(params, step):
        model = nnx.merge(graph, params, rest, copy=True)
        fp4jax.nnx.set_step(model, step)
        logits = jax.nn.log_softmax(model(inputs[:, :-1]))
        return -jnp.take_along_axis(logits, inputs[:, 1:, None], axis=-1).mean()

    # LLVM would contract products and sums in one loop and not in another.
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(loss), compiler_options=options)(params, 0)


@pytest.mark.parametrize(
    "shape",
    [{"num_layers": 2}, {**HYBRID, "blocks": "M-", "num_layers": 4}],
    ids=["dense", "hybrid"],
)
def test_scan_and_remat_change_no_bit(shape):
    quantized = Rule("blocks/*/mlp/down", recipes.ufp4())
    mixed = lambda _: Policy(recipes.bf16(), (quantized,))
    reference = loss_and_gradient(mixed, scan_layers=False, remat="full", **shape)
    for remat in ("none", "dots", "full"):
        ours = loss_and_gradient(mixed, remat=remat, **shape)
        jax.tree.map(np.testing.assert_array_equal, ours, reference)


def residuals(policy, **changes):
    """Returns what all layers save for the backward pass of two rows of 24 tokens."""
    graph, params, rest = nnx.split(build(policy, **changes), nnx.Param, ...)
    inputs = tokens(2, 24)

    def logits(params, step):
        model = nnx.merge(graph, params, rest, copy=True)
        fp4jax.nnx.set_step(model, step)
        return model(inputs)

    saved = jax.eval_shape(
        lambda params, step: jax.vjp(lambda params: logits(params, step), params)[1],
        params,
        0,
    )
    return jax.tree.leaves(saved)


def saved(**changes):
    """Returns how many arrays of each kind they save that are of tokens."""
    return Counter(
        (*leaf.shape[3:], leaf.dtype.name)
        for leaf in residuals(policies.ufp4, **changes)
        if leaf.shape[:3] == (CONFIG.num_layers, 2, 24)
    )


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_remat_saves_what_it_says(scan):
    block_input = Counter({(32, "bfloat16"): 1})
    # Of query; of key, value and out; of gate and up. Nothing needs that of down.
    products = {(64, "bfloat16"): 1, (32, "bfloat16"): 3, (48, "bfloat16"): 2}
    assert saved(remat="full", scan_layers=scan) == block_input
    assert saved(remat="dots", scan_layers=scan) == block_input + Counter(products)
    assert saved(remat="none", scan_layers=scan)[32, "float32"] > 0  # of the norms


def test_amaxes_that_are_held_are_not_taken_again():
    def amaxes(remat):
        found = residuals(lambda _: Policy(recipes.ue5m3()), remat=remat)
        of_blocks = (CONFIG.num_layers,), jnp.float32
        return sum((leaf.shape, leaf.dtype) == of_blocks for leaf in found)

    assert amaxes("dots") == 7 * 2  # of x and w in every linear
    assert amaxes("full") == 0


@functools.cache
def first_queries(policy):
    """Returns what the first linear layer makes of its own activations, [b, t, d]."""
    config = dataclasses.replace(PRESETS["tiny"], num_layers=2)
    recipes = policies.PRESETS[policy](config)
    model = Transformer(config, recipes, rngs=nnx.Rngs(0))
    graph, layers = nnx.split(model.stacks[0])
    block = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], layers))
    x = block.attention_norm(model.embed(tokens(4, 64)))
    return np.asarray(jax.jit(block.attention.query)(x), np.float64)


@pytest.mark.parametrize("policy", policies.PRESETS)
def test_quantization_changes_the_outputs_of_a_layer(policy):
    ours, reference = first_queries(policy), first_queries("bf16")
    if policy in ("bf16", "mxfp4_tseng"):  # whose forward pass is BF16
        np.testing.assert_array_equal(ours, reference)
        return
    error = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
    if policy in ("mxfp8", "ti2d"):  # the latter has MXFP8 in queries
        assert 0.005 < error < 0.05
        return
    assert np.mean(ours != reference) > 0.95
    if policy != "int2":
        assert 0.05 < error < 0.3  # four bits are off by about a tenth in each operand


def test_blocks_of_one_part_compute_what_a_block_of_both_does():
    whole = build()
    halves = build(blocks="*-", num_layers=2 * CONFIG.num_layers)
    assert [run.period for run in halves.runs] == [2]
    params = nnx.state(whole, nnx.Param)
    stack = params["stacks"][0]
    of_parts = {
        index: {part: stack[part], f"{part}_norm": stack[f"{part}_norm"]}
        for index, part in enumerate(("attention", "mlp"))
    }
    nnx.update(halves, nnx.State({**params, "stacks": of_parts}))
    inputs = tokens(2, 16)
    np.testing.assert_array_equal(nnx.jit(halves)(inputs), nnx.jit(whole)(inputs))


def test_units_of_blocks_take_their_recipes_by_place():
    rules = (
        Rule("blocks/1/mlp/down", recipes.ufp4()),
        Rule("blocks/3/mlp/down", recipes.ufp4()),
    )
    model = build(lambda _: Policy(recipes.bf16(), rules), blocks="*-", num_layers=6)
    assert [run.period for run in model.runs] == [2, 1, 1]
    assert model.places == (range(0, 4, 2), range(1, 4, 2), range(4, 5), range(5, 6))
    found = [model.stacks[i].mlp.down.dot_general.recipe for i in (1, 3)]
    assert found == [recipes.ufp4(), recipes.bf16()]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (4,)], ids=str)
def test_inputs_that_are_no_rows_of_tokens_raise(shape):
    message = rf"inputs must be .* got shape=\({shape[0]},.*dtype=int32"
    model = build()
    with pytest.raises(ValueError, match=message):
        model(jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match="dtype=float32"):
        model(jnp.zeros((1, 4)))


@pytest.mark.parametrize("name", ["moe_tiny", "nemotron_h_tiny"])
def test_parameters_are_float32_where_numbers_are_float64(name):
    config = PRESETS[name]
    make = lambda: Transformer(config, policies.ue5m3(config), rngs=nnx.Rngs(0))
    with jax.enable_x64(True):
        graph, state = nnx.split(nnx.eval_shape(make))
        inputs = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        output = jax.eval_shape(lambda s, t: nnx.merge(graph, s)(t), state, inputs)
    arrays = [*jax.tree.leaves(nnx.filter_state(state, nnx.Param)), output]
    assert {array.dtype for array in arrays} == {jnp.dtype("float32")}
