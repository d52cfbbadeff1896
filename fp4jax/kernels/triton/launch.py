"""Calls of Triton kernels from JAX."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax

from fp4jax.numerics.manual import varying_as

THREADS = 128  # of a program
_WARP = 32


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out_types: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    capability: int | None = None,
    **constants: Any,
) -> Sequence[jax.Array]:
    """Returns what a kernel writes.

    Args:
      kernel: of addresses of the arrays, of the outputs, and of constants.
      *arrays: inputs.
      out_types: of the outputs.
      programs: of its grid.
      capability: compute capability times 10 to compile for; None: that of the device.
      **constants: by the kernel's names for them, hashable.
    """
    import jax_triton

    how: dict[str, Any] = {"out_shape": tuple(out_types), "enable_fp_fusion": False}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        options = {"enable_fp_fusion": False}
        how = {"out_type": tuple(out_types), "backend_options": options}
    found = jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=(programs, 1, 1),
        name=kernel.__name__,
        num_warps=THREADS // _WARP,
        compute_capability=capability,
        **how,
        **constants,
    )
    return varying_as(found, *arrays)
