"""Who quantizes: kernels for a GPU, these interpreted, or XLA."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from fp4jax.kernels import devices
from fp4jax.kernels.quantize import reference
from fp4jax.kernels.quantize.outputs import Quantized
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.numerics import blocks, hadamard
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.hadamard import Hadamard


def rotated(x: jax.Array, way: Way, key: jax.Array | None) -> jax.Array:
    """Rotates an array as the reference does, if at all."""
    if (rotation := way.quantizer.rotation) is None:
        return x
    signs = hadamard.sign_vector(rotation, key, way.site.signs_stream)
    return hadamard.rotate(x, signs, way.axis)


def _amax(x: jax.Array, entries: int) -> jax.Array:
    """Returns max |x|, of each index of so many leading axes."""
    amax = blocks.amax(x, tuple(range(entries, x.ndim)))
    return amax.reshape(x.shape[:entries])


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
    def why_not(self, x: jax.Array, way: Way) -> str | None:
        """Returns what of a call it cannot do, or None."""

    @abc.abstractmethod
    def multiples(self, shape: tuple[int, ...], way: Way) -> dict[int, int]:
        """Returns what axes in whole blocks must be padded to a multiple of."""

    @abc.abstractmethod
    def quantize(self, x: jax.Array, way: Way, inputs: Inputs) -> Quantized:
        """Quantizes an array as `reference.quantize` does."""

    def quantize_all(
        self, x: jax.Array, ways: Sequence[tuple[Way, Inputs]]
    ) -> list[Quantized]:
        """Quantizes an array in several ways, with what each reads beside it."""
        return [self.quantize(x, *way) for way in ways]

    @abc.abstractmethod
    def amax(
        self, x: jax.Array, way: Way, key: jax.Array | None, entries: int = 0
    ) -> jax.Array:
        """Returns what a fresh tensor scale is made of, float32 [].

        Of each index of as many leading axes as `entries`, before the contraction axis,
        which is not the last then.
        """


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """The reference, compiled by XLA for every device."""

    is_opaque: ClassVar[bool] = False

    def why_not(self, x, way) -> None:
        """It can do every call."""
        del x, way

    def multiples(self, shape, way) -> dict[int, int]:
        """It takes every shape."""
        del shape, way
        return {}

    def quantize(self, x, way, inputs) -> Quantized:
        """Calls the reference, for which amaxes of entries are those of groups."""
        if (amax := inputs.amax) is not None and amax.ndim:
            inputs = dataclasses.replace(inputs, groups=Groups(None, amax.size))
        return reference.quantize(x, way, inputs)

    def amax(self, x, way, key, entries=0) -> jax.Array:
        """Rotates as the reference does."""
        return _amax(rotated(x, way, key), entries)


class GpuKernels(Backend):
    """Kernels for a GPU, of which XLA knows nothing."""

    is_opaque: ClassVar[bool] = True

    def amax(self, x, way, key, entries=0) -> jax.Array:
        """Calls the kernel of rotated arrays; XLA reads others as fast."""
        if (rotation := way.quantizer.rotation) is None:
            return _amax(x, entries)
        return self.rotated_amax(
            x, rotation, axis=way.axis, key=key, site=way.site, entries=entries
        )

    @abc.abstractmethod
    def rotated_amax(self, x: jax.Array, rotation: Hadamard, **how: Any) -> jax.Array:
        """Calls that kernel."""


@dataclasses.dataclass(frozen=True)
class Mosaic(GpuKernels):
    """Kernels in Pallas Mosaic GPU.

    Attributes:
      interpreted: whether they are interpreted, on any device.
    """

    interpreted: bool = False
    reads_once: ClassVar[bool] = True

    @property
    def is_divisible(self) -> bool:
        """An interpreter calls back."""
        return not self.interpreted

    def why_not(self, x, way) -> str | None:
        """Asks the device, then the kernel, of the array as it would be padded."""
        why = devices.too_old() if self.interpreted else devices.without_mosaic()
        if why is not None:
            return why
        if x.size == 0:
            return f"x must not be empty, got shape={x.shape}"
        from fp4jax.kernels.quantize import mosaic

        found: list[str | None] = []

        def ask(x: jax.Array) -> None:
            x = blocks.pad_to_multiple(x, way.runs)
            x = blocks.pad_to_multiple(x, self.multiples(x.shape, way))
            found.append(mosaic.unsupported(x, way))

        jax.eval_shape(ask, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return found[0]

    def multiples(self, shape, way) -> dict[int, int]:
        """A warpgroup has no room for a part of a tile."""
        axis, last = way.axis, len(shape) - 1
        if len(shape) == 1:
            return {}
        padded = last if axis < last else last - 1
        if way.quantizer.is_square:
            return dict(zip((last - 1, last), devices.TILE_OF_SQUARES, strict=True))
        free = math.prod(shape[axis + 1 : -1] if axis < last else shape[:padded])
        if axis == last:
            free *= shape[axis] // way.quantizer.multiple
        return {padded: devices.WARPGROUP // math.gcd(devices.WARPGROUP, free)}

    def quantize(self, x, way, inputs) -> Quantized:
        """Calls a kernel."""
        return self.quantize_all(x, [(way, inputs)])[0]

    def quantize_all(self, x, ways) -> list[Quantized]:
        """Calls one kernel."""
        from fp4jax.kernels.quantize import mosaic

        return mosaic.quantize_all(x, ways, interpret=self.interpret)

    def rotated_amax(self, x, rotation, **how) -> jax.Array:
        """Calls the kernel."""
        from fp4jax.kernels.amax import mosaic

        return mosaic.tensor_amax(x, rotation, **how, interpret=self.interpret)

    @property
    def interpret(self) -> Any:
        """As `plgpu.kernel` takes it."""
        return devices.interpreter() if self.interpreted else None


@dataclasses.dataclass(frozen=True)
class Triton(GpuKernels):
    """Kernels in Triton, which take every shape.

    Attributes:
      capability: compute capability times 10 to compile for; None: that of the device.
    """

    capability: int | None = None

    def why_not(self, x, way) -> str | None:
        """Asks the device, where no other is named, then the kernel."""
        why = None if self.capability else devices.without_triton()
        if why is not None:
            return why
        if x.size == 0:
            return f"x must not be empty, got shape={x.shape}"
        from fp4jax.kernels.quantize import triton

        return triton.unsupported(x, way)

    def multiples(self, shape, way) -> dict[int, int]:
        """Programs mask what of their tile is beyond the array."""
        del shape, way
        return {}

    def quantize(self, x, way, inputs) -> Quantized:
        """Calls the kernel."""
        from fp4jax.kernels.quantize import triton

        return triton.quantize(x, way, inputs, capability=self.capability)

    def rotated_amax(self, x, rotation, **how) -> jax.Array:
        """Calls the kernel."""
        from fp4jax.kernels.amax import triton

        return triton.tensor_amax(x, rotation, **how, capability=self.capability)


MOSAIC, INTERPRETED, XLA = Mosaic(), Mosaic(interpreted=True), Xla()
TRITON = Triton()
# Those of GPUs, the first that can is taken.
KERNELS_OF_GPUS: dict[str, Backend] = {"mosaic": MOSAIC, "triton": TRITON}
