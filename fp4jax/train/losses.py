"""The loss of language models over batches of packed documents."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Batch = Mapping[str, jax.Array | np.ndarray]


def token_losses(model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the cross entropy summed over the mask, in nats, and the mask's sum.

    loss_sum = sum_i mask_i (logsumexp(logits_i) - logits_i[target_i]),  all in float32
    """
    logits = model(
        batch["inputs"],
        segment_ids=batch["segment_ids"],
        positions=batch["positions"],
    )
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["targets"]
    )
    mask = batch["loss_mask"].astype(jnp.float32)
    return jnp.sum(losses * mask), jnp.sum(mask)
