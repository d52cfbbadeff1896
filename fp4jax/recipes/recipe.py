"""The value that describes how a linear layer is quantized."""

import dataclasses
from typing import Literal, get_args

from fp4jax.numerics import Fresh, Held, Quantizer, Site
from fp4jax.numerics.sites import OPERANDS

Compute = Literal["bf16", "f32", "fp8", "native"]
Residuals = Literal["operands", "packed"]
Source = Literal["original", "fprop"]


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
        under every block scale but F32; "f32", exact for all and slower; "fp8", FP8
        tensor cores for GEMMs of 4-bit codes under powers of two, in bfloat16 where
        scales lie too far apart for it, and others (compile such programs with
        `fp4jax.train.FP8_OPTIONS`); "native", FP4 tensor cores, where the device has
        them. Sums are float32 in all.
      residuals: what the backward pass keeps of x: "operands", x itself, or "packed",
        its quantized codes and scales, from which the same gradients follow.
      share_dy: whether dgrad and wgrad take one and the same quantized dy, of square
        blocks, drawn once.
      source: what dgrad's w and wgrad's x are made of: the "original" operand, or the
        values that "fprop" rounded it to.
    """

    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    compute: Compute = "bf16"
    residuals: Residuals = "operands"
    share_dy: bool = False
    source: Source = "original"

    def __post_init__(self):
        for name, kind in (("fprop", Fprop), ("dgrad", Dgrad), ("wgrad", Wgrad)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(
                    f"Recipe: {name} must be a {kind.__name__}, got {name}={value!r}."
                )
        options = (("compute", Compute), ("residuals", Residuals), ("source", Source))
        for name, allowed in options:
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(
                    f"Recipe: {name} must be one of {get_args(allowed)}, got "
                    f"{name}={value!r}."
                )
        if not isinstance(self.share_dy, bool):
            raise TypeError(
                f"Recipe: share_dy must be a bool, got share_dy={self.share_dy!r}."
            )
        self._check_sources()
        self._check_shared()
        self._check_native()
        self._check_held()

    def _check_sources(self) -> None:
        if self.source == "fprop" and None in (self.fprop.x, self.fprop.w):
            raise ValueError(
                "Recipe: source must be 'original' unless both operands of fprop are "
                f"quantized, got source='fprop' with fprop={self.fprop}."
            )
        if self.residuals == "packed" and self.packed_site is None:
            raise ValueError(
                "Recipe: residuals must be 'operands' where x is not quantized for "
                "wgrad, got residuals='packed'."
            )

    def _check_shared(self) -> None:
        dgrad, wgrad = self.dgrad.dy, self.wgrad.dy
        if not self.share_dy:
            return
        if dgrad is None or dgrad != wgrad or not dgrad.is_square:
            raise ValueError(
                "Recipe: share_dy needs equal square quantizers of dy in dgrad and "
                f"wgrad, got {dgrad} and {wgrad}."
            )

    def _check_native(self) -> None:
        if self.compute != "native":
            return
        for gemm in (self.fprop, self.dgrad, self.wgrad):
            quantized = [q is not None for q in vars(gemm).values()]
            if any(quantized) and not all(quantized):
                raise ValueError(
                    "Recipe: compute='native' needs both operands of a GEMM quantized, "
                    f"or none, got {gemm}."
                )
        if self.share_dy:
            raise ValueError(
                "Recipe: compute='native' must not be combined with share_dy=True, "
                "whose scales do not run along the contraction of wgrad."
            )
        if not any(self.sites.values()):
            raise ValueError(
                "Recipe: compute must not be 'native' where nothing is quantized."
            )

    def _check_held(self) -> None:
        for name, periods in zip(OPERANDS, self._periods(), strict=True):
            if len(periods) > 1:
                raise ValueError(
                    f"Recipe: {name} has one held amax, so that all its sites must "
                    f"have one period, got every={sorted(periods)}."
                )

    def _periods(self) -> tuple[set[int], set[int], set[int]]:
        """Returns the periods of the held amaxes that sites of x, w and dy ask for."""
        periods: tuple[set[int], set[int], set[int]] = (set(), set(), set())
        for site, quantizer in self.sites.items():
            if quantizer is not None and isinstance(quantizer.tensor_scale, Held):
                periods[site.operand].add(quantizer.tensor_scale.every)
        return periods

    @property
    def every(self) -> tuple[int | None, int | None, int | None]:
        """Returns the periods of the held amaxes of x, w and dy, None if fresh."""
        x, w, dy = (next(iter(periods), None) for periods in self._periods())
        return x, w, dy

    @property
    def holds(self) -> bool:
        """Whether any tensor scale is held, so that a layer has state."""
        return any(self.every)

    @property
    def packed_site(self) -> Site | None:
        """The site whose quantized x the backward pass starts from; None is x."""
        site = Site.FPROP_X if self.source == "fprop" else Site.WGRAD_X
        needed = self.wgrad.x is not None or self.source == "fprop"
        return site if needed else None

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


def two_level(quantizer: Quantizer) -> Quantizer:
    """Returns a quantizer with a fresh tensor scale, if its block scale needs one.

    One of 3 mantissa bits does: alone it has no range for small gradients.
    """
    if not quantizer.scale.rounds_mantissa:
        return quantizer
    return dataclasses.replace(quantizer, tensor_scale=Fresh())
