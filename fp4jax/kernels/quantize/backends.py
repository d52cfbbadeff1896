"""Who quantizes: kernels for a GPU, these interpreted, or XLA."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from fp4jax.kernels import devices
from fp4jax.kernels.amax import tensor_amax
from fp4jax.kernels.quantize import reference
from fp4jax.kernels.quantize.outputs import Quantized
from fp4jax.numerics import Quantizer, Site, blocks, hadamard
from fp4jax.numerics.groups import Groups


def whole_blocks(quantizer: Quantizer, axis: int, other: int | None) -> dict[int, int]:
    """Returns what blocked axes are padded to a multiple of, before anything else."""
    of_other = {} if other is None else {other: quantizer.block_size}
    return {axis: quantizer.multiple} | of_other


def rotated(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    key: jax.Array | None,
    site: Site,
) -> jax.Array:
    """Rotates an array as the reference does, if at all."""
    if (rotation := quantizer.rotation) is None:
        return x
    signs = hadamard.sign_vector(rotation, key, site.signs_stream)
    return hadamard.rotate(x, signs, axis)


class Backend(abc.ABC):
    """One way to quantize an array.

    Attributes:
      is_opaque: whether a compiler cannot divide its work over devices by itself.
      reads_once: whether `quantize_all` reads its array once.
    """

    is_opaque: ClassVar[bool]
    reads_once: ClassVar[bool] = False

    @property
    def is_divisible(self) -> bool:
        """Whether a rule can: not of what has effects."""
        return True

    @abc.abstractmethod
    def why_not(
        self, x: jax.Array, quantizer: Quantizer, *, axis: int, other: int | None
    ) -> str | None:
        """Returns what of a call it cannot do, or None."""

    @abc.abstractmethod
    def multiples(
        self,
        shape: tuple[int, ...],
        quantizer: Quantizer,
        *,
        axis: int,
        other: int | None,
    ) -> dict[int, int]:
        """Returns what axes in whole blocks must be padded to a multiple of."""

    @abc.abstractmethod
    def quantize(self, x: jax.Array, quantizer: Quantizer, **how: Any) -> Quantized:
        """Quantizes an array as `reference.quantize` does."""

    def quantize_all(
        self, x: jax.Array, ways: Sequence[dict[str, Any]]
    ) -> list[Quantized]:
        """Quantizes an array in several ways, the arguments of `quantize` of each."""
        return [self.quantize(x, **way) for way in ways]

    @abc.abstractmethod
    def amax(
        self,
        x: jax.Array,
        quantizer: Quantizer,
        *,
        axis: int,
        key: jax.Array | None,
        site: Site,
    ) -> jax.Array:
        """Returns float32 [], what a fresh tensor scale is made of."""


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """The reference, compiled by XLA for every device."""

    is_opaque: ClassVar[bool] = False

    def why_not(self, x, quantizer, *, axis, other) -> None:
        """It can do every call."""
        del x, quantizer, axis, other

    def multiples(self, shape, quantizer, *, axis, other) -> dict[int, int]:
        """It takes every shape."""
        del shape, quantizer, axis, other
        return {}

    def quantize(self, x, quantizer, **how) -> Quantized:
        """Calls the reference, for which amaxes of entries are those of groups."""
        if (amax := how.get("amax")) is not None and amax.ndim:
            how["groups"] = Groups(None, amax.size)
        return reference.quantize(x, quantizer, **how)

    def amax(self, x, quantizer, *, axis, key, site) -> jax.Array:
        """Rotates as the reference does."""
        return blocks.amax(rotated(x, quantizer, axis=axis, key=key, site=site))


@dataclasses.dataclass(frozen=True)
class Mosaic(Backend):
    """Kernels in Pallas Mosaic GPU.

    Attributes:
      interpreted: whether they are interpreted, on any device.
    """

    interpreted: bool = False
    is_opaque: ClassVar[bool] = True
    reads_once: ClassVar[bool] = True

    @property
    def is_divisible(self) -> bool:
        """An interpreter calls back."""
        return not self.interpreted

    def why_not(self, x, quantizer, *, axis, other) -> str | None:
        """Asks the device, then the kernel, of the array as it would be padded."""
        why = devices.too_old() if self.interpreted else devices.without_mosaic()
        if why is not None:
            return why
        if x.size == 0:
            return f"x must not be empty, got shape={x.shape}"
        from fp4jax.kernels.quantize import mosaic

        how = {"axis": axis, "other": other}
        found: list[str | None] = []

        def ask(x: jax.Array) -> None:
            x = blocks.pad_to_multiple(x, whole_blocks(quantizer, axis, other))
            x = blocks.pad_to_multiple(x, self.multiples(x.shape, quantizer, **how))
            found.append(mosaic.unsupported(x, quantizer, **how))

        jax.eval_shape(ask, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return found[0]

    def multiples(self, shape, quantizer, *, axis, other) -> dict[int, int]:
        """A warpgroup has no room for a part of a tile."""
        last = len(shape) - 1
        if len(shape) == 1:
            return {}
        padded = last if axis < last else last - 1
        if quantizer.is_square:
            return dict(zip((last - 1, last), devices.TILE_OF_SQUARES, strict=True))
        free = math.prod(shape[axis + 1 : -1] if axis < last else shape[:padded])
        if axis == last:
            free *= shape[axis] // quantizer.multiple
        return {padded: devices.WARPGROUP // math.gcd(devices.WARPGROUP, free)}

    def quantize(self, x, quantizer, **how) -> Quantized:
        """Calls the kernel."""
        from fp4jax.kernels.quantize import mosaic

        return mosaic.quantize(x, quantizer, **how, interpret=self.interpret)

    def quantize_all(self, x, ways) -> list[Quantized]:
        """Calls one kernel."""
        from fp4jax.kernels.quantize import mosaic

        return mosaic.quantize_all(x, ways, interpret=self.interpret)

    def amax(self, x, quantizer, *, axis, key, site) -> jax.Array:
        """Calls the kernel of rotated arrays; XLA reads others as fast."""
        rotation = quantizer.rotation
        if rotation is None:
            return blocks.amax(x)
        return tensor_amax(
            x, rotation, axis=axis, key=key, site=site, interpret=self.interpret
        )

    @property
    def interpret(self) -> Any:
        """As `plgpu.kernel` takes it."""
        return devices.interpreter() if self.interpreted else None


@dataclasses.dataclass(frozen=True)
class Triton(Backend):
    """Kernels in Triton, which take every shape.

    Attributes:
      capability: compute capability times 10 to compile for; None: that of the device.
    """

    capability: int | None = None
    is_opaque: ClassVar[bool] = True

    def why_not(self, x, quantizer, *, axis, other) -> str | None:
        """Asks the device, where no other is named, then the kernel."""
        why = None if self.capability else devices.without_triton()
        if why is not None:
            return why
        if x.size == 0:
            return f"x must not be empty, got shape={x.shape}"
        from fp4jax.kernels.quantize import triton

        return triton.unsupported(x, quantizer, axis=axis, other=other)

    def multiples(self, shape, quantizer, *, axis, other) -> dict[int, int]:
        """Programs mask what of their tile is beyond the array."""
        del shape, quantizer, axis, other
        return {}

    def quantize(self, x, quantizer, **how) -> Quantized:
        """Calls the kernel."""
        from fp4jax.kernels.quantize import triton

        return triton.quantize(x, quantizer, **how, capability=self.capability)

    def amax(self, x, quantizer, *, axis, key, site) -> jax.Array:
        """Calls the kernel of rotated arrays; XLA reads others as fast."""
        if (rotation := quantizer.rotation) is None:
            return blocks.amax(x)
        from fp4jax.kernels.amax import triton

        how: dict[str, Any] = {"axis": axis, "key": key, "site": site}
        return triton.tensor_amax(x, rotation, **how, capability=self.capability)


MOSAIC, INTERPRETED, XLA = Mosaic(), Mosaic(interpreted=True), Xla()
TRITON = Triton()
# Those of GPUs, the first that can is taken.
KERNELS_OF_GPUS: dict[str, Backend] = {"mosaic": MOSAIC, "triton": TRITON}
