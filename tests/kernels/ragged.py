"""`lax.ragged_all_to_all` by a gathering of everything, for devices that have none."""

import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
):
    """What JAX documents, of floating dtypes; NaN where sizes disagree or overlap."""
    everything = lax.all_gather(operand, axis_name)
    sizes, sources, targets = (
        lax.all_to_all(each, axis_name, 0, 0, tiled=True)  # of what comes to a device
        for each in (send_sizes, input_offsets, output_offsets)
    )
    sender = jnp.arange(sizes.size) // (sizes.size // lax.axis_size(axis_name))
    row = jnp.arange(output.shape[0])
    place = row[None] - targets[:, None]  # in each piece
    inside = (place >= 0) & (place < sizes[:, None])
    piece = jnp.argmax(inside, 0)
    source = sources[piece] + place[piece, row]
    is_received = inside.any(0).reshape(-1, *[1] * (output.ndim - 1))
    found = jnp.where(is_received, everything[sender[piece], source], output)
    agreed = (sizes == recv_sizes).all() & (inside.sum(0) <= 1).all()
    return jnp.where(agreed, found, jnp.nan)
