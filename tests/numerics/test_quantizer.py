"""Construction of quantizers and of their parts: values, defaults, and errors."""

import dataclasses
import re

import pytest

from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    F32,
    INT2,
    UE5M3,
    UNIFORM,
    FixedSigns,
    Format,
    Fresh,
    Hadamard,
    PerStepSigns,
    Quantizer,
    Scale,
    Stochastic,
)
from tests.numerics.cases import ALL, SCALES

INVALID = {
    "grid-str": (
        lambda: Quantizer("E2M1"),
        TypeError,
        "Quantizer: grid must be Format, got grid='E2M1'",
    ),
    "grid-of-scales": (
        lambda: Quantizer(UE5M3),
        ValueError,
        r"Quantizer: grid must be one of \(E2M1, .*, got grid=UE5M3",
    ),
    "grid-unknown": (
        lambda: Quantizer(Format("E3M0", 3, 0, -2, 16.0)),
        ValueError,
        r"Quantizer: grid must be one of \(E2M1, .*, got grid=E3M0",
    ),
    "scale": (
        lambda: Quantizer(E2M1, scale=E4M3),
        TypeError,
        r"Quantizer: scale must be Scale, got scale=E4M3. Use Scale\(E4M3\)\.",
    ),
    "tensor-scale": (
        lambda: Quantizer(E2M1, tensor_scale=448.0),
        TypeError,
        "Quantizer: tensor_scale must be Fresh or Held or None, got tensor_scale=448.0",
    ),
    "rounding": (
        lambda: Quantizer(E2M1, rounding="nearest"),
        TypeError,
        "Quantizer: rounding must be Nearest or Stochastic or MSEden, got rounding='n",
    ),
    "rounding-class": (
        lambda: Quantizer(E2M1, rounding=Stochastic),
        TypeError,
        r"Quantizer: rounding must be .*, got .*<class .*>\. Use Stochastic\(\)\.",
    ),
    "rotation": (
        lambda: Quantizer(E2M1, rotation=16),
        TypeError,
        "Quantizer: rotation must be Hadamard or None, got rotation=16",
    ),
    "rotation-of-squares": (
        lambda: Quantizer(E2M1, block=(16, 16), rotation=Hadamard()),
        ValueError,
        "Quantizer: rotation must be None with square blocks, got .* Use block=16",
    ),
    "tensor-scale-over-f32": (
        lambda: Quantizer(E2M1, tensor_scale=Fresh()),
        ValueError,
        "Quantizer: tensor_scale must be None unless .*E4M3, UE5M3, .*=F32",
    ),
    "tensor-scale-over-e8m0": (
        lambda: Quantizer(E2M1, scale=Scale(E8M0), tensor_scale=Fresh()),
        ValueError,
        "Quantizer: tensor_scale must be None unless .*, got scale.format=E8M0",
    ),
    "target-over-largest": (
        lambda: Quantizer(E2M1, scale=Scale(E4M3), tensor_scale=Fresh(449)),
        ValueError,
        "Quantizer: tensor_scale.target must be at most .* 448.0, got target=449",
    ),
    "floor-on-uniform": (
        lambda: Quantizer(UNIFORM, scale=Scale(E8M0, "floor")),
        ValueError,
        "Scale: rule must not be 'floor' with grid=UNIFORM.* Use 'truncation_free'",
    ),
    "floor-on-int2": (
        lambda: Quantizer(INT2, scale=Scale(E8M0, "floor")),
        ValueError,
        "Scale: rule must not be 'floor' with grid=INT2",
    ),
    "format-str": (
        lambda: Scale("E4M3"),
        ValueError,
        r"Scale: format must be one of \(F32, .*, got format='E4M3'",
    ),
    "format-of-elements": (
        lambda: Scale(E2M1),
        ValueError,
        "Scale: format must be one of .*, got format=E2M1",
    ),
    "rule-without-e8m0": (
        lambda: Scale(F32, rule="floor"),
        ValueError,
        "Scale: rule must be None unless format is E8M0, got rule='floor' with .*=F32",
    ),
    "rule-unknown": (
        lambda: Scale(E8M0, rule="ceil"),
        ValueError,
        r"Scale: rule must be one of \('floor', .*, 'even'\), got rule='ceil'",
    ),
    "pad-int": (
        lambda: Scale(E4M3, pad=1),
        TypeError,
        "Scale: pad must be a bool or None, got pad=1",
    ),
    "pad-f32": (
        lambda: Scale(F32, pad=True),
        ValueError,
        "Scale: pad must not be set .*, got pad=True with format=F32",
    ),
    "pad-e8m0": (
        lambda: Scale(E8M0, pad=True),
        ValueError,
        "Scale: pad must not be set .*, got pad=True with format=E8M0",
    ),
    "signs-list": (
        lambda: Hadamard(4, [1, 1, -1, 1]),
        TypeError,
        r"Hadamard: signs must be FixedSigns, .*, got signs=\[1, 1, -1, 1\]",
    ),
    "signs-none": (
        lambda: Hadamard(4, None),
        TypeError,
        "Hadamard: signs must be FixedSigns, PerStepSigns or a tuple, got signs=None",
    ),
    "signs-short": (
        lambda: Hadamard(4, (1, 1, -1)),
        ValueError,
        r"Hadamard: signs must be 4 values of \+1 and -1, got signs=\(1, 1, -1\)",
    ),
    "signs-float": (
        lambda: Hadamard(2, (1.0, -1)),
        ValueError,
        r"Hadamard: signs must be 2 values of \+1 and -1, got signs=\(1.0, -1\)",
    ),
    "signs-bool": (
        lambda: Hadamard(2, (True, -1)),
        ValueError,
        r"Hadamard: signs must be 2 values of \+1 and -1, got signs=\(True, -1\)",
    ),
    "signs-zero": (
        lambda: Hadamard(4, (1, 0, -1, 1)),
        ValueError,
        r"Hadamard: signs must be 4 values of \+1 and -1, got signs=\(1, 0, -1, 1\)",
    ),
}
# What every constructor of one argument refuses, and what it says then.
BAD_VALUES = [
    (
        lambda block: Quantizer(E2M1, block=block),
        r"Quantizer: block must be an integer B >= 1 or a square \(B, B\), got block=",
        (
            0,
            -16,
            16.0,
            None,
            "16",
            [16, 16],
            (),
            (0, 0),
            (8, 16),
            (8,),
            (8, 8, 8),
            (8.0,) * 2,
            True,
            (1, True),
        ),
    ),
    (
        Fresh,
        "Fresh: target must be a finite number of at least 16, got target=",
        (15.9, 0, -448.0, float("nan"), float("inf"), "448", None, True),
    ),
    (
        Hadamard,
        "Hadamard: size must be an integer power of two from 2 to 256, got size=",
        (0, 1, 3, 24, 512, -16, 16.0, "16", None, True),
    ),
    (
        FixedSigns,
        r"FixedSigns: seed must be an integer in \[0, 2\^32\), got seed=",
        (-1, 2**32, 1.0, "0", None, True),
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), INVALID.values(), ids=INVALID)
def test_construction_errors(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("make", "message", "value"),
    [
        pytest.param(make, message, value, id=f"{message.split()[1]}-{value!r}")
        for make, message, values in BAD_VALUES
        for value in values
    ],
)
def test_bad_values(make, message, value):
    with pytest.raises(ValueError, match=f"^{message}{re.escape(repr(value))}"):
        make(value)


@pytest.mark.parametrize("name", ALL)
def test_quantizers_are_values(name):
    quantizer = ALL[name]
    copy = dataclasses.replace(quantizer)
    assert copy == quantizer and hash(copy) == hash(quantizer)
    assert sum(quantizer == other for other in ALL.values()) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.block = 8


def test_defaults():
    quantizer = Quantizer(E2M1)
    assert quantizer.block_size == 16 and not quantizer.is_square
    assert quantizer.scale == Scale(F32) and quantizer.tensor_scale is None
    assert not quantizer.is_stochastic and not quantizer.draws and not quantizer.pads
    assert Scale(E8M0) == Scale(E8M0, "truncation_free")
    assert Hadamard() == Hadamard(16, FixedSigns(0))


def test_squares():
    quantizer = Quantizer(E2M1, block=(32, 32))
    assert quantizer.block_size == 32 and quantizer.is_square


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "sr"])
def test_pads_where_it_draws_and_the_scale_rounds(scale, stochastic):
    options = {"rounding": Stochastic()} if stochastic else {}
    quantizer = Quantizer(E2M1, scale=SCALES[scale], **options)
    rounds = scale in ("e4m3", "ue5m3", "ue5m3_fn")
    assert quantizer.scale.rounds_mantissa == rounds
    assert quantizer.pads == (stochastic and rounds)
    for pad in (False, True)[: 1 + rounds]:
        chosen = dataclasses.replace(quantizer.scale, pad=pad)
        assert dataclasses.replace(quantizer, scale=chosen).pads == pad


@pytest.mark.parametrize(
    ("rotation", "stochastic", "draws"),
    [
        (None, False, False),
        (None, True, True),
        (Hadamard(), False, False),
        (Hadamard(), True, True),
        (Hadamard(4, (1, -1, 1, 1)), False, False),
        (Hadamard(16, PerStepSigns()), False, True),
    ],
    ids=str,
)
def test_draws(rotation, stochastic, draws):
    options = {"rounding": Stochastic()} if stochastic else {}
    assert Quantizer(E2M1, rotation=rotation, **options).draws == draws
