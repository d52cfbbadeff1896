"""Accelerators, as their data sheets and our measurements know them."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from fp4jax.train import peak_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What bounds the speed of a step.

    Attributes:
      kind: as `peak_flops` knows it.
      memory: GiB.
      bandwidth: of the memory, bytes/s.
      link: to the others of its node, bytes/s in one direction.
      network: to those of other nodes, likewise.
      node: devices that `link` connects.
      quantize: copies by XLA that take as long as the quantization of an operand: by
        our kernels where they run.
      rotate: likewise, rotated first.
    """

    kind: str
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int = 8
    quantize: float = 1.0
    rotate: float = 1.0

    @property
    def flops(self) -> float:
        """Peak FLOP/s in bfloat16."""
        found = peak_flops(self.kind)
        assert found is not None
        return found


# Data sheets; a network of 400 Gbit/s for each device.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.kind: device
        for device in (
            Device(kind="H100", memory=80, bandwidth=3.35e12, link=450e9, network=50e9),
            Device(kind="H200", memory=141, bandwidth=4.8e12, link=450e9, network=50e9),
            Device(kind="B200", memory=180, bandwidth=8e12, link=900e9, network=50e9),
            Device(
                kind="MI350",
                memory=288,
                bandwidth=8e12,
                link=537e9,
                network=50e9,
                quantize=2.0,
                rotate=3.4,
            ),
        )
    }
)
