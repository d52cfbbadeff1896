"""The shape of a decoder-only model: one frozen value, its blocks and their layers."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from fp4jax.numerics.checks import is_integer

Remat = Literal["none", "dots", "full"]
Mlp = Literal["swiglu", "relu2"]
Norm = Literal["rms", "layer"]
Score = Literal["softmax", "sigmoid"]

# What the blocks of a pattern add to the residual stream, one part after another.
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "T": ("attention", "mlp"),
        "E": ("attention", "moe"),
        "M": ("mamba",),
        "*": ("attention",),
        "-": ("mlp",),
    }
)

_MLP_LAYERS = {"swiglu": ("gate", "up", "down"), "relu2": ("up", "down")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts: of each token, the `top_k` that its router scores highest.

    Attributes:
      num_experts: of a layer.
      top_k: experts that a token is sent to.
      d_expert: hidden width of an expert.
      d_shared: hidden width of the expert that every token passes; 0: there is none.
      score: what turns the router's logits into scores.
      normalize: whether the weights of the chosen experts are made to sum to 1.
      scaling: factor of these weights.
      aux_weight: of the loss that balances the experts; 0: there is none.
      bias_rate: by which a step moves the bias that balances the choice; 0: no bias.
      capacity_factor: room that a device has for the tokens of each other, over an
        equal share of them; what is beyond it is dropped. 0: for all, none is dropped,
        nor where no mesh spreads experts.

    Raises:
      ValueError: a size that is no positive integer, more chosen experts than there
        are, an unknown score, a factor out of its range.
    """

    num_experts: int
    top_k: int
    d_expert: int
    d_shared: int = 0
    score: Score = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    aux_weight: float = 0.001
    bias_rate: float = 0.0
    capacity_factor: float = 0.0

    def __post_init__(self):
        _check_counts(self, "num_experts", "top_k", "d_expert")
        _check_counts(self, "d_shared", least=0)
        _check_numbers(self, "scaling")
        _check_numbers(self, "aux_weight", "bias_rate", "capacity_factor", zero=True)
        _check_name(self, "score", get_args(Score))
        if self.top_k > self.num_experts:
            raise ValueError(
                "MoEConfig: top_k must be at most num_experts, got "
                f"top_k={self.top_k}, num_experts={self.num_experts}."
            )
        if 0 < self.capacity_factor < 1:
            raise ValueError(
                "MoEConfig: capacity_factor must be 0 or at least 1, got "
                f"capacity_factor={self.capacity_factor}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba-2 layer.

    Attributes:
      num_heads: of the state.
      head_dim: channels of a head.
      d_state: numbers that a channel remembers.
      num_groups: of heads; each shares how it writes to and reads from its states.
      d_conv: tokens that the causal convolution sees.
      chunk: tokens that the scan takes at once; it changes no result but by rounding.

    Raises:
      ValueError: a size that is no positive integer, groups that do not divide.
    """

    num_heads: int
    head_dim: int
    d_state: int
    num_groups: int = 1
    d_conv: int = 4
    chunk: int = 128

    def __post_init__(self):
        _check_counts(self, *vars(self))
        _check_multiple(self, "num_heads", "num_groups")

    @property
    def d_inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def d_mixed(self) -> int:
        """Channels that the convolution mixes: x, and B and C of every group."""
        return self.d_inner + 2 * self.num_groups * self.d_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model, by default a transformer: RMSNorm, RoPE, GQA, SwiGLU.

    Attributes:
      num_layers: number of blocks.
      num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads
        query heads.
      blocks: a letter for each block, repeated until there are `num_layers`: "T" is
        attention, then an MLP; "E" attention, then a mixture of experts; "M" Mamba-2,
        "*" attention and "-" an MLP alone.
      mlp: "swiglu", or "relu2", whose hidden activations are relu(x)^2.
      norm: "rms", or "layer", a layer norm without parameters.
      qk_norm: normalize every query and key, by an RMSNorm, before they are rotated.
      rope_theta: base of the rotary wavelengths; 0: attention knows no positions.
      tie_embeddings: the output head is the transposed embedding table.
      moe, mamba: of the blocks that need them.
      remat: what the backward pass of a block recomputes: "none" of it, all but the
        products of its linear layers and the amaxes that they hold ("dots"), or
        everything but its input ("full").
      scan_layers: run equal blocks, or units of blocks, that follow one another as one
        `lax.scan`, which compiles them once; False unrolls them, which compiles longer
        and runs faster the less is recomputed: a scan copies what the backward pass
        needs into stacks.

    Raises:
      ValueError: a size that is no positive integer, a constant that is not positive
        and finite, heads or a pattern that do not divide, an odd head_dim, an unknown
        name or letter, a pattern and its `moe` or `mamba` that do not fit.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    blocks: str = "T"
    mlp: Mlp = "swiglu"
    norm: Norm = "rms"
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    moe: MoEConfig | None = None
    mamba: MambaConfig | None = None
    remat: Remat = "dots"
    scan_layers: bool = True

    def __post_init__(self):
        _check_counts(self, "vocab_size", "num_layers", "d_model", "d_ff")
        _check_counts(self, "num_heads", "num_kv_heads", "head_dim")
        _check_numbers(self, "norm_eps")
        _check_numbers(self, "rope_theta", zero=True)
        _check_multiple(self, "num_heads", "num_kv_heads")
        if self.head_dim % 2:
            raise ValueError(
                "ModelConfig: head_dim must be even, since RoPE rotates pairs, "
                f"got head_dim={self.head_dim}."
            )
        _check_name(self, "remat", get_args(Remat))
        _check_name(self, "mlp", get_args(Mlp))
        _check_name(self, "norm", get_args(Norm))
        self._check_blocks()

    def _check_blocks(self):
        letters = set(self.blocks)
        known = letters and letters <= set(PARTS)
        if not known or self.num_layers % len(self.blocks):
            raise ValueError(
                f"ModelConfig: blocks must be letters out of {''.join(PARTS)} whose "
                f"number divides num_layers, got blocks={self.blocks!r}, "
                f"num_layers={self.num_layers}."
            )
        for name, letter in (("moe", "E"), ("mamba", "M")):
            if (getattr(self, name) is None) == (letter in letters):
                raise ValueError(
                    f"ModelConfig: {name} must be given if and only if a block is "
                    f"{letter!r}, got {name}={getattr(self, name)}, "
                    f"blocks={self.blocks!r}."
                )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the config that `dataclasses.asdict` has made `fields` of."""
        values = dict(fields)
        for name, kind in (("moe", MoEConfig), ("mamba", MambaConfig)):
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return cls(**values)

    @property
    def kinds(self) -> str:
        """The letter of every block."""
        return self.blocks * (self.num_layers // len(self.blocks))

    @property
    def layer_paths(self) -> tuple[str, ...]:
        """The path of every linear that takes a recipe, such as "blocks/3/mlp/up"."""
        return tuple(
            f"blocks/{i}/{path}"
            for i, kind in enumerate(self.kinds)
            for path in self.layers(kind)
        )

    def layers(self, kind: str) -> tuple[str, ...]:
        """Returns the paths of these linears in a block, such as "mlp/up"."""
        mlp = _MLP_LAYERS[self.mlp]
        shared = self.moe is not None and self.moe.d_shared > 0
        layers = {
            "attention": ("query", "key", "value", "out"),
            "mlp": mlp,
            "moe": (*mlp, *(f"shared/{name}" for name in mlp if shared)),
            "mamba": ("input", "output"),
        }
        return tuple(f"{part}/{name}" for part in PARTS[kind] for name in layers[part])


def _check_counts(config: Any, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(config, name)
        if not (is_integer(value) and value >= least):
            kind = "a positive integer" if least else "an integer that is not negative"
            raise ValueError(
                f"{type(config).__name__}: {name} must be {kind}, got {name}={value!r}."
            )


def _check_numbers(config: Any, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        in_range = 0 <= value < math.inf if zero else 0 < value < math.inf
        if isinstance(value, bool) or not in_range:
            kind = "zero, or positive and finite" if zero else "positive and finite"
            raise ValueError(
                f"{type(config).__name__}: {name} must be {kind}, got {name}={value!r}."
            )


def _check_multiple(config: Any, whole: str, part: str) -> None:
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{type(config).__name__}: {whole} must be a multiple of {part}, got "
            f"{whole}={getattr(config, whole)}, {part}={getattr(config, part)}."
        )


def _check_name(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    if (value := getattr(config, name)) not in allowed:
        raise ValueError(
            f"{type(config).__name__}: {name} must be one of {', '.join(allowed)}, got "
            f"{name}={value!r}."
        )
