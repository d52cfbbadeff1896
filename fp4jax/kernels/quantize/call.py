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

from fp4jax.kernels.quantize import matrix, partition
from fp4jax.kernels.quantize.backends import Backend, rotated, whole_blocks
from fp4jax.kernels.quantize.both import Both
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.part import Call, Scalars
from fp4jax.numerics import Quantizer, Site, blocks, hadamard
from fp4jax.numerics.blockwise import tensor_level
from fp4jax.numerics.groups import Groups


def quantize(x: jax.Array, quantizer: Quantizer, **how: Any) -> Quantized:
    """Quantizes as `reference.quantize` does, by a backend that can.

    Arrays are padded to whole blocks along `other` as well.

    Args:
      x: as of `reference.quantize`.
      quantizer: likewise.
      **how: likewise, and `backend`.
    """
    x, call, scalars = _asked(x, quantizer, **how)
    found = fp4_quantize(x, scalars, call=call)
    return _quantized(call, scalars, how.get("key"), found, x.ndim)


def quantize_both(x: jax.Array, ways: Sequence[dict[str, Any]]) -> list[Quantized]:
    """Quantizes an array in several ways as one operation.

    Args:
      x: in whole blocks along every axis that is blocked.
      ways: the further arguments of `quantize`, of each.
    """
    _, calls, scalars = zip(*(_asked(x, **way) for way in ways), strict=True)
    found = fp4_quantize_both(lax.stop_gradient(x), scalars, call=Both(calls))
    results, both = iter(found), zip(calls, scalars, ways, strict=True)
    return [
        _quantized(call, of, way.get("key"), list(islice(results, count)), x.ndim)
        for call, of, way in both
        for count in [len(call.returns(of))]
    ]


def _asked(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    backend: Backend,
    outputs: Sequence[Output],
    axis: int,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    start: tuple[jax.Array, jax.Array] | None = None,
    tokens: jax.Array | None = None,
    groups: Groups | None = None,
    site: Site = Site.FPROP_X,
) -> tuple[jax.Array, Call, Scalars]:
    """Returns an array in whole blocks, what is static about its call, and what not."""
    length = None if other is None else x.shape[other]
    call = Call(backend, quantizer, tuple(outputs), axis, other, site, length)
    padding = whole_blocks(quantizer, axis, other)
    x = blocks.pad_to_multiple(x, padding)
    if tokens is not None:
        tokens = blocks.pad_to_multiple(tokens, padding)
    if groups is not None:
        if amax is None:
            amax = groups.amax(rotated(x, quantizer, axis=axis, key=key, site=site))
        amax = groups.spread(amax, 1)
    draws, rounds_so = quantizer.draws, quantizer.is_stochastic
    scalars = Scalars(
        key=jax.random.key_data(key) if key is not None and draws else None,
        amax=None if amax is None else jnp.asarray(amax, jnp.float32),
        start=start if rounds_so else None,
        tokens=tokens if rounds_so else None,
    )
    x, scalars = lax.stop_gradient((x, scalars))
    return x, call, scalars


def _quantized(
    call: Call,
    scalars: Scalars,
    key: jax.Array | None,
    results: Sequence[Any],
    ndim: int,
) -> Quantized:
    """Returns the results of a call with what they are to be read with."""
    amax = results[-1] if call.reads_all(scalars) else scalars.amax
    tensor_scale = matrix.by_entry(tensor_level(call.quantizer, amax)[1], ndim)
    signs, rotation = None, call.quantizer.rotation
    if rotation is not None:
        signs = hadamard.sign_vector(rotation, key, call.site.signs_stream)
    arrays = dict(zip(call.outputs, results, strict=False))
    return Quantized(arrays, tensor_scale, signs)


# Calls of their own, by which traced programs and profiles show every quantization.
@functools.partial(jax.jit, static_argnames="call")
def fp4_quantize(x: jax.Array, scalars: Scalars, *, call: Call) -> tuple[Any, ...]:
    """Returns what `call.quantize` does, of the whole."""
    return _of_lanes(call)(x, scalars)


@functools.partial(jax.jit, static_argnames="call")
def fp4_quantize_both(
    x: jax.Array, scalars: tuple[Scalars, ...], *, call: Both
) -> tuple[Any, ...]:
    """Returns what `call.quantize` does, of the whole."""
    return _of_lanes(call)(x, scalars)


@functools.cache
def _of_lanes(call: Call | Both) -> Any:
    """Returns the operation, which knows `jax.vmap`."""

    @jax.custom_batching.custom_vmap
    def operation(x: jax.Array, scalars: Any) -> tuple[Any, ...]:
        return partition.quantize(call, x, scalars)

    @operation.def_vmap
    def _(size: int, in_batched: Any, x: jax.Array, scalars: Any):
        x_batched, of_scalars = in_batched
        is_shared = not any(jax.tree.leaves(of_scalars))
        if x_batched and is_shared and call.treats_rows_alike(scalars):
            found = _of_lanes(call.of_more_rows())(x, scalars)
        elif x_batched or partition.are_spread(scalars, of_scalars):
            lanes = partition.as_lanes(size, in_batched, (x, scalars))
            found = _of_lanes(call.of_more_lanes())(*lanes)
        else:  # nothing but a key of theirs tells lanes apart: they read x in turn
            lanes = partition.as_lanes(size, of_scalars, scalars)
            found = lax.map(lambda of_lane: operation(x, of_lane), lanes)
        return found, jax.tree.map(lambda _: True, found)

    return operation
