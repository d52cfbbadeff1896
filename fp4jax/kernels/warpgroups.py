"""Programs of several warpgroups: one loads tiles ahead of those that multiply."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from fp4jax.kernels import devices
from fp4jax.kernels.tile import WARPGROUPS
from fp4jax.numerics.manual import varying_as

LINE = 128  # bytes of shared memory in which rows are swizzled


def launch(
    kernel: Callable[..., None],
    *inputs: jax.Array,
    out_type: jax.ShapeDtypeStruct,
    tiles: int,
    peers: int,
    interpret: Any,
) -> jax.Array:
    """Calls a kernel in as many programs as a device has room for at a time.

    Inside, `program` is the number of a cluster, `peer` of a program in it, and
    `warpgroup` that of a thread, as Pallas has them.

    Args:
      kernel: of references to the inputs and to the result.
      *inputs: arrays.
      out_type: of the result.
      tiles: of the result, counted once for all peers.
      peers: programs of a cluster.
      interpret: as `plgpu.kernel` takes it.
    """
    result = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(min(devices.cores() // peers, tiles),),
        grid_names=("program",),
        cluster=(peers,),
        cluster_names=("peer",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*inputs)
    return varying_as(result, *inputs)


def swizzled(size: int, dtype: Any) -> tuple[Any, ...]:
    """Returns how rows of so many elements lie in shared memory, in lines at most."""
    itemsize = jnp.dtype(dtype).itemsize
    line = min(LINE, size * itemsize)
    return plgpu.TilingTransform((8, line // itemsize)), plgpu.SwizzleTransform(line)
