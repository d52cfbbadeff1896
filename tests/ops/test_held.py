"""Held amaxes: when they are sampled, how they combine, and what the program reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from fp4jax import dot_general, recipes
from fp4jax.numerics.groups import Groups
from fp4jax.ops.held import sample, under_one_condition

DIMS = (((1,), (0,)), ((), ()))
KEY = jax.random.key(0)
EVERY = 5
RECIPE = recipes.ue5m3(every=EVERY)
X = jax.random.normal(jax.random.key(1), (48, 32), jnp.bfloat16)
W = jax.random.normal(jax.random.key(2), (32, 16))
UNSEEN = jnp.zeros(3)
STALE = jnp.float32([9.0, 8.0, 7.0])


def y_of(x, w, held, step, recipe=RECIPE, key=KEY):
    return dot_general(x, w, DIMS, recipe=recipe, key=key, held=held, step=step)


def loss(x, w, held, step, scale=1.0):
    return scale * jnp.sum(y_of(x, w, held, step).astype(jnp.float32))


new_state = jax.jit(jax.grad(loss, argnums=2))


def amaxes(x=X, w=W, dy=1.0):
    return np.float32([jnp.max(jnp.abs(x)), jnp.max(jnp.abs(w)), dy])


@pytest.mark.parametrize(
    ("held", "step", "expected"),
    [
        (UNSEEN, 3, amaxes()),
        (STALE, 3, STALE),
        (STALE, 0, amaxes()),
        (STALE, EVERY, amaxes()),
        (STALE, EVERY + 1, STALE),
        (STALE.at[1].set(0), 3, [9.0, amaxes()[1], 7.0]),
    ],
)
def test_state_is_sampled_when_due(held, step, expected):
    np.testing.assert_array_equal(new_state(X, W, held, step), expected)


def test_an_idle_group_makes_no_other_be_read(monkeypatch):
    """Its amax stays 0, not yet seen, which is no reason to read what others have."""
    reads, amax = [], Groups.amax

    def counted(self, x):
        jax.debug.callback(lambda: reads.append(x.shape))
        return amax(self, x)

    monkeypatch.setattr(Groups, "amax", counted)
    groups = Groups.of_entries(jnp.array([0, 2, 3]), 3)  # the last tile is of none
    x = jnp.arange(1.0, 7).reshape(3, 2)
    run = jax.jit(lambda held, step: sample(x, held, every=5, step=step, groups=groups))
    for held, step, expected, times in (
        ([9, 0, 8], 3, [9, 0, 8], 0),
        ([9, 0, 8], 5, [2, 0, 4], 1),
        ([9, 0, 0], 3, [9, 0, 4], 2),
    ):
        found = jax.block_until_ready(run(jnp.float32(held), jnp.int32(step)))
        jax.effects_barrier()
        np.testing.assert_array_equal(found, expected)
        assert len(reads) == times


def test_a_held_amax_decides_the_scales():
    """Off the step the result is that of the held amax, on the step of a fresh one."""
    fresh = jax.jit(lambda: jax.vjp(lambda x, w: y_of(x, w, None, None), X, W)[0])()

    @jax.jit
    def run(held, step):
        y, vjp = jax.vjp(lambda x, w: y_of(x, w, held, step), X, W)
        return y, *vjp(jnp.ones_like(y))

    on, off = run(STALE, EVERY), run(STALE, EVERY + 1)
    np.testing.assert_array_equal(on[0], fresh)
    for a, b in zip(on, off, strict=True):
        assert (a != b).any()
    same = run(jnp.asarray(amaxes()), EVERY + 1)
    for a, b in zip(on, same, strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluation_reads_and_never_samples():
    on, off = (jax.jit(y_of)(X, W, STALE, step) for step in (EVERY, EVERY + 1))
    np.testing.assert_array_equal(on, off)
    unseen = jax.jit(y_of)(X, W, UNSEEN, EVERY)
    assert (unseen != on).any()


def test_state_that_nobody_differentiates_is_taken_fresh():
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(X, W, UNSEEN, 3)
    fresh, expected = jax.value_and_grad(loss, argnums=(0, 1))(X, W, None, None)
    assert value == fresh
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_amax_that_is_not_finite_never_enters(bad):
    state = new_state(X.at[3, 4].set(bad), W, STALE, EVERY)
    # A NaN of y is one of dy too where the loss multiplies by it; here dy is 1.
    np.testing.assert_array_equal(state, [9.0, *amaxes()[1:]])
    state = new_state(X, W, STALE, EVERY, bad)
    np.testing.assert_array_equal(state, [*amaxes()[:2], 7.0])
    assert jnp.isnan(y_of(X.at[3, 4].set(bad), W, UNSEEN, 0)).all()


def as_maximum(held):
    return jax.lax.convert_element_type(held, fp8_ops.fp32_max_grad)


@jax.custom_vjp
def maximum(held):
    return as_maximum(held)


maximum.defvjp(
    lambda held: (maximum(held), None),
    lambda _, g: (jax.lax.convert_element_type(g, jnp.float32),),
)


def twice(x, w, held, step):
    held = maximum(held)
    return loss(x, w, held, step) + loss(3 * x, w, held, step, scale=2.0)


def scanned(x, w, held, step):
    held = maximum(held)
    scales = jnp.float32([1.0, 2.0])
    xs = jnp.stack([x, 3 * x])
    body = jax.checkpoint(lambda x, scale: loss(x, w, held, step, scale))
    return jax.lax.scan(lambda _, a: (None, body(*a)), None, (xs, scales))[1].sum()


def mapped(x, w, held, step):
    xs, scales = jnp.stack([x, 3 * x]), jnp.float32([1.0, 2.0])
    lanes = jax.vmap(loss, in_axes=(0, None, None, None, 0))
    return lanes(xs, w, held, step, scales).sum()


@pytest.mark.parametrize("uses", [twice, scanned, mapped])
def test_uses_of_one_state_combine_by_maximum(uses):
    expected = amaxes(3 * X, dy=2.0)
    state = jax.jit(jax.grad(uses, argnums=2))
    np.testing.assert_array_equal(state(X, W, STALE, EVERY), expected)
    np.testing.assert_array_equal(state(X, W, STALE, EVERY + 1), STALE)


def test_lanes_with_states_of_their_own():
    xs, ws = jnp.stack([X, 3 * X]), jnp.stack([W, 2 * W])
    held = jnp.stack([UNSEEN, STALE])
    state = jax.jit(jax.vmap(jax.grad(loss, argnums=2), in_axes=(0, 0, 0, None)))
    got = state(xs, ws, held, 3)
    np.testing.assert_array_equal(got, [amaxes(), STALE])
    got = state(xs, ws, held, EVERY)
    np.testing.assert_array_equal(got, [amaxes(), amaxes(3 * X, 2 * W)])


def test_lanes_share_one_condition():
    def of_lane(x, held):
        read = lambda: sample(x, held, every=EVERY, step=jnp.int32(3))
        return under_one_condition(held == 0, read)

    run = jax.jit(jax.vmap(of_lane))
    xs, held = jnp.stack([X, 3 * X, X]), jnp.float32([0.0, 9.0, 8.0])
    np.testing.assert_array_equal(run(xs, held), [amaxes()[0], 9.0, 8.0])
    np.testing.assert_array_equal(run(xs, held + 1), held + 1)
    program = run.lower(xs, held).compile().as_text()
    assert program.count(" conditional(") == 1  # not a select of both


def full_reductions(jaxpr, into_branches):
    """Counts reductions to one number, in branches of conditionals or outside."""
    count = 0
    for eqn in jaxpr.eqns:
        is_reduction = eqn.primitive.name.startswith("reduce_")
        if is_reduction and eqn.outvars[0].aval.shape == ():
            count += eqn.invars[0].aval.size > 3
        if eqn.primitive.name == "cond" and not into_branches:
            continue
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            if hasattr(sub, "jaxpr"):
                count += full_reductions(sub.jaxpr, into_branches)
    return count


def test_off_the_step_the_program_does_not_read_the_operand():
    """Amaxes of x, w and dy are taken in branches of conditionals and nowhere else."""

    def step(dy, x, w, held, step):
        _, vjp = jax.vjp(lambda x, w, held: y_of(x, w, held, step), x, w, held)
        return vjp(dy)

    dy = jnp.ones((X.shape[0], W.shape[1]))
    held = jax.make_jaxpr(step)(dy, X, W, STALE, 3)
    fresh = jax.make_jaxpr(step)(dy, X, W, None, None)
    assert full_reductions(fresh.jaxpr, into_branches=False) >= 3
    assert full_reductions(held.jaxpr, into_branches=False) == 0
    assert full_reductions(held.jaxpr, into_branches=True) >= 3
    compiled = jax.jit(step).lower(dy, X, W, STALE, 3).compile().as_text()
    assert compiled.count(" conditional(") == 3  # not a select of both


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": recipes.nvfp4()}, "held must be None for a recipe without held"),
        ({"held": jnp.zeros(4)}, r"held must be float32\[3\], the amaxes"),
        ({"held": jnp.zeros(3, jnp.int32)}, r"held must be float32\[3\], the amaxes"),
        (
            {"held": jnp.zeros(3, jnp.bfloat16)},
            r"held must be float32\[3\], the amaxes",
        ),
        ({"held": jnp.zeros(3, jnp.complex64)}, r"held must be float32\[3\], the am"),
        (
            {"held": jax.random.split(KEY, 3)},
            r"held must be float32\[3\], .*dtype=key<fry>",
        ),
        ({"held": [0.0, 0.0, 0.0]}, r"float32\[3\], .* got list of shape=None"),
        ({"held": None}, "step must be None without held, .* got step=0. Pass held"),
        ({"step": jnp.zeros(2, jnp.int32)}, "step must be one integer"),
        ({"step": 1.5}, "step must be one integer"),
    ],
)
def test_errors(changes, message):
    arguments = {"held": UNSEEN, "step": 0, "recipe": RECIPE, "key": KEY} | changes
    with pytest.raises(ValueError, match=message):
        y_of(X, W, **arguments)
