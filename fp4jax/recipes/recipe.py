"""The value that describes how a linear layer is quantized."""

import dataclasses
from typing import Literal

from fp4jax.numerics import Quantizer, Site

Compute = Literal["bf16", "f32"]


def _check_gemm(name: str, a: Quantizer | None, b: Quantizer | None) -> None:
    for q in (a, b):
        if not isinstance(q, Quantizer | None):
            raise TypeError(f"{name}: operands must be Quantizer or None, got {q!r}.")
    rotations = [None if q is None else q.rotation for q in (a, b)]
    if rotations[0] != rotations[1]:
        raise ValueError(
            f"{name}: both operands must have the same rotation, or the product "
            f"changes, got {rotations[0]} and {rotations[1]}."
        )


@dataclasses.dataclass(frozen=True)
class Fprop:
    """Quantizers of y = x w, which contracts the input features; None is BF16."""

    x: Quantizer | None = None
    w: Quantizer | None = None

    def __post_init__(self):
        _check_gemm("Fprop", self.x, self.w)


@dataclasses.dataclass(frozen=True)
class Dgrad:
    """Quantizers of dx = dy w^T, which contracts the output features."""

    dy: Quantizer | None = None
    w: Quantizer | None = None

    def __post_init__(self):
        _check_gemm("Dgrad", self.dy, self.w)


@dataclasses.dataclass(frozen=True)
class Wgrad:
    """Quantizers of dw = x^T dy, which contracts the tokens."""

    x: Quantizer | None = None
    dy: Quantizer | None = None

    def __post_init__(self):
        _check_gemm("Wgrad", self.x, self.dy)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The six quantizers of a linear layer, two for each of its GEMMs.

    Attributes:
      fprop: y = x w.
      dgrad: dx = dy w^T.
      wgrad: dw = x^T dy.
      compute: type in which operands enter the GEMM: "bf16", exact for 4-bit codes
        under every block scale but F32, or "f32", exact for all and slower. Sums are
        float32 in both.
    """

    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    compute: Compute = "bf16"

    def __post_init__(self):
        for name, kind in (("fprop", Fprop), ("dgrad", Dgrad), ("wgrad", Wgrad)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(
                    f"Recipe: {name} must be a {kind.__name__}, got {name}={value!r}."
                )
        if self.compute not in ("bf16", "f32"):
            raise ValueError(
                "Recipe: compute must be 'bf16' or 'f32', got "
                f"compute={self.compute!r}."
            )

    @property
    def sites(self) -> dict[Site, Quantizer | None]:
        """Returns the quantizer of each site, None where it is not quantized."""
        return {
            Site.FPROP_X: self.fprop.x,
            Site.FPROP_W: self.fprop.w,
            Site.DGRAD_DY: self.dgrad.dy,
            Site.DGRAD_W: self.dgrad.w,
            Site.WGRAD_X: self.wgrad.x,
            Site.WGRAD_DY: self.wgrad.dy,
        }

    def draws(self, *sites: Site) -> bool:
        """Returns whether any of some sites, by default of all, needs a key."""
        quantizers = (self.sites[site] for site in sites or Site)
        return any(q is not None and q.draws for q in quantizers)
