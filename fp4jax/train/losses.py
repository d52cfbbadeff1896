"""The loss of language models over batches of packed documents."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Batch = Mapping[str, jax.Array | np.ndarray]


def masked_losses(model: nnx.Module, batch: Batch) -> jax.Array:
    """Returns the cross entropy of every token in nats, [b, t] float32.

    loss_i = mask_i (logsumexp(logits_i) - logits_i[target_i])
    """
    return cross_entropies(model(**inputs_of(batch)), batch)


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Returns the arguments of a model that a batch has.

    Without `segment_ids` every row is one document, without `positions` they count
    along the row.
    """
    names = ("inputs", "segment_ids", "positions")
    return {name: batch[name] for name in names if name in batch}


def cross_entropies(logits: jax.Array, batch: Batch) -> jax.Array:
    """Returns `masked_losses` of logits [b, t, v]."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["targets"]
    )
    return losses * batch["loss_mask"].astype(jnp.float32)


def token_losses(model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of `masked_losses`, in nats, and the mask's sum."""
    mask = batch["loss_mask"].astype(jnp.float32)
    return jnp.sum(masked_losses(model, batch)), jnp.sum(mask)
