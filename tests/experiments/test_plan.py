"""Plans of runs: what a device holds and sends, and how long it would take."""

import dataclasses
import math

import pytest
from flax import nnx

from experiments import estimate, footprint, plan, presets
from experiments.collectives import Collective
from experiments.devices import DEVICES
from fp4jax import models, recipes, sharding
from fp4jax.models import Transformer
from fp4jax.policies import Policy

SIZES = {
    "num_layers": 2,
    "d_model": 64,
    "d_ff": 128,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
}
CONFIG = presets.resolve(
    "tiny",
    policy_names=["bf16"],
    alone=True,
    assignments=[
        *(f"model.{name}={size}" for name, size in SIZES.items()),
        "data.batch_size=8",
        "data.sequence_length=32",
    ],
)
TOKENS = 8 * 32


@pytest.fixture(scope="module")
def measured():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    found, model = footprint.measure(CONFIG, mesh=mesh)
    return mesh, found, model


def test_a_device_holds_its_part_of_the_state(measured):
    _, found, _ = measured
    count = models.num_params(CONFIG.model)
    norms = 4 * 64 * (2 * CONFIG.model.num_layers + 1)  # which every device has whole
    assert found.params == (4 * count - norms) // 8 + norms
    assert 0 <= found.optimizer - 2 * found.params < 64  # and the counts of steps
    # A block saves its input and the outputs of its linear layers, in bfloat16, the
    # latter divided over tensor but for what is added to the residual stream.
    width = 64 + 2 * 64 + (3 * 64 + 2 * 128) / 2
    saved = 2 * CONFIG.model.num_layers * TOKENS / 4 * width
    assert saved <= found.residuals < 3 * saved
    assert found.params + found.optimizer + found.residuals < found.least < found.peak


def test_weights_are_gathered_in_bfloat16_in_both_directions(measured):
    _, found, _ = measured
    layers = CONFIG.model.num_layers * (4 * 64 * 64 + 3 * 64 * 128)
    head = CONFIG.model.vocab_size * 64
    gathered = sum(
        each.bytes * each.times for each in found.collectives if "gather" in each.kind
    )
    assert gathered == 2 * 2 * (layers + head) // 2 + 4 * TOKENS


def test_experts_are_sent_equal_shares_of_tokens():
    blocks = ("model.num_layers=1", "model.blocks=E")
    config = presets.of_batch("moe_tiny", 8, 32, *blocks)
    found, _ = footprint.measure(config, mesh=sharding.make_mesh(expert=4))
    # Two experts of a device may need 11 tiles of 16 for the choices of two rows.
    share, d = -(-11 // 4), config.model.d_model
    sent = {
        each.bytes
        for each in found.collectives
        if each.kind == "all-to-all" and each.arrays[0][1][-1] == d
    }
    assert sent == {4 * 4 * share * 16 * d}  # which a CPU sends in float32


def test_time_is_what_is_done_over_what_the_device_can(measured):
    mesh, _, model = measured
    device = DEVICES["H100"]
    kib = ("u8", (1024,))
    within = Collective("all-gather", (kib,), devices=(0, 1, 2, 3), times=2)
    across = Collective("all-reduce", (kib,), devices=(0, 8), times=1)
    tensor = Collective("all-reduce", (kib,), devices=(0, 1), times=1)
    parts = Collective("reduce-scatter", (kib,), devices=(0, 1, 2, 3), times=1)
    found = estimate.estimate(
        model,
        CONFIG,
        mesh=mesh,
        device=device,
        state_bytes=10**6,
        collectives=[within, parts, tensor, across],
    )
    gemms = (
        6 * TOKENS * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * CONFIG.model.vocab_size)
    )
    assert found.gemms == pytest.approx(gemms / 8 / (0.75 * 989.4e12))
    assert found.quantizers == 0
    assert found.optimizer == pytest.approx(2e6 / (0.65 * 3.35e12))
    # Of the sum over other axes than tensor, of gradients, each device keeps a part.
    sent = ((2 + 4) * 3 / 4 + 2 / 2) * 1024 / (0.8 * 450e9) + 1024 / 2 / (0.8 * 50e9)
    assert found.communication == pytest.approx(sent)
    best, worst = found.bounds
    assert best == max(found.compute, found.communication)
    assert worst == pytest.approx(found.compute + found.communication)


def test_quantizers_take_as_long_as_copies_of_their_operands():
    def seconds(policy, device):
        shape = CONFIG.model
        model = nnx.eval_shape(
            lambda: Transformer(shape, Policy(policy()), rngs=nnx.Rngs(0))
        )
        return estimate.estimate(
            model,
            CONFIG,
            mesh=sharding.make_mesh(),
            device=DEVICES[device],
            state_bytes=0,
            collectives=(),
        ).quantizers

    weights = 4 * 64 * 64 + 3 * 64 * 128
    operands = 2 * (TOKENS * (2 * 8 * 64 + 2 * 3 * (64 + 128)) + 2 * weights)
    plain = 4 * operands / (0.65 * 4.8e12)
    assert seconds(recipes.ufp4, "H200") == pytest.approx(plain)
    assert seconds(recipes.nvfp4, "H200") == pytest.approx(1.5 * plain)  # and its amax
    assert seconds(recipes.ufp4, "MI350") > 2 * seconds(recipes.ufp4, "H200")


@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
def test_devices_share_the_work_of_experts(axis):
    shape = models.PRESETS["qwen3_tiny"]
    config = dataclasses.replace(CONFIG, model=shape)
    policy = Policy(recipes.bf16())
    model = nnx.eval_shape(lambda: Transformer(shape, policy, rngs=nnx.Rngs(0)))

    def seconds(**sizes):
        return estimate.estimate(
            model,
            config,
            mesh=sharding.make_mesh(**sizes),
            device=DEVICES["H100"],
            state_bytes=0,
            collectives=(),
        ).gemms

    assert seconds(**{axis: 2}) == pytest.approx(seconds() / 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device=T4"], "--device: must be one of H100, H200, B200, MI350, got 'T4'"),
        (["--model=huge"], "--model: must be one of"),
        (["--policy=fp3"], "--policy: must be one of"),
        (["--mesh=rows=2"], "mesh must read AXIS=N"),
        (["--batch=0"], "--batch: must be at least 1, got 0"),
        (["--batch=63", "--mesh=fsdp=8"], "--batch: must be a multiple of 8, that is"),
        (["--batch=8", "--microbatches=3"], "of --microbatches=3 times 1 along data"),
        (["--set=data.batch_size=4"], "data.batch_size follows --batch; give that"),
        (["--set=run.microbatches=2"], "run.microbatches follows --microbatches"),
        (
            ["--mesh=data=4096", "--batch=4096"],
            "--mesh: must have at most 2048 devices, got 4096",
        ),
    ],
)
def test_a_bad_argument_is_one_sentence(argv, message, capsys):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_devices_are_those_whose_peak_is_known():
    for device in DEVICES.values():
        assert math.isfinite(device.flops) and device.network < device.link
