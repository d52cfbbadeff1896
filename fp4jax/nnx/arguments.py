"""What the arguments of every layer must be."""

from typing import Any

from flax import nnx


def check_rngs(rngs: Any, caller: str, *streams: str) -> None:
    """Raises for what draws no keys, such as a seed, and for a missing stream.

    Args:
      rngs: the argument.
      caller: the function whose argument it is.
      *streams: what it draws from.

    Raises:
      TypeError: no `nnx.Rngs`.
      ValueError: a stream that it has not, nor a default.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{caller}: rngs must be nnx.Rngs, got {rngs!r}. Pass nnx.Rngs(0), of a "
            "seed or of a key."
        )
    for stream in streams:
        if stream not in rngs and "default" not in rngs:
            raise ValueError(
                f"{caller}: rngs must have the stream {stream!r} or a default, got "
                f"those of {', '.join(rngs) or 'none'}. Pass nnx.Rngs(0), or name it: "
                f"nnx.Rngs({stream}=0)."
            )
