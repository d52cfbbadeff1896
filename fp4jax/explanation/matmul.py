"""One matrix product of a model, and the words that say what it does."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from fp4jax.numerics import Fresh, Held, MSEden, Quantizer, Site, Stochastic
from fp4jax.numerics.sites import OPERANDS
from fp4jax.ops import fp8
from fp4jax.recipes import Recipe, to_json

GEMMS = {
    "fprop": (Site.FPROP_X, Site.FPROP_W),
    "dgrad": (Site.DGRAD_DY, Site.DGRAD_W),
    "wgrad": (Site.WGRAD_X, Site.WGRAD_DY),
}

# What the words of an operand mean, by what tells that they are there.
MEANINGS = {
    "Q(": "Q(x): as fprop rounded it",
    "truncation_free": "truncation_free: the least power of two that clips nothing",
    "floor": "floor: a block's power of two over that of the grid, which may clip",
    "(even": "even: as floor, of the largest number as the grid rounds it",
    "best of": "best of: a block's largest number becomes the one that errs least",
    "prescale": "prescale p: of numbers times p, undone in the product",
    "pad 17/16": "pad 17/16: larger by this, so that none rounded down clips",
    "fresh(": "fresh(t): a tensor scale, making the largest block's t",
    "held(": "held(n, t): a tensor scale for n steps, making the largest block's t",
    "RTNE": "RTNE: to nearest",
    " SR": "SR: stochastically",
    "MS-EDEN": "MS-EDEN(n): to nearest, corrected scales of n numbers stochastically",
    "RHT": "RHTn: after a random Hadamard rotation of n",
    "(signs per step": "signs per step: of signs drawn anew in every step",
    "zeros": "zeros: padded",
}

# Batch, tokens m, input features k, output features n; None where it is not known.
Sizes = tuple[int | None, int | None, int, int]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matrix product of a model, y = x w.

    Attributes:
      path: of the layer, such as "blocks/0/attention/query"; of a product that no
        layer owns, where it stands in the source.
      sizes: (batch, m, k, n): tokens m, input features k, output features n; the first
        two are None where no inputs were given.
      recipe: what is quantized; None is nothing.
      stack: leading axes of layers that are stacked under one path.
      reachable: whether a policy could give it a recipe.
      is_called: whether the program has it; a layer's recipe has no effect otherwise.
    """

    path: str
    sizes: Sizes
    recipe: Recipe | None
    stack: tuple[int, ...] = ()
    reachable: bool = True
    is_called: bool = True

    @property
    def quantizations(self) -> int:
        """Quantized operands that one forward and backward pass computes."""
        if self.recipe is None or not self.is_called:
            return 0
        return _quantizations(self.recipe)

    @property
    def compute(self) -> str:
        """What it is computed in, or why nothing is quantized."""
        if not self.is_called:
            return "no effect: not called"
        if self.recipe is None:
            return "as it is" if self.reachable else "no recipe reaches it"
        residual = ", packed x" if self.recipe.residuals == "packed" else ""
        return _computed_in(self.recipe) + residual

    def operands(self, gemm: str) -> tuple[str, str]:
        """Returns one line for each operand of "fprop", "dgrad" or "wgrad"."""
        first, second = GEMMS[gemm]
        return self._operand(gemm, first), self._operand(gemm, second)

    def _operand(self, gemm: str, site: Site) -> str:
        name = OPERANDS[site.operand]
        if self.recipe is None:
            return f"{name}: as it is"
        quantizer = self.recipe.sites[site]
        if self.recipe.source == "fprop" and site in (Site.DGRAD_W, Site.WGRAD_X):
            name = f"Q({name})"
        if quantizer is None:
            return f"{name}: {'F32' if self.recipe.compute == 'f32' else 'BF16'}"
        if self.recipe.share_dy and site == Site.WGRAD_DY:
            return "dy: that of dgrad"
        parts = [f"{name}:", *_describe(quantizer)]
        size, padded = self.contraction(gemm)
        if padded != size:
            parts.append(f"zeros {size} to {padded}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns what `json.dumps` takes."""
        batch, m, k, n = self.sizes
        recipe, gemms = self.recipe, {}
        for gemm, sites in GEMMS.items():
            size, padded = self.contraction(gemm)
            operands = {
                OPERANDS[site.operand]: to_json(recipe and recipe.sites[site])
                for site in sites
            }
            gemms[gemm] = {"contraction": size, "padded": padded, "operands": operands}
        options = ("compute", "residuals", "share_dy", "source")
        return {
            "path": self.path,
            "stack": list(self.stack),
            "sizes": {"batch": batch, "m": m, "k": k, "n": n},
            "reachable": self.reachable,
            "is_called": self.is_called,
            "quantizations": self.quantizations,
            "recipe": recipe and {name: getattr(recipe, name) for name in options},
            "gemms": gemms,
        }

    def contraction(self, gemm: str) -> tuple[int | None, int | None]:
        """Returns the size of the contraction axis of a GEMM, and its padded size."""
        _, m, k, n = self.sizes
        size = {"fprop": k, "dgrad": n, "wgrad": m}[gemm]
        if size is None or self.recipe is None:
            return size, size
        padded = size
        for site in GEMMS[gemm]:
            quantizer = self.recipe.sites[site]
            if quantizer is not None:
                padded = max(padded, size + -size % quantizer.multiple)
        return size, padded


def _quantizations(recipe: Recipe) -> int:
    """Counts the quantizations of a traced forward and backward pass of a layer."""
    count = sum(quantizer is not None for quantizer in recipe.sites.values())
    count -= recipe.share_dy
    if recipe.source == "fprop":
        # The backward pass rounds w anew, and x too; or what is packed of x is rounded
        # beside what is multiplied.
        count += 2
    return count


def _describe(quantizer: Quantizer) -> Iterator[str]:
    """Yields the words that say how an operand is quantized."""
    scale, size = quantizer.scale, quantizer.block_size
    yield quantizer.grid.name
    yield f"{size}x{size}" if quantizer.is_square else f"1x{size}"
    name = scale.format.name
    options = [scale.rule]
    if scale.candidates:
        options += [f"best of {', '.join(f'{c:g}' for c in scale.candidates)}"]
    options += [f"prescale {scale.prescale}"] if scale.prescale else []
    options += ["pad 17/16"] if quantizer.pads else []
    options = [option for option in options if option]
    yield name + (f"({', '.join(options)})" if options else "")
    match quantizer.tensor_scale:
        case Held(every=every, target=target):
            yield f"held({every}, {target:g})"
        case Fresh(target=target):
            yield f"fresh({target:g})"
    match quantizer.rounding:
        case Stochastic():
            yield "SR"
        case MSEden(group=group):
            yield f"MS-EDEN({group})"
        case _:
            yield "RTNE"
    if quantizer.rotation is not None:
        yield f"RHT{quantizer.rotation.size}"
        if quantizer.rotation.draws:
            yield "(signs per step)"


def _computed_in(recipe: Recipe) -> str:
    """Returns the compute type, and which GEMMs cannot have it."""
    if recipe.compute != "fp8":
        return recipe.compute
    other = [
        name
        for name, pair in GEMMS.items()
        if not all(fp8.takes(recipe.sites[site]) for site in pair)
    ]
    return f"fp8 ({', '.join(other)}: bf16)" if other else "fp8 where exact"
