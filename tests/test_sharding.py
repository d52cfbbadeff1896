"""Meshes: how they are written, and what lies where on them."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp4jax import sharding


def test_rows_are_spread():
    mesh = sharding.make_mesh(data=4)
    batch = sharding.shard_rows({"inputs": np.arange(16).reshape(8, 2)}, mesh)
    assert batch["inputs"].sharding.spec == sharding.spec("batch")
    assert [s.data.shape for s in batch["inputs"].addressable_shards] == [(2, 2)] * 4


@pytest.mark.parametrize("size", [0, 9])
def test_a_mesh_of_too_many_devices_raises(size):
    message = (
        f"positive and at most the number of devices, 8, got {size} .data={size}.. "
        f"Change data.{' A CPU is' if size else '$'}"
    )
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(data=size)


def test_rows_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="devices, 4, got rows=6"):
        sharding.shard_rows({"inputs": np.ones((6, 2))}, sharding.make_mesh(data=4))


def mesh_of_processes(per_process, **sizes):
    """What `process_rows` reads of a mesh whose devices belong to several processes."""
    shape = {axis: sizes.get(axis, 1) for axis in sharding.AXES}
    devices = [
        types.SimpleNamespace(process_index=i // per_process)
        for i in range(math.prod(shape.values()))
    ]
    array = np.array(devices).reshape(tuple(shape.values()))
    return types.SimpleNamespace(devices=array, shape=shape)


@pytest.mark.parametrize(
    ("per_process", "sizes", "expected"),
    [
        (1, {"data": 2, "fsdp": 2}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (2, {"fsdp": 2, "expert": 2}, [(0, 2), (1, 2)]),
        (1, {"fsdp": 2, "tensor": 2}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (2, {"fsdp": 2, "tensor": 4}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
    ids=str,
)
def test_each_process_places_its_rows(per_process, sizes, expected, monkeypatch):
    mesh, found = mesh_of_processes(per_process, **sizes), []
    for process in range(len(expected)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        found.append(sharding.process_rows(mesh))
    assert found == expected


def test_rows_that_overlap_in_part_raise(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"process 1 has the rows \[1, 2\]"):
        sharding.process_rows(mesh_of_processes(4, data=4, tensor=3))


@pytest.mark.parametrize(
    "text", ["rows=2", "data", "data=0", "data=-1", "data=2,data=2", "", "data=x"]
)
def test_a_mesh_that_does_not_read_so_raises(text):
    with pytest.raises(ValueError, match=f"mesh must read AXIS=N,.* got {text!r}"):
        sharding.parse_mesh(text)


def test_parameters_meet_rows_in_other_axes_than_they_are_stored_in():
    rows = ("data", "fsdp", "expert")
    assert sharding.spec("batch", None, "embed") == P(rows, None, None)
    kernel = sharding.spec("expert", "embed", None)
    assert kernel == P(("expert", "tensor"), "fsdp", None)
    assert sharding.used("embed", "mlp") == P(None, "tensor")


def test_outside_of_a_mesh_of_ours_nothing_is_constrained():
    x = jnp.ones((2, 4))
    assert sharding.constrain(x, "batch", "mlp") is x
    other = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(other):
        assert sharding.constrain(x, "batch", "mlp") is x
