"""A quantization as one operation of a program, whatever transforms it.

It has a name in traced programs and profiles, is the same under `jax.vmap` as lane by
lane, and is computed by every device for its part of the array.
"""

import functools
from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.log import once
from fp4jax.kernels.quantize import matrix, partition
from fp4jax.kernels.quantize.amaxes import Amaxes
from fp4jax.kernels.quantize.backends import Backend, rotated
from fp4jax.kernels.quantize.both import Both
from fp4jax.kernels.quantize.outputs import Quantized
from fp4jax.kernels.quantize.part import Call
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.numerics import blocks, hadamard
from fp4jax.numerics.blockwise import tensor_level

_say = once(__name__, "amaxes of groups are taken of a rotated copy in XLA: %s.")


def quantize(x: jax.Array, way: Way, inputs: Inputs, backend: Backend) -> Quantized:
    """Quantizes as `reference.quantize` does, by a backend that can.

    Arrays are padded to whole blocks along `other` as well.
    """
    x, call, of_call = _asked(x, way, inputs, backend)
    found = fp4_quantize(x, of_call, call=call)
    return _quantized(call, of_call, inputs.key, found, x.ndim)


def quantize_both(
    x: jax.Array, ways: Sequence[tuple[Way, Inputs]], backend: Backend
) -> list[Quantized]:
    """Quantizes an array in several ways as one operation.

    Args:
      x: in whole blocks along every axis that is blocked.
      ways: as of `quantize`, and with each its inputs.
      backend: that of all.
    """
    _, calls, inputs = zip(*(_asked(x, *way, backend) for way in ways), strict=True)
    found = fp4_quantize_both(lax.stop_gradient(x), inputs, call=Both(calls))
    results, both = iter(found), zip(calls, inputs, ways, strict=True)
    return [
        _quantized(call, of, asked.key, list(islice(results, count)), x.ndim)
        for call, of, (_, asked) in both
        for count in [len(call.returns(of))]
    ]


def _asked(
    x: jax.Array, way: Way, inputs: Inputs, backend: Backend
) -> tuple[jax.Array, Call, Inputs]:
    """Returns an array in whole blocks, what is static about its call, and what not."""
    length = None if way.other is None else x.shape[way.other]
    call = Call(**vars(way), backend=backend, length=length)
    key, amax, tokens = inputs.key, inputs.amax, inputs.tokens
    x = blocks.pad_to_multiple(x, way.runs)
    if tokens is not None:
        tokens = blocks.pad_to_multiple(tokens, way.runs)
    if (groups := inputs.groups) is not None:
        if amax is None:
            amax = groups.amax(_to_amax(x, call, key))
        amax = groups.spread(amax, 1)
    draws, rounds_so = way.quantizer.draws, way.quantizer.is_stochastic
    of_call = Inputs(
        key=jax.random.key_data(key) if key is not None and draws else None,
        amax=None if amax is None else jnp.asarray(amax, jnp.float32),
        start=inputs.start if rounds_so else None,
        tokens=tokens if rounds_so else None,
    )
    x, of_call = lax.stop_gradient((x, of_call))
    return x, call, of_call


def _to_amax(x: jax.Array, call: Call, key: jax.Array | None) -> jax.Array:
    """Returns an array with the amaxes that the entries of x have once rotated."""
    if (rotation := call.quantizer.rotation) is None:
        return x  # which XLA reads as fast
    if call.axis == x.ndim - 1:
        _say("tiles of runs along the last axis may be of two entries")
        return rotated(x, call, key)
    draws = key is not None and rotation.draws
    inputs = Inputs(key=jax.random.key_data(key) if draws else None)
    (amax,) = fp4_amax(*lax.stop_gradient((x, inputs)), call=Amaxes.of(call))
    return amax


def _quantized(
    call: Call,
    inputs: Inputs,
    key: jax.Array | None,
    results: Sequence[Any],
    ndim: int,
) -> Quantized:
    """Returns the results of a call with what they are to be read with."""
    amax = results[-1] if call.reads_all(inputs) else inputs.amax
    tensor_scale = matrix.by_entry(tensor_level(call.quantizer, amax)[1], ndim)
    signs, rotation = None, call.quantizer.rotation
    if rotation is not None:
        signs = hadamard.sign_vector(rotation, key, call.site.signs_stream)
    arrays = dict(zip(call.outputs, results, strict=False))
    return Quantized(arrays, tensor_scale, signs)


# Calls of their own, by which traced programs and profiles show every quantization.
@functools.partial(jax.jit, static_argnames="call")
def fp4_quantize(x: jax.Array, inputs: Inputs, *, call: Call) -> tuple[Any, ...]:
    """Returns what `call.quantize` does, of the whole."""
    return _of_lanes(call)(x, inputs)


@functools.partial(jax.jit, static_argnames="call")
def fp4_quantize_both(
    x: jax.Array, inputs: tuple[Inputs, ...], *, call: Both
) -> tuple[Any, ...]:
    """Returns what `call.quantize` does, of the whole."""
    return _of_lanes(call)(x, inputs)


@functools.partial(jax.jit, static_argnames="call")
def fp4_amax(x: jax.Array, inputs: Inputs, *, call: Amaxes) -> tuple[Any, ...]:
    """Returns what `call.quantize` does, of the whole."""
    return _of_lanes(call)(x, inputs)


@functools.cache
def _of_lanes(call: Call | Both) -> Any:
    """Returns the operation, which knows `jax.vmap`."""

    @jax.custom_batching.custom_vmap
    def operation(x: jax.Array, inputs: Any) -> tuple[Any, ...]:
        return partition.quantize(call, x, inputs)

    @operation.def_vmap
    def _(size: int, in_batched: Any, x: jax.Array, inputs: Any):
        x_batched, of_inputs = in_batched
        is_shared = not any(jax.tree.leaves(of_inputs))
        if x_batched and is_shared and call.treats_rows_alike(inputs):
            found = _of_lanes(call.of_more_rows())(x, inputs)
        elif x_batched or partition.are_spread(inputs, of_inputs):
            lanes = partition.as_lanes(size, in_batched, (x, inputs))
            found = _of_lanes(call.of_more_lanes())(*lanes)
        else:  # nothing but a key of theirs tells lanes apart: they read x in turn
            lanes = partition.as_lanes(size, of_inputs, inputs)
            found = lax.map(lambda of_lane: operation(x, of_lane), lanes)
        return found, jax.tree.map(lambda _: True, found)

    return operation
