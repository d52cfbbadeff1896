"""What is saved, what comes back, and what happens where either cannot be."""

import dataclasses
import logging
import os
import shutil
import subprocess

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax.nnx
from fp4jax import recipes, sharding
from fp4jax.train import Checkpoints, make_state, read_config

# The libraries below drop what they were reading when they find damage.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

CONFIG = {"model": {"d_ff": 48, "names": ("a", "b")}, "lr": 0.1}


def new_state(seed=0, *, step=0):
    """A state with every kind of array: a key, held amaxes, counters."""
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(seed))
    fp4jax.nnx.quantize_model(model, recipes.ue5m3(), rngs=nnx.Rngs(seed + 1))
    _, state = make_state(model, optax.adamw(0.1))
    return dataclasses.replace(state, step=jnp.int32(step))


def checkpoints(folder, **options):
    return Checkpoints(folder, **({"config": CONFIG} | options))


def save(folder, *steps, **options):
    with checkpoints(folder, **options) as writer:
        for step in steps:
            assert writer.save(new_state(step, step=step), data={"next": step})
            writer.wait()
        assert not writer.failures


def comparable(state):
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        state,
    )


def test_a_state_comes_back_bit_for_bit_with_its_key_and_the_data(tmp_path):
    save(tmp_path, 5)
    found = checkpoints(tmp_path).restore(new_state(7))
    chex.assert_trees_all_equal(
        comparable(found.state), comparable(new_state(5, step=5))
    )
    assert found.data == {"next": 5}
    assert jax.tree.structure(found.state) == jax.tree.structure(new_state())


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
    with checkpoints(tmp_path / "new") as reader:
        assert reader.restore(new_state()) is None
        assert reader.steps == []


def test_the_last_and_the_multiples_are_kept(tmp_path):
    save(tmp_path, 1, 2, 4, 5, 6, 7, keep_last=2, keep_every=4)
    assert checkpoints(tmp_path).steps == [4, 6, 7]


def test_training_may_go_on_while_it_is_written(tmp_path):
    consume = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
    )
    params = {"kernel": jnp.arange(2.0**22).reshape(2**11, -1)}
    state = dataclasses.replace(new_state(), params=params)
    like = dataclasses.replace(state, params=jax.tree.map(jnp.zeros_like, params))
    with checkpoints(tmp_path) as writer:
        writer.save(state, data={})
        for _ in range(3):
            params = consume(params)
        jax.block_until_ready(params)
        writer.wait()
        found = writer.restore(like).state.params["kernel"]
    np.testing.assert_array_equal(found, np.arange(2.0**22).reshape(2**11, -1))


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    save(tmp_path, 3)
    other = {"model": {"d_ff": 64, "names": ["a", "b"]}, "seed": 1}
    message = r"which has model\.d_ff=48, not 64; lr=0\.1, not null; seed=null, not 1"
    with pytest.raises(ValueError, match=message):
        checkpoints(tmp_path, config=other).restore(new_state())
    assert checkpoints(tmp_path).restore(new_state()) is not None  # it is left alone


def largest_file(folder):
    """Returns a file of arrays: others may be large, but not needed."""
    return max(folder.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, os.remove])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, damage, caplog):
    save(tmp_path, 4, 8)
    damage(largest_file(tmp_path / "8"))
    with checkpoints(tmp_path) as reader, caplog.at_level(logging.ERROR):
        assert int(reader.restore(new_state()).state.step) == 4
        assert reader.steps == [4]
        assert "step 8 cannot be read" in caplog.text
        # Its step may be saved again.
        assert reader.save(new_state(step=8), data={})
        reader.wait()
        assert reader.steps == [4, 8]
    assert (tmp_path / "damaged-8").is_dir()


@pytest.mark.parametrize("part", ["state", "note"])
def test_a_checkpoint_without_a_part_is_damaged(tmp_path, part):
    save(tmp_path, 4, 8)
    shutil.rmtree(tmp_path / "8" / part)
    assert int(checkpoints(tmp_path).restore(new_state()).state.step) == 4


def test_a_note_that_was_changed_is_damaged(tmp_path, caplog):
    save(tmp_path, 4, 8)
    note = tmp_path / "8" / "note" / "metadata"
    text = note.read_text()
    note.write_text(text.replace('"next": 8', '"next": 9'))
    assert note.read_text() != text
    assert checkpoints(tmp_path).restore(new_state()).data == {"next": 4}
    assert "checksum of the note" in caplog.text


def test_what_was_not_finished_is_no_checkpoint(tmp_path):
    save(tmp_path, 4)
    unfinished = tmp_path / "8.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "4", unfinished)
    with checkpoints(tmp_path) as reader:
        assert int(reader.restore(new_state()).state.step) == 4
    assert not unfinished.exists()


def test_checkpoints_of_which_none_can_be_read_stay_and_are_an_error(tmp_path):
    save(tmp_path, 4, 8)
    for step in ("4", "8"):
        truncate(largest_file(tmp_path / step))
    for _ in range(2):  # the next start must not begin anew
        with pytest.raises(ValueError, match="got 2 that are damaged"):
            checkpoints(tmp_path).restore(new_state())
    assert {path.name for path in tmp_path.iterdir()} >= {"4", "8"}


@pytest.mark.parametrize(
    "error", [MemoryError(), PermissionError(), jax.errors.JaxRuntimeError("memory")]
)
def test_an_error_that_is_not_of_the_checkpoint_leaves_it(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    save(tmp_path, 4, 8)
    with checkpoints(tmp_path) as reader:
        with monkeypatch.context() as patch:
            patch.setattr("orbax.checkpoint.CheckpointManager.restore", fail)
            with pytest.raises(type(error)):
                reader.restore(new_state())
        assert int(reader.restore(new_state()).state.step) == 8


def test_a_step_before_the_newest_is_refused_aloud(tmp_path, caplog):
    save(tmp_path, 9)
    with checkpoints(tmp_path) as writer, caplog.at_level(logging.ERROR):
        assert not writer.save(new_state(step=5), data={})
        assert writer.failures == 1
    assert "step 5 comes before the newest, 9" in caplog.text


def test_another_format_is_refused(tmp_path, monkeypatch):
    save(tmp_path, 4)
    monkeypatch.setattr("fp4jax.train.checkpoint._FORMAT", 2)
    with pytest.raises(ValueError, match="format must be 2, got 1"):
        checkpoints(tmp_path).restore(new_state())


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, caplog):
    state = new_state(step=2)
    kernel = state.params["kernel"][...].at[3, 4].set(jnp.inf)
    state.params["kernel"].set_value(kernel)
    save(tmp_path, 1)
    with checkpoints(tmp_path) as writer, caplog.at_level(logging.ERROR):
        assert not writer.save(state, data={})
        assert writer.failures == 1
        assert writer.steps == [1]
    assert "not finite in params.kernel" in caplog.text


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_checkpoint_before_stays(small_disk, caplog):
    noise = jax.random.normal(jax.random.key(0), (600, 600))
    large = dataclasses.replace(new_state(step=2), params={"kernel": noise})
    save(small_disk, 1)
    with checkpoints(small_disk) as writer, caplog.at_level(logging.ERROR):
        writer.save(large, data={})
        writer.wait()
        assert writer.failures == 1
        assert "A checkpoint is not written" in caplog.text
        assert writer.steps == [1]
        # There is room for another small one.
        assert writer.save(new_state(step=3), data={})
        writer.wait()
        assert writer.failures == 1
        assert int(writer.restore(new_state()).state.step) == 3


def test_a_folder_that_may_only_be_read_is_reported(small_disk, caplog):
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with checkpoints(small_disk) as writer, caplog.at_level(logging.ERROR):
        writer.save(new_state(step=2), data={})
        writer.wait()
        assert writer.failures == 1
    assert "Read-only file system" in caplog.text
    with checkpoints(small_disk) as reader:
        assert int(reader.restore(new_state()).state.step) == 1


def test_a_folder_that_cannot_be_made_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with checkpoints(tmp_path / "file" / "run") as writer:
        with caplog.at_level(logging.ERROR):
            assert not writer.save(new_state(), data={})
            assert writer.failures == 1
    assert "NotADirectoryError" in caplog.text


@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_a_count_that_is_not_positive_raises(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got {name}=0"):
        checkpoints(tmp_path, **{name: 0})


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (2, 4)])
def test_a_state_goes_on_upon_another_number_of_devices(tmp_path, before, after):
    def put(state, size):
        whole = NamedSharding(sharding.make_mesh(data=size), P())
        return jax.device_put(state, whole)

    with checkpoints(tmp_path) as writer:
        writer.save(put(new_state(step=6), before), data={})
    found = checkpoints(tmp_path).restore(put(new_state(1), after)).state
    chex.assert_trees_all_equal(comparable(found), comparable(new_state(step=6)))
    assert len(found.params["kernel"].get_value().sharding.device_set) == after


def tree(folder):
    return {p.relative_to(folder): p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_a_reader_chooses_a_step_by_what_is_noted_and_changes_nothing(tmp_path):
    save(tmp_path, 5, 8)
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()  # another process writes
    before = tree(tmp_path)
    config = read_config(tmp_path)
    assert config == read_config(tmp_path, step=5)
    assert config == {"model": {"d_ff": 48, "names": ["a", "b"]}, "lr": 0.1}
    with checkpoints(tmp_path, config=config, read_only=True) as reader:
        assert int(reader.restore(new_state()).state.step) == 8
        assert int(reader.restore(new_state(), step=5).state.step) == 5
        with pytest.raises(ValueError, match="must be one of 5, 8 in .*got step=6"):
            reader.restore(new_state(), step=6)
        with pytest.raises(ValueError, match="got read_only=True"):
            reader.save(new_state(step=11), data={})
    assert tree(tmp_path) == before


def test_a_reader_leaves_out_what_is_damaged(tmp_path, caplog):
    save(tmp_path, 5, 8)
    truncate(largest_file(tmp_path / "8"))
    before = tree(tmp_path)
    with checkpoints(tmp_path, read_only=True) as reader:
        assert int(reader.restore(new_state()).state.step) == 5
        assert "step 8 cannot be read" in caplog.text
        with pytest.raises(ValueError, match="got 1 that are damaged"):
            reader.restore(new_state(), step=8)
    assert tree(tmp_path) == before
    shutil.rmtree(tmp_path / "8" / "note")
    assert read_config(tmp_path)["lr"] == 0.1
    assert "note of step 8 cannot be read" in caplog.text


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_folder_without_checkpoints_has_no_config(tmp_path, folder):
    with pytest.raises(ValueError, match="must hold a checkpoint .* got none in"):
        read_config(tmp_path / folder)
    assert not any(tmp_path.iterdir())
