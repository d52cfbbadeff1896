"""The loss of every token, and its sum."""

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.train.losses import masked_losses, token_losses


def test_losses_are_zero_outside_of_the_mask_and_add_up():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.array([[0, 1, 2], [3, 4, 0]])
    mask = np.array([[1, 0, 1], [0, 0, 1]], np.int32)
    batch = {"inputs": targets, "segment_ids": targets, "positions": targets}
    batch |= {"targets": targets, "loss_mask": mask}
    model = lambda inputs, **_: logits
    found = masked_losses(model, batch)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    np.testing.assert_allclose(found, -log_p[..., 0] * mask, rtol=1e-6)
    total, count = token_losses(model, batch)
    assert total == found.sum() and count == 3


def test_a_batch_may_leave_out_what_tells_its_documents_apart():
    tokens = jnp.zeros((2, 3), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens, "loss_mask": jnp.ones((2, 3))}
    given = []
    model = lambda **arguments: given.append(set(arguments)) or jnp.zeros((2, 3, 5))
    masked_losses(model, batch)
    assert given == [{"inputs"}]
