"""What a choice of kernels says of itself."""

import functools
import logging
from collections.abc import Callable


def once(name: str, message: str) -> Callable[[str], None]:
    """Returns what logs a choice, each reason once.

    Args:
      name: of the logger.
      message: with one %s, for the reason.
    """
    log = logging.getLogger(name)

    @functools.cache
    def say(why: str) -> None:
        log.info(message, why)

    return say
