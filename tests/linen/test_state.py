"""Held amaxes in Linen: when they change, how uses combine, who writes them back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, serialization
from flax import linen as nn
from flax.training.train_state import TrainState

from fp4jax.linen import combine_by_max, dot_general_cls, quantize, value_and_grad
from fp4jax.numerics import E4M3, UNIFORM, Held, Quantizer, Scale
from fp4jax.recipes import Dgrad, Fprop, Recipe, Wgrad

KEY = jax.random.key(0)
OWG = "_overwrite_with_gradient"
X = jax.random.normal(jax.random.key(1), (8, 16))
EVERY = 3
Q = Quantizer(UNIFORM, scale=Scale(E4M3), tensor_scale=Held(every=EVERY, target=448.0))
HELD = Recipe(Fprop(x=Q, w=Q), Dgrad(dy=Q, w=Q), Wgrad(x=Q, dy=Q))


class Net(nn.Module):
    """A layer that is used twice, and one that may be left out."""

    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, x, both=True):
        cls = self.recipe and dot_general_cls(self.recipe)
        first = nn.Dense(16, dot_general_cls=cls)
        second = nn.Dense(4, dot_general_cls=cls)
        y = first(jnp.tanh(first(x)))
        return second(y) if both else y


def loss_of(model):
    def loss(variables, x, both=True):
        return jnp.mean(model.apply(variables, x, both) ** 2)

    return loss


MODEL = quantize(Net(), HELD)
VARIABLES = MODEL.init(KEY, X)
step = functools.partial(jax.jit, static_argnames="both")(
    value_and_grad(loss_of(MODEL))
)


def state(variables, name="Dense_0"):
    values = variables[OWG][name]["DotGeneral_0"]
    return np.asarray(values["held"]), int(values["step"])


def run(variables, steps):
    """Trains with inputs that grow; returns the variables after each step."""
    for i in steps:
        _, grads, variables = step(variables, X * (1 + i))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        variables = variables | {"params": params}
        yield variables


@pytest.fixture(scope="module")
def trained():
    return list(run(VARIABLES, range(7)))


def test_starts_unseen():
    for name in ("Dense_0", "Dense_1"):
        held, count = state(VARIABLES, name)
        assert held.tolist() == [0, 0, 0] and count == 0


def test_changes_exactly_at_the_refresh_steps(trained):
    for i, (before, after) in enumerate(zip(trained, trained[1:], strict=False), 1):
        for name in ("Dense_0", "Dense_1"):
            (a, _), (b, count) = state(before, name), state(after, name)
            assert (a != b).all() if i % EVERY == 0 else (a == b).all()
            assert count == i + 1


def test_uses_of_one_layer_combine_by_maximum(trained):
    held, _ = state(trained[0])
    params = VARIABLES["params"]["Dense_0"]
    inner = jnp.tanh(
        quantize(nn.Dense(16), HELD).apply(
            {"params": params, OWG: VARIABLES[OWG]["Dense_0"]}, X
        )
    )
    amaxes = [float(jnp.max(jnp.abs(x))) for x in (X, inner)]
    assert held[0] == max(amaxes) != min(amaxes)
    assert held[1] == jnp.max(jnp.abs(params["kernel"]))


def test_a_layer_left_out_keeps_its_state(trained):
    _, _, after = step(trained[-1], X, both=False)
    for a, b in zip(
        state(after, "Dense_1"), state(trained[-1], "Dense_1"), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert state(after)[1] == state(trained[-1])[1] + 1


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_does_not_enter(bad):
    _, _, after = step(VARIABLES, X.at[0, 0].set(bad))
    held, _ = state(after)
    assert np.isfinite(held).all() and held[1] > 0


def test_evaluation_reads_and_leaves_the_state_as_it_is(trained):
    variables = trained[0]
    y, after = MODEL.apply(variables, 9 * X, mutable=True)
    jax.tree.map(np.testing.assert_array_equal, after, variables)
    fresh = MODEL.apply(variables | {OWG: VARIABLES[OWG]}, 9 * X)
    assert np.any(np.asarray(y != fresh))


def test_the_optimizer_sees_parameters_only():
    _, grads, after = step(VARIABLES, X)
    assert jax.tree.structure(grads) == jax.tree.structure(VARIABLES["params"])
    assert jax.tree.structure(after) == jax.tree.structure(VARIABLES)
    jax.tree.map(np.testing.assert_array_equal, after["params"], VARIABLES["params"])


def test_other_collections_and_auxiliary_data_pass_through():
    loss = lambda variables, x: (loss_of(MODEL)(variables, x), variables["other"]["a"])
    call = jax.jit(value_and_grad(loss, has_aux=True))
    (value, aux), _, after = call({**VARIABLES, "other": {"a": jnp.ones(2)}}, X)
    assert value == step(VARIABLES, X)[0]
    assert aux.tolist() == after["other"]["a"].tolist() == [1, 1]


def test_a_model_without_held_scales_needs_no_jit():
    model = quantize(Net(), Recipe(Fprop(x=Quantizer(UNIFORM))))
    variables = model.init(KEY, X)
    _, grads, after = value_and_grad(loss_of(model))(variables, X)
    assert after.keys() == variables.keys() == {"params"}
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])


def test_the_train_state_of_flax_writes_it_back():
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    by_hand = Net(HELD)
    losses = {
        "quantize": loss_of(MODEL),
        "by hand": lambda variables, x: loss_of(by_hand)(combine_by_max(variables), x),
    }
    results = []
    for loss in losses.values():
        train = TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=tx)
        update = jax.jit(
            lambda train, x, loss=loss: train.apply_gradients(
                grads=jax.grad(loss)(train.params, x)
            )
        )
        for i in range(2):
            train = update(train, X * (1 + i))
        results.append(train.params)
    jax.tree.map(np.testing.assert_array_equal, *results)
    # Clipping and decay are far below the change of an amax.
    np.testing.assert_array_equal(state(results[0])[0], state(step(VARIABLES, X)[2])[0])
    assert state(results[0])[1] == 2
    assert OWG not in str(jax.tree_util.tree_structure(train.opt_state))


def test_resuming_is_bit_exact(trained):
    data = serialization.to_bytes(trained[3])
    restored = serialization.from_bytes(VARIABLES, data)
    for ours in run(restored, range(4, 7)):
        pass
    jax.tree.map(np.testing.assert_array_equal, ours, trained[-1])


def scan(block):
    return nn.scan(
        block,
        variable_axes={"params": 0, OWG: 0},
        split_rngs={"params": True, "quant": True},
        length=2,
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(16)(x)), None


def results_of(model):
    model = quantize(model, HELD)
    variables = model.init(KEY, X)
    loss = lambda variables: jnp.mean(model.apply(variables, X)[0] ** 2)
    return jax.jit(value_and_grad(loss))(variables)


def test_scanned_layers_hold_amaxes_of_their_own():
    loss, grads, after = results_of(scan(Block)())
    remat = results_of(scan(nn.remat(Block, prevent_cse=False))())
    jax.tree.map(np.testing.assert_array_equal, remat, (loss, grads, after))
    held = after[OWG]["Dense_0"]["DotGeneral_0"]["held"]
    assert held.shape == (2, 3) and np.all(np.asarray(held[0] != held[1]))
    kernels = after["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(held[:, 1], jnp.max(jnp.abs(kernels), (1, 2)))


def test_a_scan_that_shares_a_layer_takes_the_maximum():
    shared = nn.scan(
        Block,
        variable_broadcast=("params", OWG),
        split_rngs={"params": False, "quant": True},
        length=2,
    )
    _, _, after = results_of(shared())
    held = after[OWG]["Dense_0"]["DotGeneral_0"]
    assert held["held"][0] == jnp.max(jnp.abs(X)) and held["step"] == 1


def test_a_scan_that_does_not_list_the_state_raises():
    model = nn.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )
    with pytest.raises(errors.ScopeCollectionNotFound, match=OWG):
        quantize(model(), HELD).init(KEY, X)


def test_state_is_float32_where_numbers_are_float64():
    model = quantize(nn.Dense(4), HELD)
    loss = lambda variables: jnp.mean(model.apply(variables, X) ** 2)
    with jax.enable_x64(True):
        variables = model.init(KEY, X)
        _, _, after = jax.jit(value_and_grad(loss))(variables)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("float32")}


def test_missing_state_raises():
    with pytest.raises(errors.ScopeCollectionNotFound, match=OWG):
        MODEL.apply({"params": VARIABLES["params"]}, X)


def test_differentiating_without_jit_raises():
    with pytest.raises(ValueError, match="must be taken under jax.jit"):
        value_and_grad(loss_of(MODEL))(VARIABLES, X)


def test_uses_are_counted_once_where_they_add():
    """A recipe injected by hand, whose gradient is taken without `combine_by_max`."""
    model = nn.Dense(4, dot_general_cls=dot_general_cls(HELD))
    variables = model.init(KEY, X)
    gradient = jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
    counts, seen = [], []
    for i in range(4):
        after = gradient(variables, X * (1 + i))
        variables = variables | {OWG: after[OWG]}
        (values,) = after[OWG].values()
        counts.append(int(values["step"]))
        seen.append(float(values["held"][0]))
    assert counts == [1, 2, 3, 4]
    amax = float(jnp.max(jnp.abs(X)))
    np.testing.assert_allclose(seen, [amax, amax, amax, 4 * amax])
