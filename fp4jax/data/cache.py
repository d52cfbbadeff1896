"""The folder of what is made once and may be removed: tokens, and files that are known.

It is `$FP4JAX_CACHE`, `$XDG_CACHE_HOME/fp4jax` or `~/.cache/fp4jax`.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_LARGE = 2**24  # bytes of a file from which on it is worth to remember it


def cache_folder() -> Path:
    """Returns the folder, which need not exist."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FP4JAX_CACHE") or xdg / "fp4jax")


class Known:
    """Files that a check has passed, until one is written or moved.

    A file is told by its inode, size, and times of change, so that a copy that keeps
    the time of modification is another file.

    Args:
      paths: of the files that are checked together.
      check: what the check depends on besides them.
    """

    def __init__(self, paths: Sequence[Path], check: str):
        stats = [path.stat() for path in paths]
        seen = [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]
        name = hashlib.sha256(repr((seen, check)).encode()).hexdigest()
        self._mark = cache_folder() / "checked" / name
        self._is_large = sum(s.st_size for s in stats) >= _LARGE

    def __bool__(self) -> bool:
        try:
            return self._is_large and self._mark.exists()
        except OSError:
            return False

    def remember(self) -> None:
        """Keeps that the files have passed, if they are large and the cache can be."""
        if not self._is_large:
            return
        try:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        except OSError:
            return  # they are read again next time
