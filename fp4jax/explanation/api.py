"""The entry: a model of either Flax library, to the table of its products."""

from typing import Any

from flax import linen, nnx

from fp4jax.explanation import of_linen, of_nnx
from fp4jax.explanation.table import Explanation


def explain(
    model: nnx.Module | linen.Module, *inputs: Any, **kwargs: Any
) -> Explanation:
    """Lists the matrix products of a model, and what each does in its three GEMMs.

    Given inputs, the model is traced, not run, and the table holds every product of
    the program: those of layers by path, and those that no policy reaches, such as
    convolutions, an output head tied to the embedding and the products of attention, by
    their place in the source. A quantized layer that the program does not call has a
    row that says so. What cuDNN computes, attention on a GPU, has none. Without inputs
    the table holds the linear layers of an NNX model.

    Args:
      model: an NNX module, or a Linen module, quantized or not.
      *inputs: of the model's call: arrays or their shapes, as `jax.eval_shape` takes.
      **kwargs: likewise.

    Returns:
      The table: `print` it, let a notebook show it, or take `.to_json()`.

    Raises:
      TypeError: a model of neither kind.
      ValueError: a Linen module without inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(model, recipes.ufp4(), rngs=nnx.Rngs(1))
      >>> (matmul,) = fp4jax.explain(model, jnp.ones((8, 64))).matmuls
      >>> matmul.sizes, matmul.operands("dgrad")[0]
      ((1, 8, 64, 32), 'dy: UNIFORM 1x16 F32 SR RHT16')
    """
    if isinstance(model, nnx.Module):
        return Explanation(tuple(of_nnx.matmuls(model, inputs, kwargs)))
    if not isinstance(model, linen.Module):
        raise TypeError(
            f"explain: model must be a Flax NNX or Linen module, got {model!r}."
        )
    if not inputs and not kwargs:
        raise ValueError(
            "explain: inputs must be given for a Linen module, whose layers exist "
            "only when it is called. Shapes, as jax.ShapeDtypeStruct, are enough."
        )
    return Explanation(tuple(of_linen.matmuls(model, inputs, kwargs)))
