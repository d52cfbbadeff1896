"""How fast groups of rows are multiplied by a matrix each, forward and backward.

    python -m experiments.kernels.grouped [--shape 64x32768x2048x1024] [--out FILE]

Of a shape e x m x k x n: y, dx and dw of bfloat16 x [m, k] whose rows are of e uneven
groups, one of them empty, and a float32 w [e, k, n]. The yardstick is an einsum of e
equal groups, which knows their sizes when it is compiled. The default size is for a
GPU: on a CPU give a small one, --shape 4x512x64x64.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import fp4jax
from experiments import record, terminal
from experiments.in_turn import ProcessDied, in_turn, share_memory
from experiments.kernels import arguments
from experiments.kernels.chosen import Grouped, choice
from experiments.kernels.timing import of_compiled
from fp4jax import recipes
from fp4jax.kernels.choice import KERNELS
from fp4jax.recipes import Recipe
from fp4jax.train import JsonLines


class Case(NamedTuple):
    """What to time: a recipe, None for `lax.ragged_dot` itself, and what multiplies."""

    recipe: Recipe | None
    grouped: Grouped = "default"


Shape = tuple[int, int, int, int]
YARDSTICK = "einsum"
CASES = {
    "lax.ragged_dot": Case(None),
    "bf16": Case(recipes.bf16()),
    "bf16, ragged": Case(recipes.bf16(), "ragged"),
    "bf16, hopper": Case(recipes.bf16(), "hopper"),
    "ufp4, ragged": Case(recipes.ufp4(), "ragged"),
    "ufp4, hopper": Case(recipes.ufp4(), "hopper"),
}


def gradients(product: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns what computes y, dx and dw of (x, w, dy, ...)."""

    def function(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, w, dy, *others = operands
        y, backward = jax.vjp(lambda x, w: product(x, w, *others), x, w)
        return y, *backward(dy)

    return function


def einsum(x: jax.Array, w: jax.Array, *_: jax.Array) -> jax.Array:
    """Returns the products of equal groups."""
    x = x.reshape(len(w), -1, x.shape[1])
    y = jnp.einsum("emk,ekn->emn", x, w.astype(x.dtype))
    return y.reshape(-1, w.shape[2])


def ragged(case: Case, x: Any, w: Any, sizes: Any, key: Any) -> jax.Array:
    """Returns the products of groups of any sizes."""
    if case.recipe is None:
        return fp4jax.ragged_dot(x, w.astype(x.dtype), sizes)
    dot = functools.partial(fp4jax.ragged_dot, recipe=case.recipe, key=key)
    return dot(x, w, sizes, preferred_element_type=x.dtype)


def operands(e: int, m: int, k: int, n: int, *, seed: int) -> tuple[jax.Array, ...]:
    """Returns x, w, dy, the sizes of the groups and a key."""
    key, *keys = jax.random.split(jax.random.key(seed), 4)
    draw = jax.random.normal
    x, dy = draw(keys[0], (m, k), jnp.bfloat16), draw(keys[1], (m, n), jnp.bfloat16)
    return x, draw(keys[2], (e, k, n)) * k**-0.5, dy, group_sizes(e, m, seed), key


def group_sizes(e: int, m: int, seed: int) -> jax.Array:
    """Returns int32 [e] of sum m: uneven, the last 0 where there are several."""
    shares = np.random.default_rng(seed).lognormal(sigma=0.7, size=max(e - 1, 1))
    ends = np.round(np.cumsum(shares) / shares.sum() * m).astype(np.int32)
    sizes = np.diff(ends, prepend=0)
    return jnp.asarray(np.pad(sizes, (0, e - len(sizes))), jnp.int32)


def prepare(task: tuple[Shape, str]) -> Callable[[], dict[str, Any]]:
    """Traces a case of a shape; returns what compiles and measures it."""
    shape, name = task
    try:
        lowered = lower(shape, name)
    except Exception as error:  # of a kernel that this device lacks, any
        failed = record.failure(error)
        return lambda: failed

    def measure() -> dict[str, Any]:
        inputs = [operands(*shape, seed=seed) for seed in (0, 1)]
        try:
            times = of_compiled(lowered.compile(), inputs, count=2)
        except Exception as error:  # likewise
            return record.failure(error)
        return {"milliseconds": [1e3 * t for t in times], **record.setting()}

    return measure


def lower(shape: Shape, name: str) -> jax.stages.Lowered:
    """Returns the program of a case."""
    function, kernels = gradients(einsum), choice()
    if name != YARDSTICK:
        case = CASES[name]
        function = gradients(functools.partial(ragged, case))
        kernels = choice(grouped=case.grouped)
    with KERNELS(kernels):
        return jax.jit(function).lower(jax.eval_shape(lambda: operands(*shape, seed=0)))


def rows(
    shape: Shape,
    names: Sequence[str],
    *,
    jobs: int = 1,
    limit: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a shape, that of the yardstick first; without it, no rates.

    Args:
      shape: groups, rows, and features on both sides.
      names: of the cases.
      jobs: as of `in_turn`.
      limit: likewise.
    """
    _, m, k, n = shape
    names, base = (YARDSTICK, *names), None
    tasks = [(shape, name) for name in names]
    results = in_turn(prepare, tasks, jobs=jobs, limit=limit)
    for name, found in zip(names, results, strict=True):
        row: dict[str, Any] = {"shape": list(shape), "case": name}
        row |= {"error": str(found)} if isinstance(found, ProcessDied) else found
        if "milliseconds" in row:
            best = min(row["milliseconds"])
            base = best if name == YARDSTICK else base
            row["teraflops"] = 6 * m * k * n / best / 1e9
            row |= {} if base is None else {"rate_over_einsum": base / best}
        yield row


def main(
    shape: arguments.Groups = (64, 32768, 2048, 1024),
    *,
    names: tuple[Annotated[str, arguments.one_of(CASES)], ...] = tuple(CASES),
    jobs: int = 1,
    limit: float = 120.0,
    out: Path | None = None,
) -> int:
    """Times grouped products.

    Args:
      shape: e x m x k x n.
      names: of the cases.
      jobs: processes of one case each, at a time; 1: this one does everything.
      limit: seconds in which a process, when its turn has come, must be done, or is
        ended; one job has no limit.
      out: file to which rows are added as JSON lines, with versions, device and commit.
    """
    if jobs > 1:
        share_memory()
    table = Table("case", "ms", "again", "TFLOP/s", "rate over einsum")
    for row in rows(shape, names, jobs=jobs, limit=limit):
        print(f"{row['case']}: {row.get('error') or terminal.milliseconds(row)}")
        if out is not None:
            with JsonLines(out) as file:
                file.write(row)
        if "error" in row:
            table.add_row(row["case"], row["error"])
            continue
        ms = [f"{t:.2f}" for t in row["milliseconds"]]
        rate = row.get("rate_over_einsum")
        ratio = "" if rate is None else f"{rate:.2f}"
        table.add_row(row["case"], *ms, f"{row['teraflops']:.0f}", ratio)
    terminal.console(100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(terminal.command(main))
