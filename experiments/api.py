"""Pages of what the library offers, from its docstrings: `pip install -e '.[docs]'`.

    python -m experiments.api [--out api]

Writes one page for each public package, and a search over them.
"""

import ast
import importlib
import inspect
import sys
import types
import warnings
from pathlib import Path

from experiments import terminal

PACKAGES = (
    "fp4jax",
    "fp4jax.recipes",
    "fp4jax.policies",
    "fp4jax.numerics",
    "fp4jax.numerics.stats",
    "fp4jax.nnx",
    "fp4jax.linen",
    "fp4jax.models",
    "fp4jax.sharding",
    "fp4jax.data",
    "fp4jax.train",
    "fp4jax.taps",
    "fp4jax.kernels.choice",
    "fp4jax.kernels.exchange",
    "fp4jax.kernels.grouped_matmul",
    "fp4jax.kernels.quantize",
    "fp4jax.kernels.scaled_matmul",
)


def public(module: types.ModuleType) -> list[str]:
    """Returns what a module offers: what it defines, and imports under its own name."""
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.ImportFrom(names=aliases):
                names += [each.name for each in aliases if each.asname == each.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.append(name)
            case ast.Assign(targets=[ast.Tuple(elts=targets)]):
                names += [each.id for each in targets if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [
        name
        for name in names
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]


def main(out: Path = Path("api")) -> int:
    """Writes the pages; the exit status is 2 where pdoc is missing.

    Args:
      out: folder, which need not exist.
    """
    try:
        import pdoc
        import pdoc.render
    except ModuleNotFoundError as error:
        print(f"error: {error}. Install '.[docs]'.", file=sys.stderr)
        return 2

    for name in PACKAGES:
        module = importlib.import_module(name)
        setattr(module, "__all__", public(module))  # noqa: B010 - which pdoc obeys
    warnings.filterwarnings("ignore", "Error parsing type annotation.*ArrayTree")
    pdoc.render.configure(docformat="google", show_source=False)
    inner = [name for name in PACKAGES if name.count(".") > 1]
    pdoc.pdoc(*PACKAGES, r"!fp4jax\.\w+(\.\w+)+", *inner, output_directory=out)
    print(f"{out / 'index.html'}: {len(PACKAGES)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(terminal.command(main))
