"""Training the Linen models of users, quantized by either way of injecting a recipe."""

from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import fp4jax.linen
from experiments.user_models import gpt2_linen, gpt2_nnx, vit_linen, vit_nnx
from fp4jax.recipes import Recipe

MODELS = {
    "gpt2": (gpt2_linen.GPT2, gpt2_nnx.batch),
    "vit": (vit_linen.ViT, vit_nnx.batch),
}
INJECTIONS = ("none", "quantize", "dot_general_cls")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))


def build(name: str, recipe: Recipe | None, injection: str, **fields) -> nn.Module:
    """Returns a model, with equal parameters and noise however it is quantized.

    "quantize" is the one line for a model that exists, "dot_general_cls" gives each of
    its layers the product, "none" leaves it as it is.
    """
    make = MODELS[name][0]
    if injection == "none":
        return make(**fields)
    assert recipe is not None
    if injection == "dot_general_cls":
        cls = fp4jax.linen.dot_general_cls(recipe)
        return make(dot_general_cls=cls, **fields)
    return fp4jax.linen.quantize(make(**fields), recipe)


def create(name: str, model: nn.Module) -> TrainState:
    """Returns the training state of Flax's guide, with the variables as `params`."""
    variables = model.init(jax.random.key(0), MODELS[name][1](0)[0])
    return TrainState.create(apply_fn=model.apply, params=variables, tx=OPTIMIZER)


@jax.jit
def train_step(
    state: TrainState, inputs: jax.Array, targets: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Updates the state of any model by one batch; returns the loss too."""

    def loss_fn(variables: Any) -> jax.Array:
        variables = fp4jax.linen.combine_by_max(variables)
        key = jax.random.fold_in(jax.random.key(1), state.step)
        logits = state.apply_fn(variables, inputs, rngs={"quant": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def losses(
    name: str, recipe: Recipe | None, injection: str, *, steps: int, **fields
) -> list[float]:
    """Returns the losses of some steps of training as Flax's guide has it."""
    state = create(name, build(name, recipe, injection, **fields))
    found = []
    for i in range(steps):
        state, loss = train_step(state, *MODELS[name][1](i))
        found.append(float(loss))
    return found
