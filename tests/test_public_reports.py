"""Faults that users of low-precision training libraries reported, replayed here."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad
from jax import lax
from jax.sharding import AxisType

import fp4jax
import fp4jax.nnx
from fp4jax import recipes
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E5M2,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Site,
    formats,
    hadamard,
    packing,
)
from tests.golden import inputs

MATMUL = (((1,), (0,)), ((), ()))
KEY = jax.random.key(0)
# Draws for dgrad and for wgrad, with a rotation, squares and a tensor scale.
RECIPE = recipes.nvfp4()
M, K, N = 32, 48, 64


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, W, DY = normal(1, M, K), normal(2, K, N), normal(3, M, N)


def dot(x, w, key=KEY, recipe=RECIPE):
    return fp4jax.dot_general(x, w, MATMUL, recipe=recipe, key=key)


def gradients(x, w, dy, key, recipe=RECIPE):
    return jax.vjp(lambda x, w: dot(x, w, key, recipe), x, w)[1](dy)


compiled = jax.jit(gradients, static_argnames="recipe")


def loss(x, w, key, recipe=RECIPE):
    """Not linear in the product, so that the backward pass depends on it."""
    return jnp.sum(jnp.sin(dot(x, w, key, recipe)))


def assert_equal(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def share_of_different(a, b):
    return np.mean(np.asarray(a) != np.asarray(b))


# --- Keys --------------------------------------------------------------------------


def by_remat(key):
    return jax.grad(jax.checkpoint(loss), (0, 1))(X, W, key)


def by_scan(key):
    def total(x, w):
        body = lambda carry, k: (carry + loss(x, w, k), None)
        return lax.scan(body, 0.0, key[None])[0]

    return jax.grad(total, (0, 1))(X, W)


def by_vmap(key):
    lanes = jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, None, 0))
    return jax.tree.map(lambda a: a[0], lanes(X, W, key[None]))


def by_shard_map(key):
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    gradient = jax.grad(loss, (0, 1))
    return jax.shard_map(gradient, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(
        X, W, key
    )


@pytest.fixture(scope="module")
def plain():
    """The gradients by jit alone, of one key."""
    return jax.jit(jax.grad(loss, (0, 1)))(X, W, KEY)


@pytest.mark.parametrize("transform", [by_remat, by_scan, by_vmap, by_shard_map])
def test_the_key_survives_the_backward_pass_of_every_transform(transform, plain):
    """Report: the rounding state is lost across the VJP, so noise never changes."""
    transform = jax.jit(transform)
    assert_equal(transform(KEY), plain)
    for a, b in zip(transform(jax.random.key(1)), plain, strict=True):
        assert share_of_different(a, b) > 0.9


def test_lanes_of_vmap_and_steps_of_scan_draw_their_own_noise():
    """Report: one draw is broadcast over a leading axis."""
    keys = jax.random.split(KEY, 3)
    lanes = jax.jit(jax.vmap(gradients, in_axes=(None, None, None, 0)))(X, W, DY, keys)
    body = lambda carry, key: (carry, gradients(X, W, DY, key))
    steps = jax.jit(lambda keys: lax.scan(body, 0, keys)[1])(keys)
    assert_equal(lanes, steps)
    for stacked in lanes:
        for i in range(3):
            assert share_of_different(stacked[i], stacked[i - 1]) > 0.9


def test_noise_varies_along_both_axes_of_a_matrix():
    """Report: noise is drawn along one axis and broadcast over the other."""
    quantizer = RECIPE.dgrad.dy
    x = jnp.full((256, 256), 0.3).at[:, ::16].set(6.0)  # 0.3 lies between 0 and 0.5
    q = jax.jit(fp4jax.quantize, static_argnums=1)(x, quantizer, key=KEY)
    up = np.asarray(q.codes)[:, np.arange(256) % 16 != 0] > 0
    share = up.mean()
    for axis in (0, 1):
        deviation = np.sqrt(share * (1 - share) / up.shape[axis])
        spread = up.mean(axis).std() / deviation  # near 1 for independent coins
        assert 0.8 < spread < 1.2


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_stochastic_rounding_is_unbiased_and_not_zero_whatever_the_seed(seed):
    """Reports: all zeros on some devices; a seed of 0 that switches rounding off."""
    x = jnp.asarray(inputs.matrix("normal", "float32", (8, 64)))
    quantizer = dataclasses.replace(RECIPE.dgrad.dy, scale=Scale(E4M3, pad=True))
    keys = jax.random.split(jax.random.key(seed), 2000)
    draw = lambda key: fp4jax.fake_quant(x, quantizer, key=key)
    drawn = np.float64(jax.jit(lambda keys: lax.map(draw, keys))(keys))
    assert np.all(np.any(drawn != 0, 0))
    deviation = drawn.std(0)
    assert np.mean(deviation > 0) > 0.9
    error = drawn.mean(0) - np.asarray(x)
    assert np.abs(error[deviation > 0] / deviation[deviation > 0]).max() < 5 / 2000**0.5
    assert np.abs(error[deviation == 0]).max() < 1e-3 * np.abs(x).max()


DRAWING = {
    "e2m1_ref": recipes.e2m1_ref(),
    "ufp4": recipes.ufp4(),
    "nvfp4": recipes.nvfp4(),
    "mxfp4": recipes.mxfp4(),
    "mxfp4_tseng": recipes.mxfp4_tseng(),
    "ue5m3": recipes.ue5m3(),
    "ti2d": recipes.ti2d(),
    "four_over_six": recipes.four_over_six(),
    "quartet2": recipes.quartet2(),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_recipe_with_stochastic_rounding_does_round_stochastically(name):
    """Report: a flag on the way is silently false, so rounding is to nearest."""
    recipe = DRAWING[name]
    first, other = (
        compiled(X, W, DY, jax.random.key(seed), recipe=recipe) for seed in (0, 1)
    )
    for a, b in zip(first, other, strict=True):
        assert share_of_different(a, b) > 0.5
    with pytest.raises(ValueError, match="key must be a PRNG key to differentiate"):
        gradients(X, W, DY, None, recipe)


def test_layers_and_steps_of_a_module_draw_their_own_noise():
    """Reports: modules with a generator of their own repeat it, and nobody sees it."""
    rngs = nnx.Rngs(0)
    layers = [fp4jax.nnx.DotGeneral(RECIPE, rngs=rngs) for _ in range(2)]
    graphs = [nnx.split(layer) for layer in layers]

    @functools.partial(jax.jit, static_argnums=0)
    def dw(graph, state, step):
        layer = nnx.merge(graph, state, copy=True)
        fp4jax.nnx.set_step(layer, step)
        return jax.grad(lambda w: jnp.vdot(layer(X, w, MATMUL), DY))(W)

    results = [dw(*graph, step) for graph in graphs for step in range(2)]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert share_of_different(a, b) > 0.9
    assert_equal(dw(*graphs[0], 0), results[0])


# --- Meshes ------------------------------------------------------------------------

MESHES = {
    "one device": ((1,), ("data",)),
    "data 8": ((8,), ("data",)),
    "data 4, fsdp 2": ((4, 2), ("data", "fsdp")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_those_of_one_device_on_every_mesh(name, axis_type):
    """Reports: the noise's shape or sharding breaks on a mesh of one device, and on
    data with parameter sharding; implicit resharding raises on explicit axes."""
    sizes, names = MESHES[name]
    x, w, dy = normal(1, 128, 64), normal(2, 64, 64), normal(3, 128, 64)
    plain = compiled(x, w, dy, KEY)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, names, (axis_type,) * len(names), devices=devices)
    row = jax.P("data", None)
    with jax.set_mesh(mesh):
        x, dy = (jax.device_put(a, jax.NamedSharding(mesh, row)) for a in (x, dy))
        spec = jax.P(None, "fsdp") if "fsdp" in names else jax.P()
        w = jax.device_put(w, jax.NamedSharding(mesh, spec))
        if axis_type == AxisType.Explicit and "fsdp" in names:
            dy = jax.device_put(dy, jax.NamedSharding(mesh, jax.P("data", "fsdp")))
        ours = compiled(x, w, dy, KEY)
    # The same operands; sums over a sharded contraction come in another order.
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_two_runs_are_equal_bit_for_bit():
    """Report: runs with sharding and recomputation are not deterministic."""

    def run():
        jax.clear_caches()
        mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
        with jax.set_mesh(mesh):
            x, dy = (
                jax.device_put(a, jax.NamedSharding(mesh, jax.P("data", None)))
                for a in (normal(1, 128, 64), normal(3, 128, 64))
            )
            f = jax.checkpoint(gradients)
            return jax.device_get(jax.jit(f)(x, normal(2, 64, 64), dy, KEY))

    assert_equal(run(), run())


# --- How often and how operands are quantized --------------------------------------


def count(jaxpr, name="fp4_quantize"):
    """Equations of a name in a program and in all it calls."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == name:
            total += 1
            continue
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += count(inner, name)
    return total


def quantizations(f, *args):
    return count(jax.make_jaxpr(f)(*args).jaxpr)


NO_SAVING = jax.checkpoint_policies.nothing_saveable


def test_nothing_is_quantized_twice_in_a_pass():
    """Reports: activations are quantized twice in the forward pass, and again under
    remat although their codes could have been kept."""
    shared = recipes.ti2d()
    both = lambda f: jax.value_and_grad(f, (0, 1))
    assert quantizations(dot, X, W, KEY) == 2
    assert quantizations(both(loss), X, W, KEY) == 6
    # One layer and a function of its output: the recomputed pass has its two sites.
    remat = jax.checkpoint(loss, policy=NO_SAVING)
    assert quantizations(both(remat), X, W, KEY) == 8
    # A recipe with one dy for both gradients quantizes it once.
    f = functools.partial(loss, recipe=shared)
    assert quantizations(both(f), X, W, KEY) == 5


def test_recomputation_repeats_the_bits():
    """Report: remat around quantized layers breaks or changes gradients."""

    def model(x, w1, w2, key):
        hidden = jnp.tanh(dot(x, w1, jax.random.fold_in(key, 0)))
        return loss(hidden, w2, jax.random.fold_in(key, 1))

    args = X, W, normal(4, N, 40), KEY
    plain = jax.jit(jax.grad(model, (0, 1, 2)))(*args)
    remat = jax.checkpoint(model, policy=NO_SAVING)
    assert_equal(jax.jit(jax.grad(remat, (0, 1, 2)))(*args), plain)


def test_forward_in_one_format_and_backward_in_another():
    """Request: forward in NVFP4, backward in MXFP8."""
    nvfp4, mxfp8 = recipes.nvfp4(), recipes.mxfp8()
    mixed = recipes.Recipe(nvfp4.fprop, mxfp8.dgrad, mxfp8.wgrad)

    @functools.partial(jax.jit, static_argnums=0)
    def all_three(recipe):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, KEY, recipe), X, W)
        return y, *vjp(DY)

    ours, y, grads = all_three(mixed), all_three(nvfp4)[0], all_three(mxfp8)[1:]
    assert_equal(ours, (y, *grads))
    assert share_of_different(ours[0], all_three(mxfp8)[0]) > 0.9


def test_mxfp8_gradients_are_e4m3():
    """Report: MXFP8 with E5M2 gradients diverges."""
    grids = {q.grid for q in recipes.mxfp8().sites.values()}
    assert grids == {E4M3}


def test_block_scales_are_rounded_to_nearest():
    """Report: a kernel's scales are truncated, and differ from the reference's."""
    x = inputs.matrix("heavy", "float32", (64, 256))
    quantizer = Quantizer(E2M1, scale=Scale(E4M3))
    q = fp4jax.quantize(jnp.asarray(x), quantizer)
    wanted = np.abs(x).reshape(64, -1, 16).max(-1) * np.float32(1 / 6)
    assert_equal(q.scales, wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


# --- State -------------------------------------------------------------------------


def two_uses(xs, held):
    return sum(held_loss(x, held) for x in xs)


def two_lanes(xs, held):
    return jnp.sum(jax.vmap(held_loss, in_axes=(0, None))(xs, held))


def held_loss(x, held):
    product = fp4jax.dot_general(
        x, W, MATMUL, recipe=recipes.ue5m3(), key=KEY, held=held, step=jnp.int32(0)
    )
    return jnp.vdot(jnp.sin(product), DY)


@pytest.mark.parametrize("uses", [two_uses, two_lanes])
def test_the_state_of_a_layer_used_twice_is_the_larger_amax_and_never_nan(uses):
    """Reports: amaxes of tied layers and of lanes are summed as gradients are; one bad
    step poisons every later one, and the checkpoint."""

    @jax.jit
    def step(xs, held):
        convert = lambda held: lax.convert_element_type(held, fp32_max_grad)
        return jax.grad(lambda held: uses(xs, convert(held)))(held)

    xs = jnp.stack([X, 3 * X])
    state = step(xs, jnp.zeros(3))
    assert_equal(state[:2], jnp.stack([jnp.max(jnp.abs(xs)), jnp.max(jnp.abs(W))]))
    assert 0 < state[2] < jnp.max(jnp.abs(DY)) * 1.01
    broken = step(xs.at[0, 3, 5].set(jnp.nan), state)
    assert_equal(broken[:2], state[:2])
    assert np.all(np.isfinite(broken))


# --- Small, zero and broken numbers ------------------------------------------------


@pytest.mark.parametrize("exponent", [-20, -40])
def test_small_gradients_are_not_lost(exponent):
    """Reports: with one level of scales the gradient of a mean loss is exactly 0; the
    first weight gradient is NaN."""
    factor = jnp.float32(2.0**exponent)
    wanted = [g * factor for g in compiled(X, W, DY, KEY)]
    assert_equal(compiled(X, W, DY * factor, KEY), wanted)


@pytest.mark.parametrize("recipe", DRAWING.values(), ids=DRAWING)
def test_an_operand_that_starts_at_zero(recipe):
    """Report: adapters whose second matrix starts at zero give NaN."""

    @jax.jit
    def run(x, w):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, KEY, recipe), x, w)
        return y, *vjp(DY)

    y, dx, dw = run(X, jnp.zeros_like(W))
    assert not np.any(y) and not np.any(dx)
    exact = np.asarray(X).T @ np.asarray(DY)
    assert np.linalg.norm(dw - exact) < 0.4 * np.linalg.norm(exact)
    y, dx, dw = run(jnp.zeros_like(X), W)
    assert not np.any(y) and not np.any(dw)
    assert np.all(np.isfinite(dx)) and np.any(dx)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", DRAWING.values(), ids=DRAWING)
def test_a_number_that_is_not_finite_surfaces(recipe, bad):
    """Reports: NaN casts to a finite FP4 code, and a guard hides it from the loss."""

    @jax.jit
    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, KEY, recipe), x, w)
        return y, *vjp(dy)

    broken = lambda a: a.at[3, 5].set(bad)
    y, _, dw = run(broken(X), W, DY)
    assert not np.all(np.isfinite(y[3]))
    assert not np.all(np.isfinite(dw[5]))
    y, dx, _ = run(X, broken(W), DY)
    assert not np.all(np.isfinite(y[:, 5])) and not np.all(np.isfinite(dx[:, 3]))
    _, dx, dw = run(X, W, broken(DY))
    assert not np.all(np.isfinite(dx[3])) and not np.all(np.isfinite(dw[:, 5]))


# --- Shapes, einsum, parameters ----------------------------------------------------


def test_sizes_that_no_block_divides():
    """Report: a contraction that is no multiple of the tile raises."""
    x, w, dy = normal(1, 7, 19), normal(2, 19, 5), normal(3, 7, 5)
    dx, dw = compiled(x, w, dy, KEY)
    assert dx.shape == x.shape and dw.shape == w.shape
    for ours, exact in ((dx, dy @ w.T), (dw, x.T @ dy)):
        assert np.linalg.norm(ours - exact) < 0.4 * np.linalg.norm(exact)


def test_a_lane_without_a_weight_of_its_own():
    """Report: vmap over the left operand alone trips an assertion."""
    xs, dys = normal(1, 3, M, K), normal(3, 3, M, N)
    lanes = jax.jit(jax.vmap(gradients, in_axes=(0, None, 0, None)))(xs, W, dys, KEY)
    for i in range(3):
        for a, b in zip(lanes, compiled(xs[i], W, dys[i], KEY), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-5)


def test_a_quantized_tensor_goes_through_vmap_and_scan():
    """Report: a scaled tensor is no pytree that vmap can map over."""
    xs = normal(1, 3, M, K)
    quantizer = RECIPE.fprop.x
    stacked = jax.jit(jax.vmap(lambda x: fp4jax.quantize(x, quantizer)))(xs)
    values = jax.jit(jax.vmap(fp4jax.dequantize))(stacked)
    body = lambda carry, q: (carry, fp4jax.dequantize(q))
    scanned = jax.jit(lambda q: lax.scan(body, 0, q)[1])(stacked)
    fake_quant = jax.jit(fp4jax.fake_quant, static_argnums=1)
    alone = jnp.stack([fake_quant(x, quantizer) for x in xs])
    assert_equal(values, alone)
    assert_equal(scanned, alone)


def test_a_target_that_is_computed_inside_a_gradient():
    """Report: a global scale computed inside `grad` leaks a tracer."""

    def scaled(x, w):
        amax = jnp.max(jnp.abs(x))
        x_dq = fp4jax.fake_quant(x, RECIPE.fprop.x, amax=amax)
        return jnp.sum(jnp.sin(x_dq @ w))

    dx = jax.jit(jax.grad(scaled))(X, W)
    assert np.all(np.isfinite(dx)) and np.any(dx)


EINSUMS = {
    "bsd,df->bsf": ((2, 8, 48), (48, 64)),
    "bshd,hdf->bsf": ((2, 8, 3, 16), (3, 16, 64)),
    "ebd,edf->ebf": ((3, 8, 48), (3, 48, 64)),
}


@pytest.mark.parametrize("spec", EINSUMS)
@pytest.mark.parametrize("wrap", [jnp.asarray, nnx.Param], ids=["array", "parameter"])
def test_einsum_of_arrays_and_of_parameters(spec, wrap):
    """Reports: a quantized einsum does not exist, or fails on a module's parameter."""
    x, w = (normal(i, *shape) for i, shape in enumerate(EINSUMS[spec]))
    einsum = functools.partial(fp4jax.einsum, spec, recipe=RECIPE, key=KEY)
    exact = jnp.einsum(spec, x, w)
    y = jax.jit(lambda x, w: einsum(x, wrap(w)))(x, w)
    assert 0.05 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.25
    dw = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(einsum(x, wrap(w))))))(w)
    assert dw.shape == w.shape and np.all(np.isfinite(dw)) and np.any(dw)


def test_einsum_under_vmap():
    """Report: a quantized einsum has no batching rule."""
    x, w = normal(1, 3, 2, 8, 48), normal(2, 48, 64)
    einsum = functools.partial(fp4jax.einsum, "bsd,df->bsf", recipe=RECIPE, key=KEY)
    lanes = jax.jit(jax.vmap(einsum, in_axes=(0, None)))(x, w)
    for i in range(3):
        alone = jax.jit(einsum)(x[i], w)
        np.testing.assert_allclose(lanes[i], alone, rtol=1e-6, atol=1e-5)


def test_arrays_of_four_bit_floats_are_refused_in_words():
    """Report: their product fails in the compiler of a CPU."""
    x = X.astype(jnp.float4_e2m1fn)
    with pytest.raises(TypeError, match="lhs must be float32.*got dtype=float4_e2m1fn"):
        jax.jit(dot)(x, W)


# --- Casts, codes, transforms, files -----------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("site", [Site.FPROP_X, Site.DGRAD_DY, Site.WGRAD_DY])
def test_compiled_values_equal_eager_ones(site, dtype):
    """Report: a compiler drops a narrowing cast, so the rounding is not there."""
    x = jnp.asarray(inputs.matrix("heavy", dtype, (32, 64)), dtype)
    fake_quant = functools.partial(
        fp4jax.fake_quant, quantizer=RECIPE.sites[site], key=KEY, site=site
    )
    compiled = jax.jit(lambda x: fake_quant(x))(x)
    assert_equal(compiled, fake_quant(x))
    assert share_of_different(compiled, x) > 0.5


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("encoding", ["sign_magnitude", "twos_complement"])
def test_codes_survive_packing(encoding, axis):
    """Report: two 4-bit codes cannot be joined or taken apart."""
    codes = np.arange(16, dtype=np.uint8)
    codes = np.array(np.meshgrid(codes, codes)).reshape(2, -1).T  # all pairs
    if encoding == "twos_complement":
        codes = codes[np.all(codes != 8, 1)]  # no -0 among integers
    codes = jnp.asarray(codes if axis else codes.T)
    packed = jax.jit(lambda c: packing.pack(c, axis=axis, encoding=encoding))(codes)
    assert packed.size == codes.size // 2
    assert_equal(packing.unpack(packed, axis=axis, encoding=encoding), codes)


def test_one_8_bit_format_to_another():
    """Report: no conversion from one FP8 format to the other."""
    x = formats.decode(jnp.arange(0x7C, dtype=jnp.uint8), E5M2)
    quantizer = Quantizer(E4M3, 1, Scale(E4M3), Fresh())
    fake_quant = jax.jit(fp4jax.fake_quant, static_argnums=1)
    x_dq = fake_quant(x[:, None], quantizer)[:, 0]
    # Blocks of one element: the scale carries the exponent, within its range.
    kept = np.asarray(x) > float(x.max()) * 2.0**-14
    np.testing.assert_allclose(x_dq[kept], x[kept], rtol=2.0**-4)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256])
def test_every_hadamard_matrix_is_orthogonal(size):
    """Report: the matrix of one size is not."""
    h = hadamard.matrix(size).astype(int)
    assert_equal(h @ h.T, size * np.eye(size, dtype=int))
    assert Hadamard(size).size == size


def test_codes_and_scales_survive_numpy_files_and_checkpoints(tmp_path):
    """Report: saved arrays of small floats lose their dtype."""
    q = fp4jax.quantize(X, RECIPE.fprop.x)
    leaves, structure = jax.tree.flatten(q)
    np.savez(tmp_path / "q.npz", *leaves)
    with np.load(tmp_path / "q.npz") as file:
        loaded = [file[name] for name in file.files]
    for a, b in zip(loaded, leaves, strict=True):
        assert a.dtype == b.dtype
        assert_equal(a, b)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", q)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", q)
    assert jax.tree.structure(restored) == structure
    assert_equal(fp4jax.dequantize(restored), fp4jax.dequantize(q))


def test_no_environment_variable_changes_the_numbers():
    """Report: variables read at import change the mathematics without a trace."""
    root = pathlib.Path(fp4jax.__file__).parent
    sources = [p for f in ("numerics", "ops", "recipes") for p in (root / f).iterdir()]
    texts = [path.read_text() for path in sources if path.suffix == ".py"]
    assert len(texts) > 20
    assert not [text for text in texts if "environ" in text or "getenv" in text]
