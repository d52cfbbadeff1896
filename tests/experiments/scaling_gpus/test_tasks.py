"""What is measured for so many devices, and what its rows are compared with."""

import math

import pytest

from experiments.scaling_gpus.table import compared, table, verdicts
from experiments.scaling_gpus.tasks import LARGE, MODELS, meshes, tasks
from fp4jax import models, sharding


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_meshes_take_all_devices(devices):
    found = meshes(devices, has_experts=True)
    sizes = [sharding.parse_mesh(mesh) for mesh in found]
    assert {math.prod(each.values()) for each in sizes} == {devices}
    assert len(found) == len(set(found))
    assert any("expert" in each for each in sizes) == (devices > 1)


def test_weak_scaling_keeps_the_rows_of_a_device_and_strong_those_of_all():
    found = list(tasks(["tiny"], ["bf16"], devices=4, only=["fsdp=4"]))
    names = [(each.mesh, each.scaling) for each in found]
    assert names == [("data=1", "weak"), ("fsdp=4", "weak"), ("fsdp=4", "strong")]
    assert [each.config.data.batch_size for each in found] == [8, 32, 8]


@pytest.mark.parametrize("devices", [1, 8])
def test_a_mesh_of_some_devices_has_their_rows(devices):
    only = ["data=1", "fsdp=2", "fsdp=2,tensor=2"]
    found = list(tasks(["tiny"], ["bf16"], devices=devices, only=only))
    assert [each.devices for each in found] == [1, 2, 2, 4, 4]
    assert [each.config.data.batch_size for each in found] == [8, 16, 8, 32, 8]


def test_one_device_is_measured_once():
    found = list(tasks(["tiny", "moe_tiny"], ["bf16", "ufp4"], devices=1))
    assert len(found) == 4 and {each.mesh for each in found} == {"data=1"}


def test_large_models_have_about_a_billion_active_parameters():
    (dense, *_), (mixture, *_) = (tasks([n], ["bf16"], devices=1) for n in LARGE)
    assert models.num_params(dense.config.model) == 1_501_677_568
    active = models.num_active_params(mixture.config.model)
    assert 0.9e9 < active < 1.2e9
    assert MODELS[mixture.model].has_experts


def row(case, mesh, ms, *, devices, tokens, scaling="weak"):
    return {
        "model": "tiny",
        "case": case,
        "mesh": mesh,
        "scaling": scaling,
        "devices": devices,
        "milliseconds": [ms, ms + 1],
        "tokens_per_second": tokens,
        "utilization": None,
        "communication_share": 0.25,
        "exposed_share": None,
        "collective_bytes": {"all-gather": 2**30},
        "device_bytes": 2**31,
    }


def test_rows_are_compared_with_one_device_and_with_bf16():
    rows = []
    for each in (
        row("bf16", "data=1", 100, devices=1, tokens=10),
        row("bf16", "fsdp=4", 110, devices=4, tokens=36),
        row("ufp4", "data=1", 120, devices=1, tokens=8),
        row("ufp4", "fsdp=4", 143, devices=4, tokens=28),
        row("ufp4", "fsdp=4", 50, devices=4, tokens=24, scaling="strong"),
    ):
        rows.append(each | compared(each, rows))
    assert [r.get("efficiency") for r in rows] == [1, 0.9, 1, 0.875, 0.75]
    assert [r.get("overhead") for r in rows] == [1, 1, 1.2, 1.3, None]
    assert verdicts(rows).splitlines() == [
        "tiny bf16 fsdp=4: efficiency 0.900, met",
        "tiny ufp4 fsdp=4: efficiency 0.875, missed",
        "tiny ufp4 fsdp=4: overhead +0.100, missed",
    ]
    failed = {k: rows[0][k] for k in ("model", "case", "mesh", "scaling", "devices")}
    table([*rows, failed | {"error": "out of memory"}])
    assert "efficiency" not in compared(rows[1], [failed])
