"""Interception of the calls of Linen modules."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from flax import linen as nn


@contextlib.contextmanager
def intercepting(interceptor: Callable[..., Any]) -> Generator[None]:
    """Does what `nn.intercept_methods` does, and no longer than it is entered.

    Flax takes interceptors away in an assertion, which `python -O` leaves out: later
    models would be quantized, too.
    """
    is_over = False

    def intercept(method, args, kwargs, context) -> Any:
        if is_over:
            return method(*args, **kwargs)
        return interceptor(method, args, kwargs, context)

    try:
        with nn.intercept_methods(intercept):
            yield
    finally:
        is_over = True
