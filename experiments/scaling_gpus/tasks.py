"""What is measured: models, meshes for so many devices, and their batches."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from experiments import presets
from experiments.kernels.chosen import Exchange, Grouped
from experiments.presets import ExperimentConfig
from fp4jax import sharding

WEAK, STRONG = "weak", "strong"
LARGE, SMALL = ("dense_1p5b", "moe_1b_active"), ("tiny", "moe_tiny")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
      preset: as for experiments.pretrain.
      changes: of its configuration.
      rows: of a batch, on each device, or in strong scaling on all.
      length: tokens of a row.
      has_experts: whether a mesh may spread them.
    """

    preset: str
    changes: tuple[str, ...] = ()
    rows: int
    length: int = 2048
    has_experts: bool = False


MODELS = {
    "dense_1p5b": Model(preset="dense_1p5b", rows=16),
    # 1.1B of 2.3B parameters meet a token: a quarter of the experts of `moe_7p9b`.
    "moe_1b_active": Model(
        preset="moe_7p9b",
        changes=("model.moe.num_experts=32", "data.vocab_size=73728"),
        rows=8,
        has_experts=True,
    ),
    "tiny": Model(preset="tiny", changes=("model.num_kv_heads=2",), rows=8, length=32),
    "moe_tiny": Model(
        preset="moe_tiny",
        changes=("model.num_kv_heads=2",),
        rows=8,
        length=32,
        has_experts=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement.

    Attributes:
      model: a name of `MODELS`.
      case: a policy, as for experiments.kernels.step.
      mesh: of the devices, such as "fsdp=4"; "data=1" is one.
      scaling: "weak" or "strong".
      devices: of the mesh.
      grouped: what multiplies groups of rows.
      exchange: what sends tokens to experts.
    """

    model: str
    case: str
    mesh: str
    scaling: str
    devices: int
    grouped: Grouped = "default"
    exchange: Exchange = "default"

    @property
    def config(self) -> ExperimentConfig:
        """The experiment whose steps are measured."""
        model = MODELS[self.model]
        rows = model.rows * (self.devices if self.scaling == WEAK else 1)
        return presets.of_batch(model.preset, rows, model.length, *model.changes)


def meshes(devices: int, *, has_experts: bool) -> list[str]:
    """Returns the meshes of all devices: one axis each, and fsdp with tensor.

    Example:
      >>> meshes(4, has_experts=True)
      ['data=4', 'fsdp=4', 'fsdp=2,tensor=2', 'expert=4']
    """
    if devices == 1:
        return ["data=1"]
    # A model whose heads or experts do not divide says so when it is traced.
    both = "tensor=2" if devices == 2 else f"fsdp={devices // 2},tensor=2"
    found = [f"data={devices}", f"fsdp={devices}"]
    found += [both] if devices % 2 == 0 else []
    return found + ([f"expert={devices}"] if has_experts else [])


def tasks(
    names: Sequence[str],
    policies: Sequence[str],
    *,
    devices: int,
    only: Sequence[str] = (),
    scalings: Sequence[str] = (WEAK, STRONG),
    grouped: Grouped = "default",
    exchange: Exchange = "default",
) -> Iterator[Task]:
    """Yields what to measure: each model and policy on one device, then on several.

    Args:
      names: of `MODELS`.
      policies: cases of experiments.kernels.step.
      devices: that there are.
      only: meshes, of all devices or of fewer; () takes all of `meshes`.
      scalings: of the rows of a batch; one device serves both.
      grouped: what multiplies groups of rows.
      exchange: what sends tokens to experts.
    """
    for name, policy in itertools.product(names, policies):
        alone = Task(
            model=name,
            case=policy,
            mesh="data=1",
            scaling=WEAK,
            devices=1,
            grouped=grouped,
            exchange=exchange,
        )
        yield alone
        known = meshes(devices, has_experts=MODELS[name].has_experts)
        several = [mesh for mesh in only or known if _size(mesh) > 1]
        for mesh, scaling in itertools.product(several, scalings):
            yield dataclasses.replace(
                alone, mesh=mesh, scaling=scaling, devices=_size(mesh)
            )


def _size(mesh: str) -> int:
    return math.prod(sharding.parse_mesh(mesh).values())
