"""What a model repeats: parts that read the residual stream and add to it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fp4jax.models.attention import Attention
from fp4jax.models.config import PARTS, ModelConfig
from fp4jax.models.layers import make_norm
from fp4jax.models.mamba2 import Mamba2
from fp4jax.models.mlp import MLPS
from fp4jax.models.moe import Balance, MoE
from fp4jax.recipes import Recipe


class Block(nnx.Module):
    """x + part(norm(x)), for one part after another.

    A part is the attribute of its name, and its norm `NAME_norm`.

    Args:
      config: the model's.
      kind: letter of the block, which decides its parts.
      recipes: by paths such as "mlp/up".
      rngs: streams `params` and `quant`.
    """

    moe: MoE  # where it is a part, as others are

    def __init__(
        self,
        config: ModelConfig,
        kind: str,
        recipes: Mapping[str, Recipe],
        *,
        rngs: nnx.Rngs,
    ):
        self.parts = PARTS[kind]
        for part in self.parts:
            setattr(self, f"{part}_norm", make_norm(config, rngs=rngs))
            make = _maker(part, config)
            setattr(self, part, make(config, recipes, rngs=rngs))

    def __call__(
        self, x: jax.Array, context: Mapping[str, Mapping[str, Any]]
    ) -> tuple[jax.Array, Balance | None]:
        """Returns x [b, t, d] after all parts, and how its experts were used, if any.

        Args:
          x: [b, t, d].
          context: what each part is called with besides.
        """
        balance = None
        for part in self.parts:
            y = getattr(self, f"{part}_norm")(x)
            y = getattr(self, part)(y, **context.get(part, {}))
            if part == "moe":
                y, balance = y
            x = x + y
        return x, balance


def _maker(part: str, config: ModelConfig) -> Callable[..., nnx.Module]:
    makers = {"attention": Attention, "mamba": Mamba2, "moe": MoE}
    return MLPS[config.mlp] if part == "mlp" else makers[part]
