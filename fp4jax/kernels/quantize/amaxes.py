"""The amaxes of an array's entries, once rotated, as one operation of a program."""

import dataclasses
from typing import Any, Self

import jax

from fp4jax.kernels.partition import Spread
from fp4jax.kernels.quantize import part
from fp4jax.kernels.quantize.part import Call
from fp4jax.kernels.quantize.way import Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Amaxes(Call):
    """What is static about it: a `Call` that returns no more than the amaxes."""

    @classmethod
    def of(cls, call: Call) -> "Amaxes":
        """Returns that of the entries along the first axis of a call's array."""
        return cls(**vars(call) | {"outputs": (), "entries": 1})

    def of_more_rows(self) -> Self:
        """As of `Call`; the axis is one of entries."""
        return dataclasses.replace(super().of_more_rows(), entries=self.entries + 1)

    def of_fewer_rows(self, axes: list[int]) -> Self:
        """As of `Call`; the axes are of entries."""
        entries = self.entries - len(axes)
        return dataclasses.replace(super().of_fewer_rows(axes), entries=entries)

    def treats_rows_alike(self, inputs: Inputs) -> bool:
        """As of `Call`."""
        return self.lanes == 0

    def returns(self, inputs: Inputs) -> tuple[int | None, ...]:
        """As of `Call`."""
        return (self.entries,)

    def quantize(
        self, x: jax.Array, inputs: Inputs, spread: Spread = ()
    ) -> tuple[Any, ...]:
        """Returns the amaxes, float32 [*t] of entries [*t, ...], of a part of them."""
        spread = spread or ((),) * x.ndim
        if self.lanes:
            return part.lane_by_lane(self, x, inputs, spread)
        return (part.of_all(self, x, inputs, spread).amax,)
