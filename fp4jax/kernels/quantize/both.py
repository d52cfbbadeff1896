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
from fp4jax.kernels.quantize.part import Call, Inputs, Scalars


@dataclasses.dataclass(frozen=True)
class Both:
    """What is static about them, with the methods of a `Call`.

    Attributes:
      calls: of one backend; their scalars are a tuple, and their results follow one
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

    def treats_rows_alike(self, scalars: tuple[Scalars, ...]) -> bool:
        """As of `Call`."""
        return all(c.treats_rows_alike(s) for c, s in self._each(scalars))

    @property
    def runs(self) -> dict[int, int]:
        """As of `Call`."""
        runs = [call.runs for call in self.calls]
        axes = sorted(set[int]().union(*runs))
        return {i: math.lcm(*(of.get(i, 1) for of in runs)) for i in axes}

    def returns(self, scalars: tuple[Scalars, ...]) -> tuple[bool, ...]:
        """As of `Call`."""
        return _joined(c.returns(s) for c, s in self._each(scalars))

    def quantize(
        self, x: jax.Array, scalars: tuple[Scalars, ...], spread: Spread = ()
    ) -> tuple[Any, ...]:
        """As of `Call`; one after the other where a kernel would have to pad a part."""
        spread = spread or ((),) * x.ndim
        if self.lanes:
            return part.lane_by_lane(self, x, scalars, spread)
        each = self._each(scalars)
        places = [part.place(call, x.shape, of, spread) for call, of in each]
        apart = [strides for _, strides in places]
        if not all(map(part.fits, self.calls, itertools.repeat(x), apart)):
            return _joined(call.quantize(x, of, spread) for call, of in each)
        inputs = [Inputs.of(call, x, of, spread) for call, of in each]
        ways = [
            part.way(call, given, start)
            for call, given, (start, _) in zip(self.calls, inputs, places, strict=True)
        ]
        found = self.backend.quantize_all(x, ways)
        return _joined(
            call.results(map(of.arrays.__getitem__, call.outputs), given, others)
            for of, (call, others), given in zip(found, each, inputs, strict=True)
        )

    def _each(self, scalars: tuple[Scalars, ...]) -> list[tuple[Call, Scalars]]:
        return list(zip(self.calls, scalars, strict=True))


def _joined(tuples: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(tuples))
