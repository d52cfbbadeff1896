"""Two codes in a byte and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp4jax.numerics import UNIFORM, formats, pack, unpack

ENCODINGS = pytest.mark.parametrize("encoding", ["sign_magnitude", "twos_complement"])
jit_pack = jax.jit(pack, static_argnames=("axis", "encoding"))
jit_unpack = jax.jit(unpack, static_argnames=("axis", "encoding"))


@ENCODINGS
@settings(deadline=None, derandomize=True)
@given(codes=hnp.arrays(np.uint8, (4, 6), elements=st.integers(0, 15)))
def test_unpack_undoes_pack(encoding, codes):
    for axis in (0, 1, -1):
        packed = jit_pack(jnp.asarray(codes), axis=axis, encoding=encoding)
        assert packed.dtype == jnp.uint8 and packed.size == codes.size // 2
        back = jit_unpack(packed, axis=axis, encoding=encoding)
        np.testing.assert_array_equal(back, codes)


@ENCODINGS
def test_pack_undoes_unpack(encoding):
    packed = jnp.arange(256, dtype=jnp.uint8)
    back = jit_pack(jit_unpack(packed, encoding=encoding), encoding=encoding)
    np.testing.assert_array_equal(back, packed)


def test_first_code_is_in_the_low_half():
    codes = jnp.uint8([[1, 2], [15, 8]])
    np.testing.assert_array_equal(pack(codes), [[0x21], [0x8F]])
    np.testing.assert_array_equal(pack(codes, axis=0), [[0xF1, 0x82]])


def test_twos_complement_nibbles_are_int4():
    codes = jnp.arange(16, dtype=jnp.uint8)
    nibbles = np.asarray(unpack(pack(codes, encoding="twos_complement")))
    as_int4 = np.where(nibbles < 8, nibbles, nibbles.astype(int) - 16)
    values = np.asarray(formats.decode(codes, UNIFORM))
    # Code 8, -0, is never emitted; it would read as -8.
    emitted = np.arange(16) != 8
    np.testing.assert_array_equal(as_int4[emitted], values[emitted])


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 4), 1), ((4, 0), 1), ((4, 0), 0), ((2,), 0)], ids=str
)
def test_empty_and_1d(shape, axis):
    codes = jnp.zeros(shape, jnp.uint8)
    assert unpack(pack(codes, axis=axis), axis=axis).shape == shape


CODES = jnp.zeros((3, 4), jnp.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(
            lambda: pack(CODES, axis=0),
            ValueError,
            r"^pack: codes must have an even size along axis 0, got shape=\(3, 4\)",
            id="odd",
        ),
        pytest.param(
            lambda: pack(CODES, axis=2),
            ValueError,
            r"^pack: axis must be an integer in \[-2, 2\), got axis=2",
            id="axis",
        ),
        pytest.param(
            lambda: unpack(CODES, axis=-3),
            ValueError,
            r"^unpack: axis must be an integer in \[-2, 2\), got axis=-3",
            id="unpack-axis",
        ),
        pytest.param(
            lambda: pack(jnp.uint8(1)),
            ValueError,
            r"^pack: axis must be an integer in \[0, 0\), got axis=-1",
            id="scalar",
        ),
        pytest.param(
            lambda: pack(CODES.astype(jnp.int32)),
            TypeError,
            "^pack: codes must be uint8, got dtype=int32",
            id="dtype",
        ),
        pytest.param(
            lambda: unpack(CODES.astype(jnp.int8)),
            TypeError,
            "^unpack: packed must be uint8, got dtype=int8",
            id="unpack-dtype",
        ),
        pytest.param(
            lambda: pack(CODES, encoding="int4"),
            ValueError,
            "^pack: encoding must be one of .*'twos_complement'.*, got .*'int4'",
            id="encoding",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
