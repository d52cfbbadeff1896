"""The models of this library in NVFP4 as qwix, another library for JAX, computes it.

    y = Q(x) Q(w),  dx = Q(dy) Q(w)^T,  dw = Q(x)^T Q(dy)

Q rounds to E2M1 to nearest, with an E4M3 scale for 16 elements along the contraction
and none for the tensor, of those layers that `fp4jax.policies.nvfp4` quantizes.
`qwix.quantize_model` intercepts the products; nothing of a recipe of ours remains.

Small dy lie below the smallest of such scales: under a mean of losses all gradients of
quantized layers are zero, under their sum half of those of a large model. So gradients
are those of `PER_TOKEN` times the sum, which clipping by their norm and AdamW take out
again.

Where qwix 0.1.8 sees a GPU it hands two such operands to `jax.nn.scaled_matmul`, whose
float32 result its own backward pass does not take for bfloat16 operands; `emulated`
lets it multiply dequantized bfloat16, as it does on other devices.
"""

import contextlib
import functools
import re
from collections.abc import Generator
from importlib import metadata
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax import policies
from fp4jax.models import ModelConfig, Transformer
from fp4jax.models.transformer import Output
from fp4jax.nnx import DotGeneral, layers

_FORMAT, _BLOCK = "nvfp4", 16
PER_TOKEN = 64.0
RULE = {
    "weight_qtype": _FORMAT,
    "act_qtype": _FORMAT,
    "tile_size": _BLOCK,
    "bwd_qtype": _FORMAT,
    "bwd_weight_grad_tile_size": _BLOCK,
    "additional_qt_config": {
        "dlhs_tile_size": _BLOCK,
        "dlhs_residual_qtype": _FORMAT,
        "drhs_residual_qtype": _FORMAT,
    },
}


def about() -> dict[str, Any]:
    """Returns the version of qwix and the rule it gets, for a row of results.

    Raises:
      ModuleNotFoundError: qwix is not installed.
    """
    try:
        version = metadata.version("qwix")
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            "policy: qwix must be installed to be measured, and it is not. Run `pip "
            "install qwix==0.1.8`, or leave it out."
        ) from error
    return {"qwix": version, "rule": RULE}


def transformer(config: ModelConfig, *, tokens: int) -> Transformer:
    """Returns a model that qwix quantizes.

    Args:
      config: the shape.
      tokens: over which the loss is a mean.
    """
    import qwix

    policy = policies.nvfp4(config)
    model = _Scaled(config, policy, loss_scale=PER_TOKEN * tokens, rngs=nnx.Rngs(0))
    paths = []
    for layer in layers(model):
        if isinstance(layer.gemm, DotGeneral) and layer.gemm.recipe.packed_site:
            paths.append(re.escape(layer.path))
        layer.module.dot_general = nnx.static(_dot_general)
    rule = qwix.QtRule(module_path="|".join(paths), op_names=("dot_general",), **RULE)
    example = jnp.zeros((1, 2 * _BLOCK), jnp.int32)
    provider = qwix.QtProvider([rule])
    return qwix.quantize_model(model, provider, example, methods=("forward",))


@contextlib.contextmanager
def emulated() -> Generator[None]:
    """Lets qwix multiply dequantized operands in what is traced."""
    from qwix._src.core import mxfp_dot

    never = lambda *args, **kwargs: None
    with mock.patch.object(mxfp_dot, "mxfp_dot_general", never):
        yield


class _Scaled(Transformer):
    """A transformer whose gradients are multiplied by a number."""

    def __init__(self, *args, loss_scale: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_scale = loss_scale

    def forward(self, inputs: jax.Array, **kwargs: Any) -> Output:
        """Returns what the transformer does."""
        output = super().forward(inputs, **kwargs)
        return output._replace(logits=_scaled(output.logits, self.loss_scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled(x: jax.Array, scale: float) -> jax.Array:
    """Returns x; its gradient is multiplied."""
    return x


_scaled.defvjp(
    lambda x, scale: (x, None), lambda scale, _, g: (g * jnp.float32(scale),)
)


def _dot_general(
    x: jax.Array,
    w: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    packed: None = None,
    gather: None = None,
) -> jax.Array:
    """Computes what qwix intercepts: the product of bfloat16 operands."""
    del packed, gather
    y = lax.dot_general(
        x,
        w.astype(x.dtype),
        dimension_numbers,
        precision,
        preferred_element_type,
    )
    return y.astype(preferred_element_type)  # that of qwix is of another dtype
