"""Whether results hold on every mesh of this host's GPUs.

    python -m experiments.scaling_gpus.invariance [--out FILE]
    python -m experiments.scaling_gpus.invariance --dry  # 8 virtual devices

Codes and scales of one array must be equal on every mesh, random bits included. Losses
of training may differ as sums in another order make them: at most three times as far as
the farthest of those on one device with its batch in two, four and eight parts, each in
the mean over 20 steps.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding
from rich.table import Table

from experiments import presets, record, terminal
from experiments.in_turn import ProcessDied, in_turn
from experiments.kernels import cases, programs
from experiments.presets import ExperimentConfig
from experiments.scaling_gpus import setting
from experiments.scaling_gpus.tasks import meshes
from fp4jax import recipes, sharding
from fp4jax.kernels.quantize import Output, quantize
from fp4jax.numerics import Site
from fp4jax.train import JsonLines

STEPS = 20
PARTS = (2, 4, 8)  # of a batch, whose gradients are summed in another order
MOST = 3.0

# What covers both axes, squares, rotation, random bits, and an amax of all devices.
QUANTIZERS = {
    "ufp4 dy": (recipes.ufp4, Site.DGRAD_DY),
    "nvfp4 w": (recipes.nvfp4, Site.FPROP_W),
    "nvfp4 x, wgrad": (recipes.nvfp4, Site.WGRAD_X),
    "ti2d dy": (recipes.ti2d, Site.DGRAD_DY),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compares codes and losses between meshes."""

    model: str = "dense_35m"
    """as for experiments.pretrain."""
    policies: tuple[str, ...] = ("bf16", "ufp4", "ti2d")
    """likewise."""
    rows: int = 16
    """of a batch."""
    sequence: int = 512
    """tokens of a row."""
    size: int = 4096
    """rows and columns of the array that is quantized."""
    jobs: int = 4
    """processes of one run each, at a time; 1: this one does everything."""
    limit: float = 300.0
    """seconds in which a process, when its turn has come, must be done, or is ended;
    one job has no limit."""
    out: Path | None = None
    """file to which rows are added as JSON lines, with versions, device and commit."""
    dry: bool = False
    """a small model, on virtual devices of the CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A short training.

    Attributes:
      policy: a case of experiments.kernels.step.
      mesh: its devices; None for one.
      config: model and batch.
    """

    policy: str
    mesh: str | None
    config: ExperimentConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if something does not hold."""
    arguments = tyro.cli(
        Arguments, prog="python -m experiments.scaling_gpus.invariance", args=argv
    )
    setting.prepare(dry=arguments.dry)
    if arguments.dry:
        arguments = dataclasses.replace(
            arguments,
            model="olmo_tiny",
            policies=("ufp4",),
            rows=8,
            sequence=32,
            size=256,
        )
    known = meshes(jax.device_count(), has_experts=False)
    rows = []
    try:
        for row in compare(arguments, known):
            rows.append(row | record.setting())
            print(f"{row['what']}, {row['mesh']}: {row.get('error', row['holds'])}")
            if arguments.out is not None:
                with JsonLines(arguments.out) as file:
                    file.write(rows[-1])
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    terminal.console(120).print(table(rows))
    return 0 if all(row["holds"] for row in rows) else 1


def compare(arguments: Arguments, known: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each array and mesh, then for each policy and mesh.

    Raises:
      ValueError: an unknown model or policy.
      ModuleNotFoundError: a policy takes a library that is not there.
    """
    config = configure(arguments)
    for policy in arguments.policies:
        cases.find(policy, config)  # raises
    yield from compare_codes(arguments, known)
    yield from compare_losses(arguments, known)


def compare_codes(
    arguments: Arguments, known: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields for each quantizer and mesh whether codes and scales are the same."""
    x = jax.random.normal(jax.random.key(0), (arguments.size,) * 2, jnp.bfloat16)
    for name in QUANTIZERS:
        expected = _codes(name, x, None)
        for mesh in known:
            yield {
                "what": f"codes and scales, {name}",
                "mesh": mesh,
                **_differences(_codes(name, x, mesh), expected),
            }


def _codes(name: str, x: jax.Array, mesh: str | None) -> list[np.ndarray] | Exception:
    try:
        return codes(name, x, _mesh(mesh))
    except Exception as error:  # of this mesh alone
        return error


def _differences(found: Any, expected: Any) -> dict[str, Any]:
    for each in (expected, found):
        if isinstance(each, Exception):
            text = str(each).partition("\n")[0]
            return {"error": f"{type(each).__name__}: {text}", "holds": False}
    differ = [int((a != b).sum()) for a, b in zip(found, expected, strict=True)]
    return {"different": differ, "holds": not any(differ)}


def _mesh(name: str | None) -> Mesh | None:
    return None if name is None else sharding.make_mesh(**sharding.parse_mesh(name))


def codes(name: str, x: jax.Array, mesh: Mesh | None) -> list[np.ndarray]:
    """Returns codes and scales of x, spread over a mesh or on one device."""
    recipe, site = QUANTIZERS[name]
    quantizer = recipe().sites[site]
    assert quantizer is not None

    def function(x: jax.Array) -> list[jax.Array]:
        found = quantize(
            x,
            quantizer,
            outputs=(Output.CODES, Output.SCALES),
            axis=1,
            other=0 if quantizer.is_square else None,
            key=jax.random.key(1),
            site=site,
        )
        return jax.tree.leaves(found.arrays)

    layout = (
        None if mesh is None else NamedSharding(mesh, sharding.spec("batch", "mlp"))
    )
    compiled = sharding.Compiled(jax.jit(function, in_shardings=layout), mesh)
    return [np.asarray(array) for array in compiled(x)]


def compare_losses(
    arguments: Arguments, known: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields for each policy and mesh how far losses are from those on one device."""
    config = configure(arguments)
    orders = [
        dataclasses.replace(
            config, run=dataclasses.replace(config.run, microbatches=parts)
        )
        for parts in PARTS
    ]
    runs = [
        Run(policy=policy, mesh=mesh, config=c)
        for policy in arguments.policies
        for mesh, c in (
            *((None, c) for c in (config, *orders)),
            *((mesh, config) for mesh in known),
        )
    ]
    found = in_turn(losses, runs, jobs=arguments.jobs, limit=arguments.limit)
    for policy in arguments.policies:
        one, *of_orders = itertools.islice(found, 1 + len(orders))
        for mesh in known:
            judgement = judged(one, of_orders, next(found))
            yield {"what": f"losses, {policy}", "mesh": mesh, **judgement}


def configure(arguments: Arguments) -> ExperimentConfig:
    """Returns the experiment whose losses are compared."""
    return presets.resolve(
        arguments.model,
        policy_names=[presets.REFERENCE],
        alone=True,
        steps=STEPS,
        assignments=[
            f"data.batch_size={arguments.rows}",
            f"data.sequence_length={arguments.sequence}",
        ],
    )


def losses(run: Run) -> Callable[[], list[float]]:
    """Trains; returns what gives the loss of each step.

    Nothing is timed: runs need not wait for each other.
    """
    mesh = _mesh(run.mesh)
    case = cases.find(run.policy, run.config)
    batches = programs.batches(run.config, mesh=mesh)
    lowered = programs.lower(case, run.config, batches[0], mesh=mesh)
    training = programs.compiled(lowered, batches)
    found = [training.seconds(1)[1] for _ in range(STEPS)]
    return lambda: found


def judged(one: Any, orders: Sequence[Any], mesh: Any) -> dict[str, Any]:
    """Returns how far losses of a mesh are from those on one device.

    How far the losses of one order are is a draw of few early steps in which random
    rounding falls the other way, so that several are drawn.

    Args:
      one: losses on one device.
      orders: those with other orders of sums.
      mesh: those on the mesh.
    """
    for found in (one, *orders, mesh):
        if isinstance(found, ProcessDied):
            return {"error": str(found), "holds": False}
    distance = np.abs(np.subtract(mesh, one))
    of_orders = np.abs(np.subtract(orders, one))
    means = of_orders.mean(1)
    return {
        "losses": list(mesh),
        "distance": float(distance.mean()),
        "of_orders": means.tolist(),
        "last_distance": float(distance[-1]),
        "last_of_orders": of_orders[:, -1].tolist(),
        "holds": bool(distance.mean() <= MOST * means.max()),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows as people read them."""
    table = Table("what", "mesh", "different", "of other orders", "holds")
    for row in rows:
        different = row.get("error", row.get("different"))
        order = ""
        if "distance" in row:
            different = f"{row['distance']:.2e}"
            order = ", ".join(f"{of_order:.2e}" for of_order in row["of_orders"])
        holds = "yes" if row["holds"] else "NO"
        table.add_row(row["what"], row["mesh"], str(different), order, holds)
    return table


if __name__ == "__main__":
    sys.exit(main())
