"""Several quantizations of one array as one operation, from one read of it."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax

from fp4jax.kernels.partition import Spread
from fp4jax.kernels.quantize import part
from fp4jax.kernels.quantize.backends import Backend
from fp4jax.kernels.quantize.part import Call
from fp4jax.kernels.quantize.way import Inputs


@dataclasses.dataclass(frozen=True)
class Both:
    """What is static about them, with the methods of a `Call`.

    Attributes:
      calls: of one backend; their inputs are a tuple, and their results follow one
        another.
    """

    calls: tuple[Call, ...]

    @property
    def backend(self) -> Backend:
        """Of all of them."""
        return self.calls[0].backend

    @property
    def lanes(self) -> int:
        """As of `Call`."""
        return self.calls[0].lanes

    def of_more_rows(self) -> "Both":
        """As of `Call`."""
        return Both(tuple(call.of_more_rows() for call in self.calls))

    def of_more_lanes(self) -> "Both":
        """As of `Call`."""
        return Both(tuple(call.of_more_lanes() for call in self.calls))

    def of_a_lane(self) -> "Both":
        """As of `Call`."""
        return Both(tuple(call.of_a_lane() for call in self.calls))

    def treats_rows_alike(self, inputs: tuple[Inputs, ...]) -> bool:
        """As of `Call`."""
        return all(call.treats_rows_alike(of) for call, of in self._each(inputs))

    @property
    def runs(self) -> dict[int, int]:
        """As of `Call`."""
        runs = [call.runs for call in self.calls]
        axes = sorted(set[int]().union(*runs))
        return {i: math.lcm(*(of.get(i, 1) for of in runs)) for i in axes}

    def returns(self, inputs: tuple[Inputs, ...]) -> tuple[int | None, ...]:
        """As of `Call`."""
        return _joined(call.returns(of) for call, of in self._each(inputs))

    def quantize(
        self, x: jax.Array, inputs: tuple[Inputs, ...], spread: Spread = ()
    ) -> tuple[Any, ...]:
        """As of `Call`; one after the other where a kernel would have to pad a part."""
        spread = spread or ((),) * x.ndim
        if self.lanes:
            return part.lane_by_lane(self, x, inputs, spread)
        each = self._each(inputs)
        places = [part.place(call, x.shape, of, spread) for call, of in each]
        if not all(
            part.fits(c, x, p[1]) for c, p in zip(self.calls, places, strict=True)
        ):
            return _joined(call.quantize(x, of, spread) for call, of in each)
        given = tuple(
            dataclasses.replace(part.of_all(call, x, of, spread), start=start)
            for (call, of), (start, _) in zip(each, places, strict=True)
        )
        found = self.backend.quantize_all(x, self._each(given))
        return _joined(
            call.results(map(of.arrays.__getitem__, call.outputs), read, asked)
            for of, read, (call, asked) in zip(found, given, each, strict=True)
        )

    def _each(self, inputs: tuple[Inputs, ...]) -> list[tuple[Call, Inputs]]:
        return list(zip(self.calls, inputs, strict=True))


def _joined(tuples: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(tuples))
