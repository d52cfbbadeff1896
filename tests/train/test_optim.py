"""Schedules at their corners, what decays, and the first update."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp4jax import policies
from fp4jax.models import Transformer
from fp4jax.train import OptimConfig, make_optimizer, make_schedule
from fp4jax.train.optim import decay_mask
from tests.cases import SMALL

BASE = OptimConfig(lr=2.0, warmup=0.1, decay=0.2, final_lr=0.1)


def schedule(kind, steps=100, **changes):
    return make_schedule(
        dataclasses.replace(BASE, schedule=kind, **changes), steps=steps
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of wsd, cosine, constant"),
        ({"lr": 0.0}, "lr must be positive, got lr=0.0"),
        ({"lr": math.nan}, "lr must be a finite number, got lr=nan"),
        ({"clip_norm": math.inf}, "clip_norm must be a finite number, .*=inf"),
        ({"weight_decay": math.inf}, "weight_decay must be a finite number, .*=inf"),
        ({"lr": True}, "lr must be a finite number, got lr=True"),
        ({"b1": False}, "b1 must be a finite number, got b1=False"),
        ({"b2": 1.0}, r"b2 must lie in \[0, 1\), got b2=1.0"),
        ({"warmup": -0.1}, r"warmup must lie in \[0, 1\], got warmup=-0.1"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"moment_dtype": "float16"}, "moment_dtype must be one of float32, bfloat16"),
        (
            {"moment_dtype": "bfloat16", "b2": 0.99},
            r"b2 must be at most 1 - 2\^-5 with moment_dtype='bfloat16', got b2=0.99",
        ),
        ({"moment_dtype": "bfloat16", "b1": 0.98}, r"b1 must be at most 1 - 2\^-5"),
        ({"warmup": 0.5, "decay": 0.6}, "decay must be at most 1 - warmup = 0.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^OptimConfig: {message}"):
        dataclasses.replace(BASE, **changes)


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="steps must be positive, got steps=0"):
        make_schedule(BASE, steps=0)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_warmup_rises_in_equal_steps_to_the_peak(kind):
    rates = [schedule(kind)(step) for step in range(10)]
    np.testing.assert_allclose(rates, 2.0 * np.arange(1, 11) / 10, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("wsd", {10: 2.0, 79: 2.0, 80: 2.0, 90: 1.1, 99: 0.29, 100: 0.2, 101: 0.2}),
        ("cosine", {10: 2.0, 55: 1.1, 100: 0.2, 101: 0.2}),
        ("constant", {10: 2.0, 99: 2.0, 101: 2.0}),
    ],
)
def test_corners(kind, rates):
    found = {step: float(schedule(kind)(step)) for step in rates}
    assert found == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_start_at_the_peak(kind, steps):
    rates = [float(schedule(kind, steps)(step)) for step in range(steps)]
    assert rates[0] == 2.0
    assert all(0 < rate <= 2.0 for rate in rates)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_only_kernels_decay(tied):
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    model = nnx.eval_shape(
        lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    )
    mask = decay_mask(nnx.state(model, nnx.Param))
    decayed = {
        "/".join(map(str, path))
        for path, value in nnx.to_flat_state(mask)
        if value.get_value()
    }
    sites = "attention/query attention/key attention/value attention/out"
    sites = [*sites.split(), "mlp/gate", "mlp/up", "mlp/down"]
    expected = {f"stacks/0/{site}/kernel" for site in sites}
    assert decayed == expected | (set() if tied else {"head/kernel"})


def test_first_update_is_adamw_of_the_clipped_gradient():
    config = OptimConfig(
        lr=0.1, schedule="constant", warmup=0.0, weight_decay=0.5, clip_norm=1.0
    )
    optimizer = make_optimizer(config, steps=10)
    params = {"kernel": jnp.array([[2.0, -1.0]]), "scale": jnp.array([1.0, 1.0])}
    grads = {"kernel": jnp.array([[30.0, 0.0]]), "scale": jnp.array([0.0, 40.0])}
    state = optimizer.transform.init(params)
    updates, state = optimizer.transform.update(grads, state, params)
    # Adam's first step is the gradient's sign; decay is lr * weight_decay * kernel.
    expected = {"kernel": [[-0.1 - 0.1, 0.05]], "scale": [0.0, -0.1]}
    jax.tree.map(
        lambda u, e: np.testing.assert_allclose(u, e, atol=1e-6),
        updates,
        {name: jnp.array(value) for name, value in expected.items()},
    )
    moments = state[1][0].mu
    np.testing.assert_allclose(moments["kernel"], [[0.1 * 0.6, 0]], atol=1e-6)
    np.testing.assert_allclose(moments["scale"], [0, 0.1 * 0.8], atol=1e-6)


@pytest.mark.parametrize("b", [0.9, 1 - 2**-5])
def test_bfloat16_moments_rise_and_fall_with_the_gradient(b):
    config = OptimConfig(lr=0.1, schedule="constant", warmup=0.0, b1=b, b2=b)
    config = dataclasses.replace(config, moment_dtype="bfloat16")
    transform = make_optimizer(config, steps=10).transform
    params = {"kernel": jnp.ones(400)}
    grads = {"kernel": jax.random.normal(jax.random.key(0), (400,)) / 400}

    @jax.jit
    def run(state, grads):
        update = lambda _, state: transform.update(grads, state, params)[1]
        return jax.lax.fori_loop(0, 1000, update, state)

    risen = run(transform.init(params), grads)
    fallen = run(risen, jax.tree.map(jnp.zeros_like, grads))
    for name, target in (("mu", grads["kernel"]), ("nu", grads["kernel"] ** 2)):
        high, low = (optax.tree.get(s, name)["kernel"] for s in (risen, fallen))
        assert high.dtype == jnp.bfloat16
        error = np.abs(high.astype(jnp.float32) - target)
        assert (error <= 2**-8 / (1 - b) * np.abs(high) * (1 + 2**-8)).all()
        assert (np.abs(low) <= 1e-9 * np.abs(high)).all()


def test_the_update_is_made_of_float32_moments():
    base = OptimConfig(lr=0.1, schedule="constant", warmup=0.0)
    params = {"kernel": jax.random.normal(jax.random.key(0), (64,))}
    grads = jax.tree.map(lambda x: x / 100, params)
    updates = []
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(base, moment_dtype=dtype)
        transform = make_optimizer(config, steps=10).transform
        update, state = transform.update(grads, transform.init(params), params)
        updates.append(update["kernel"])
    # The first step has no rounded past.
    np.testing.assert_array_equal(*updates)
    mu = optax.tree.get(state, "mu")["kernel"]
    assert mu.dtype == jnp.bfloat16
