"""Training the NNX models of users, quantized by either way of injecting a recipe."""

import optax
from flax import nnx

import fp4jax.nnx
from experiments.user_models import gpt2_nnx, vit_nnx
from fp4jax.recipes import Recipe

MODELS = {"gpt2": (gpt2_nnx.GPT2, gpt2_nnx.batch), "vit": (vit_nnx.ViT, vit_nnx.batch)}
INJECTIONS = ("none", "quantize_model", "dot_general")
ADAMW = optax.adamw(2e-3)


def build(name: str, recipe: Recipe | None, injection: str) -> nnx.Module:
    """Returns a model, with equal parameters and noise however it is quantized.

    "quantize_model" is the one line for a model that exists, "dot_general" builds it
    with a `DotGeneral` for each of its layers, "none" leaves it as it is.
    """
    make, rngs = MODELS[name][0], nnx.Rngs(params=0, quant=1)
    if injection == "none":
        return make(rngs=rngs)
    assert recipe is not None
    if injection == "dot_general":
        by_hand = lambda rngs: fp4jax.nnx.DotGeneral(recipe, rngs=rngs)
        model = make(dot_general=by_hand, rngs=rngs)
        injected = build(name, recipe, "quantize_model")
        nnx.update(model, nnx.state(injected, fp4jax.nnx.NoiseKey))
        return model
    model = make(rngs=rngs)
    fp4jax.nnx.quantize_model(model, recipe, rngs=rngs)
    return model


@nnx.jit
def train_step(model, optimizer, inputs, targets, step):
    """Updates any model by one batch; returns the loss."""

    def loss_fn(model):
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    fp4jax.nnx.set_step(model, step)
    loss, grads = fp4jax.nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def losses(
    name: str, recipe: Recipe | None, injection: str, *, steps: int
) -> list[float]:
    """Returns the losses of some steps of training as Flax's guide has it."""
    model, batch = build(name, recipe, injection), MODELS[name][1]
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    return [float(train_step(model, optimizer, *batch(i), i)) for i in range(steps)]
