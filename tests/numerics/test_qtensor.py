"""QTensors under transforms, their operands and values, and fake quantization."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E5M2,
    E8M0,
    INT2,
    UE5M3,
    UE5M3_FN,
    UNIFORM,
    Quantizer,
    Scale,
)
from tests.numerics import cases
from tests.numerics.cases import ALL, FEW, KEY, quantize_all

SHAPE = (8, 72)
X = cases.normal(SHAPE)
KEYS = jax.random.split(KEY, 3)


# Bits are the same for every tracing.


def in_blocks_of_16(names):
    """Quantizers by name, their blocks of one size: eager operations compile once."""
    return {
        name: dataclasses.replace(
            ALL[name], block=(16, 16) if ALL[name].is_square else 16
        )
        for name in names
    }


EAGER = in_blocks_of_16(
    [
        # Every way to make a scale, and grids of every width.
        "uniform-f32",
        "e2m1-e4m3",
        "uniform-ue5m3",
        "e2m1-floor",
        "int2-even",
        "e4m3-e8m0",
        "nvfp4-square",
        "nvfp4-rht16",
        "uniform-f32-sr",
        "nvfp4-sr",
    ]
)


@functools.partial(jax.jit, static_argnums=0)
def jitted(quantize, x):
    return {name: quantize(x, q) for name, q in EAGER.items()}


def quantize_and_read(x, q):
    q = fp4jax.quantize(x, q, key=KEY)
    return q, fp4jax.operand(q)


@pytest.mark.parametrize("name", EAGER)
def test_eager_equals_jit(name):
    x = X[:, :40].astype(jnp.bfloat16)
    q, operand = quantize_and_read(x, EAGER[name])
    q_jit, operand_jit = jitted(quantize_and_read, x)[name]
    cases.assert_same(q, q_jit)
    np.testing.assert_array_equal(operand, operand_jit)


def test_producers_and_consumers_do_not_change_bits():
    """Fused with the product that makes x, and with a sum of what is read."""
    names = ("uniform-f32", "e4m3-e8m0", "nvfp4-sr", "nvfp4-square")

    @jax.jit
    def fused(a, b):
        qtensors = quantize_all({name: ALL[name] for name in names}, a * b)
        return qtensors, {n: v + a for n, v in cases.dequantize_all(qtensors).items()}

    a, b = X, cases.normal(SHAPE, seed=1)
    separate, _ = cases.everything(jax.jit(jnp.multiply)(a, b))
    cases.assert_same(fused(a, b)[0], {name: separate[name] for name in names})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharding_does_not_change_bits(axis_type):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    x = cases.normal((32, 256), "bfloat16")
    run = jax.jit(lambda x: [quantize_and_read(x, q) for q in FEW.values()])
    expected = run(x)
    with jax.set_mesh(mesh):
        sharded = run(jax.device_put(x, NamedSharding(mesh, P("a", "b"))))
    cases.assert_same(sharded, expected)


def test_an_error_says_which_axis_devices_cut_in_parts_of_blocks():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    cut = r"axis 1 must be spread in whole runs of 16, got shape=\(32, 64\)"
    with jax.set_mesh(mesh), pytest.raises(Exception, match=cut):
        x = jax.device_put(jnp.ones((32, 64)), P(None, "a"))
        fp4jax.fake_quant(x, Quantizer(E2M1, block=16))


@pytest.mark.parametrize("read", [fp4jax.dequantize, fp4jax.operand])
def test_what_is_no_qtensor_is_refused(read):
    with pytest.raises(TypeError, match="q must be what .* returns, got ArrayImpl"):
        read(X)


@pytest.mark.parametrize("scale", [-110, 0, 110], ids=lambda k: f"2^{k}")
def test_a_gpu_computes_the_same_bits(scale):
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("no GPU")
    x = jnp.ldexp(cases.normal((128, 256)), scale)
    on_cpu, on_gpu = (
        cases.everything(*jax.device_put((x, KEY), device))
        for device in (jax.devices("cpu")[0], gpu)
    )
    cases.assert_same(on_gpu[0], on_cpu[0])
    for name, value in on_cpu[1].items():
        if ALL[name].rotation is None:
            np.testing.assert_array_equal(on_gpu[1][name], value, err_msg=name)


# Transforms.


def test_is_a_pytree():
    q = cases.everything(X)[0]["nvfp4-rht16"]
    leaves, structure = jax.tree.flatten(q)
    assert [leaf.shape for leaf in leaves] == [(8, 80), (8, 5), (), (16,)]
    assert jax.tree.unflatten(structure, leaves).quantizer == ALL["nvfp4-rht16"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(q)]
    assert paths == [".codes", ".scales", ".tensor_scale", ".signs"]
    plain = cases.everything(X)[0]["uniform-f32"]
    assert len(jax.tree.leaves(plain)) == 2
    assert hash(structure) == hash(jax.tree.structure(q))


@jax.jit
def quantize_few(x, key):
    return quantize_all(FEW, x, key=key)


def scan(xs, keys):
    return jax.lax.scan(lambda _, a: (None, quantize_few(*a)), None, (xs, keys))[1]


@pytest.mark.parametrize(
    ("transform", "keys"),
    [
        pytest.param(jax.vmap(quantize_few, (0, None)), None, id="vmap-one-key"),
        pytest.param(jax.vmap(quantize_few), KEYS, id="vmap-a-key-each"),
        pytest.param(scan, KEYS, id="scan"),
    ],
)
def test_batches_equal_a_loop(transform, keys):
    x = cases.normal((3, *SHAPE))
    batch = jax.jit(transform)(x, KEY if keys is None else keys)
    each = [quantize_few(x[i], KEY if keys is None else keys[i]) for i in range(3)]
    cases.assert_same(batch, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


def test_vmap_over_keys_alone():
    q = ALL["nvfp4-sr"]
    codes = jax.jit(jax.vmap(lambda key: fp4jax.quantize(X, q, key=key).codes))(KEYS)
    for key, lane in zip(KEYS, codes, strict=True):
        expected, _ = cases.everything(X, key)
        np.testing.assert_array_equal(lane, expected["nvfp4-sr"].codes)


def test_batched_qtensors_are_read_under_vmap():
    x = cases.normal((3, *SHAPE))
    qtensors = jax.jit(jax.vmap(lambda x: quantize_all(FEW, x)))(x)
    values = jax.jit(jax.vmap(cases.dequantize_all))(qtensors)
    for name in FEW:
        _, expected = cases.everything(x[1])
        np.testing.assert_array_equal(values[name][1], expected[name], err_msg=name)


def test_carried_through_a_scan():
    q = cases.everything(X)[0]["nvfp4-rht16"]

    @jax.jit
    def carry(q):
        return jax.lax.scan(lambda q, _: (q, fp4jax.operand(q)), q, length=2)

    carried, operands = carry(q)
    cases.assert_same(carried, q)
    np.testing.assert_array_equal(operands[0], operands[1])


# Operands and values.


DTYPES = (jnp.bfloat16, jnp.float32)


def every_code_and_scale(grid, fmt):
    """A QTensor of all codes in a row under every scale, and its values in float64."""
    codes = np.arange(2 << grid.magnitude_bits, dtype=np.uint8)
    codes = codes[(codes & (1 << grid.magnitude_bits) - 1) < len(grid.magnitudes)]
    scales = np.float32(fmt.magnitudes)[:, None]
    if fmt == E8M0:
        low, high = {E4M3: (-117, 119), E5M2: (-110, 112)}.get(grid, (-125, 125))
        scales = np.ldexp(np.float32(1), np.arange(low, high + 1))[:, None]
    q = fp4jax.QTensor(
        codes=jnp.asarray(np.tile(codes, (len(scales), 1))),
        scales=jnp.asarray(scales),
        tensor_scale=jnp.float32(3.0),  # not of the operand
        signs=None,
        quantizer=Quantizer(grid, block=len(codes), scale=Scale(fmt)),
        axis=1,
        other=None,
        shape=(len(scales), len(codes)),
        dtype=jnp.dtype("float32"),
    )
    sign = np.where(codes >> grid.magnitude_bits, -1, 1)
    return q, sign * cases.magnitudes(codes, grid) * np.float64(scales)


def test_operand_of_every_code_and_scale_is_exact_in_bfloat16():
    pairs = [
        (g, s)
        for g in (E2M1, UNIFORM, INT2, E2M1_TO_2)
        for s in (E4M3, UE5M3, UE5M3_FN, E8M0)
    ]
    pairs += [(E4M3, E8M0), (E5M2, E8M0)]
    rows = {pair: every_code_and_scale(*pair) for pair in pairs}
    qtensors = [q for q, _ in rows.values()]
    read = jax.jit(
        lambda qs: [[fp4jax.operand(q, dtype) for q in qs] for dtype in DTYPES]
    )
    for dtype, operands in zip(DTYPES, read(qtensors), strict=True):
        for (pair, (_, expected)), operand in zip(rows.items(), operands, strict=True):
            assert operand.dtype == dtype
            operand = np.asarray(operand, np.float64)
            np.testing.assert_array_equal(operand, expected, err_msg=str(pair))


def test_operand_under_float32_scales_is_rounded_to_nearest():
    q = cases.everything(X)[0]["uniform-f32"]
    exact = fp4jax.operand(q, jnp.float32)
    expected = np.asarray(exact).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(fp4jax.operand(q), expected)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-square", "e4m3-e8m0"])
def test_values_are_codes_times_scales(name):
    qtensors, values = cases.everything(X)
    q = qtensors[name]
    sign = np.where(np.asarray(q.codes) >> q.quantizer.grid.magnitude_bits, -1, 1)
    product = sign * cases.magnitudes(q.codes, q.quantizer.grid)
    product = (product * cases.spread(q.scales, q)).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(fp4jax.operand, static_argnums=1)(q, jnp.float32), product
    )
    tensor_scale = np.float32(1 if q.tensor_scale is None else q.tensor_scale)
    np.testing.assert_array_equal(values[name], (product * tensor_scale)[:, :72])


@pytest.mark.parametrize("name", ["uniform-f32-rht16", "nvfp4-rht16"])
def test_a_rotation_is_in_the_operand_and_not_in_the_values(name):
    qtensors, values = cases.everything(X)
    q = qtensors[name]
    operand = np.asarray(fp4jax.operand(q, jnp.float32), np.float64)
    if q.tensor_scale is not None:
        operand = operand * float(q.tensor_scale)
    # Norms are kept by the rotation; operand and values are not the same.
    np.testing.assert_allclose(
        np.linalg.norm(operand[:, :64]), np.linalg.norm(values[name][:, :64]), rtol=1e-6
    )
    assert not np.allclose(operand[:, :64], values[name][:, :64], atol=0.1)
    assert np.linalg.norm(values[name] - X) < 0.12 * np.linalg.norm(X)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8, "float8_e4m3fn"], ids=str)
def test_operand_refuses_other_dtypes(dtype):
    q = cases.everything(X)[0]["nvfp4"]
    message = (
        "^operand: dtype must be bfloat16 or float32, got dtype=(float16|int8|float8)"
    )
    with pytest.raises(TypeError, match=message):
        fp4jax.operand(q, dtype)


# Gradients.


@pytest.mark.parametrize(
    ("wrap", "dtype"),
    [(lambda f: f, "float32"), (jax.checkpoint, "bfloat16")],
    ids=["float32", "bfloat16-remat"],
)
def test_gradients_pass_straight_through(wrap, dtype):
    q = ALL["nvfp4-sr"]
    x, cotangent = X.astype(dtype), cases.normal(SHAPE, dtype, seed=1)

    @jax.jit
    def pull(x, cotangent):
        fake_quant = wrap(lambda x: fp4jax.fake_quant(x, q, key=KEY))
        value, pullback = jax.vjp(fake_quant, x)
        return value, pullback(cotangent)[0]

    value, gradient = pull(x, cotangent)
    assert gradient.dtype == value.dtype == x.dtype
    np.testing.assert_array_equal(gradient, cotangent)
    _, values = cases.everything(x.astype(jnp.float32))
    np.testing.assert_array_equal(value, values["nvfp4-sr"].astype(dtype))


def test_gradients_inside_scan_and_vmap():
    q = ALL["nvfp4-sr"]

    @jax.jit
    def gradient(x, keys):
        def loss(x):
            def step(total, slices):
                value = fp4jax.fake_quant(slices[0], q, key=slices[1])
                return total + jnp.sum(value * slices[0]), None

            return jax.lax.scan(jax.checkpoint(step), jnp.float32(0), (x, keys))[0]

        batch = jax.vmap(lambda x, key: fp4jax.fake_quant(x, q, key=key))(x, keys)
        return jax.grad(loss)(x), batch

    x = cases.normal((3, *SHAPE))
    actual, values = gradient(x, KEYS)
    np.testing.assert_allclose(actual, values + x, rtol=1e-6)


def test_tangents_and_second_derivatives():
    q = ALL["nvfp4"]
    value, tangent = jax.jit(
        lambda x, t: jax.jvp(lambda x: fp4jax.fake_quant(x, q), (x,), (t,))
    )(X, X)
    np.testing.assert_array_equal(tangent, X)
    np.testing.assert_array_equal(value, cases.everything(X)[1]["nvfp4"])
    second = jax.jit(jax.hessian(lambda x: jnp.sum(fp4jax.fake_quant(x, q) ** 2)))
    np.testing.assert_array_equal(second(X[0, :4]), 2 * np.eye(4))


def test_no_gradient_flows_through_quantize():
    q = ALL["nvfp4"]
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(fp4jax.dequantize(fp4jax.quantize(x, q))))
    )
    np.testing.assert_array_equal(gradient(X), np.zeros(SHAPE))


def test_fake_quant_raises_as_quantize():
    with pytest.raises(ValueError, match="^quantize: key must be a PRNG key"):
        fp4jax.fake_quant(X, ALL["nvfp4-sr"])


def test_fake_quant_takes_what_quantize_takes():
    x = np.arange(16.0, dtype=np.float32)
    fake_quant = jax.jit(lambda: fp4jax.fake_quant(x.tolist(), ALL["nvfp4"]))
    q = jax.jit(lambda x: fp4jax.quantize(x, ALL["nvfp4"]))(x)
    np.testing.assert_array_equal(fake_quant(), fp4jax.dequantize(q))
