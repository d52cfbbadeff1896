"""What stands in for a GPU."""

import os

import numpy as np
import pytest


@pytest.fixture(autouse="TRITON_INTERPRET" in os.environ)
def interpreted(monkeypatch):
    """Triton's interpreter runs kernels, in a process that is told so."""
    from triton.runtime.interpreter import InterpreterBuilder

    from fp4jax.kernels.amax import triton as amax
    from fp4jax.kernels.quantize import triton as quantize
    from tests.kernels.triton_interpreter import cast, launch

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    # In Triton 3.6 it does not drop NaNs, as GPUs do.
    for name, of_numpy in ("create_minnumf", np.fmin), ("create_maxnumf", np.fmax):
        monkeypatch.setattr(
            InterpreterBuilder,
            name,
            lambda self, a, b, of_numpy=of_numpy: self.binary_op(a, b, of_numpy),
        )
    for module in (quantize, amax):
        monkeypatch.setattr(module, "launch", launch)
