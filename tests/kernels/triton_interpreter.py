"""Triton kernels on a CPU, by Triton's own interpreter."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_UNWRITTEN, _BESIDE = 77, 4096
# Subnormals stay in a thread that begins where they do, as not in those of XLA.
_THREAD = ThreadPoolExecutor(1)
_THREAD.submit(int).result()


class Memory:
    """An array as the interpreter takes those of PyTorch."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    untyped_storage, copy_ = cpu, set_
    storage_offset = size = stride = cpu


def launch(kernel, *arrays, out_types, programs, capability=None, **constants):
    """Does what `fp4jax.kernels.triton.launch.launch` does, one program at a time.

    Nothing may be written beside the outputs.
    """
    del capability

    def call(*arrays):
        read = [np.ascontiguousarray(a) for a in arrays]
        wider = [np.full(t.size + 2 * _BESIDE, _UNWRITTEN, t.dtype) for t in out_types]
        found = [
            x[_BESIDE:-_BESIDE].reshape(t.shape)
            for x, t in zip(wider, out_types, strict=True)
        ]
        memory = map(Memory, [*read, *found])
        _THREAD.submit(kernel[(programs,)], *memory, **constants).result()
        for x in wider:
            beside = np.concatenate([x[:_BESIDE], x[-_BESIDE:]])
            assert np.all(beside == np.full(1, _UNWRITTEN, x.dtype))
        return tuple(found)

    return jax.pure_callback(call, tuple(out_types), *arrays)


def cast(builder, source, kind):
    """Casts between bfloat16 and float32, to nearest even, which it does otherwise."""
    del builder
    of, to = source.dtype.scalar, kind.scalar
    data = source.data
    if (of, to) == (tl.bfloat16, tl.float32):
        data = (data.astype(np.uint32) << 16).view(np.float32)
    elif (of, to) == (tl.float32, tl.bfloat16):
        data = data.astype(jnp.bfloat16).view(np.uint16)
    else:
        data = data.astype(interpreter._get_np_dtype(kind))
    return interpreter.TensorHandle(data, to)
