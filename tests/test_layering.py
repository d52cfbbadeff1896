"""The tower of imports: every module rests only on the floors below its own."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*ROOT.glob("fp4jax/**/*.py"), *ROOT.glob("experiments/**/*.py")])
MAX_LINES = 500

# Lowest floor first; modules of one floor may import each other.
TOWER = (
    ("fp4jax.numerics",),
    ("fp4jax.recipes",),
    ("fp4jax.policies",),
    ("fp4jax.kernels",),
    ("fp4jax.ops",),
    ("fp4jax.nnx", "fp4jax.linen"),
    ("fp4jax.explanation",),
    ("fp4jax.taps",),
    ("fp4jax.summary",),
    ("fp4jax.models",),
    ("fp4jax.train",),
    ("experiments",),
)
# Beside the tower: who may import it.
SIDE = {
    "fp4jax.data": ("fp4jax.train", "experiments"),
    "fp4jax.sharding": ("fp4jax.models", "fp4jax.train", "experiments"),
}
# Libraries that a package must not import.
TEXT = {"grain", "tokenizers"}
SHOW = {"matplotlib", "rich", "tyro"}
TRAINING = {"chex", "flax", "optax"}
FORBIDDEN = {
    "fp4jax.numerics": TEXT | SHOW | TRAINING,
    "fp4jax.recipes": TEXT | SHOW | TRAINING,
    "fp4jax.policies": TEXT | SHOW | TRAINING,
    "fp4jax.kernels": TEXT | SHOW | TRAINING,
    "fp4jax.ops": TEXT | SHOW | TRAINING,
    "fp4jax.nnx": TEXT | SHOW | {"chex", "optax"},
    "fp4jax.linen": TEXT | SHOW | {"chex", "optax"},
    "fp4jax.explanation": TEXT | {"chex", "matplotlib", "optax", "tyro"},
    "fp4jax.taps": TEXT | SHOW | {"chex", "optax"},
    "fp4jax.summary": TEXT | SHOW | TRAINING,
    "fp4jax.models": TEXT | SHOW | {"chex", "optax"},
    "fp4jax.train": TEXT | {"matplotlib", "tyro"},
    "fp4jax.data": SHOW | TRAINING | {"jax"},
    "fp4jax.sharding": TEXT | SHOW | TRAINING,
}


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}
modules = pytest.mark.parametrize("path", MODULES, ids=dotted)


def imports(path: Path) -> set[str]:
    """Returns every module that the source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{dotted(path)} must import by absolute names"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else node.module for name in members}
    return found


def package(module: str) -> str:
    """Returns the part of the project that holds a module, or "" for a library."""
    known = [name for floor in TOWER for name in floor] + list(SIDE)
    return next((p for p in known if f"{module}.".startswith(f"{p}.")), "")


def below(name: str) -> set[str]:
    """Returns the packages that may be imported by one."""
    allowed = {side for side, users in SIDE.items() if name in users} | {name}
    if name in SIDE:
        return allowed
    level = next(i for i, floor in enumerate(TOWER) if name in floor)
    return allowed.union(*TOWER[: level + 1])


@modules
def test_imports_go_down_the_tower(path):
    if (name := dotted(path)) == "fp4jax":
        return  # hands on names of every floor
    assert package(name), f"{name} has no floor in the tower"
    used = {package(module) for module in imports(path)} - {""}
    assert used <= below(package(name))


def test_no_module_imports_itself_by_way_of_others():
    graph = {dotted(path): imports(path) for path in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@modules
def test_libraries_stay_above_the_floors_that_do_without(path):
    libraries = {module.partition(".")[0] for module in imports(path)}
    assert not libraries & FORBIDDEN.get(package(dotted(path)), set())


@modules
def test_modules_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@modules
def test_the_library_does_not_import_its_own_re_exports(path):
    if dotted(path).startswith("fp4jax"):
        assert "fp4jax" not in imports(path)


def test_top_level_only_hands_names_on():
    docstring, *body = ast.parse((ROOT / "fp4jax/__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    for node in body:
        if isinstance(node, ast.Assign):
            assert [ast.unparse(target) for target in node.targets] == ["__version__"]
        else:
            assert isinstance(node, ast.ImportFrom), ast.unparse(node)
