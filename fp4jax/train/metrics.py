"""What a run is judged by: speed, utilization, held-out loss; and its log."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax

# Dense FLOP/s in bfloat16, float16 where a device lacks it, from data sheets. A row
# fits a device whose kind has all its words; more special rows come first.
_PEAK_TERAFLOPS = (
    ("B200", 2250),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 989.4),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("V100", 125),
    ("T4", 65),
    ("MI350", 2307),
    ("TPU v6 lite", 918),
    ("TPU v5 lite", 197),
    ("TPU v5p", 459),
    ("TPU v4", 275),
)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of a device, or None where it is not known.

    Args:
      device_kind: of a `jax.Device`.

    Example:
      >>> peak_flops("NVIDIA A100-SXM4-80GB")
      312000000000000.0
    """
    words = set(re.split(r"[\s-]+", device_kind))
    for kind, teraflops in _PEAK_TERAFLOPS:
        if words.issuperset(kind.split()):
            return teraflops * 1e12
    return None


def utilization(
    tokens_per_s: float, *, flops_per_token: float, devices: Iterable[jax.Device]
) -> float | None:
    """Returns the model FLOPs done as a fraction of the peak of all `devices`.

    None where the peak of one of them is not known.
    """
    total = 0.0
    for device in devices:
        if (peak := peak_flops(device.device_kind)) is None:
            return None
        total += peak
    return tokens_per_s * flops_per_token / total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss on held-out text.

    Attributes:
      nats: summed over the tokens.
      tokens: predicted, that is with a loss mask of 1.
      bytes: of text, that these tokens stand for.
    """

    nats: float
    tokens: int
    bytes: int

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Returns the loss on several texts together."""
        parts = tuple(parts)
        return cls(
            nats=sum(part.nats for part in parts),
            tokens=sum(part.tokens for part in parts),
            bytes=sum(part.bytes for part in parts),
        )

    @property
    def nats_per_token(self) -> float:
        """Mean loss of a token, comparable between runs with one tokenizer."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode a byte of text, comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes


def nulls_for_nan(value: Any) -> Any:
    """Returns nested lists and dicts with None for every number that JSON lacks."""
    if isinstance(value, Mapping):
        return {name: nulls_for_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [nulls_for_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """A log of one JSON object a line, on disk as soon as it is written.

    Args:
      path: of the file, which is made, with its folder, or written on at its end.

    Raises:
      OSError: the file cannot be made; on `write`, the disk is full, for instance.
    """

    def __init__(self, path: Path | str):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, which `close` would try to write again on a full disk.
        self._file = open(path, "ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one record; null for a number that JSON lacks, such as NaN."""
        line = (json.dumps(nulls_for_nan(record), allow_nan=False) + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:  # which does not say the file
            raise OSError(error.errno, error.strerror, str(self._file.name)) from error
