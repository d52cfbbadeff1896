"""Whole steps that are timed: what trains, what a row tells, what goes wrong."""

import dataclasses
import json
import types
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments import presets
from experiments.kernels import cases, programs, show, step
from fp4jax import policies, recipes
from fp4jax.models import Transformer

SMALL = (
    "model.num_layers=1",
    "model.d_model=32",
    "model.num_heads=1",
    "model.head_dim=32",
    "model.d_ff=32",
)


def config(*assignments):
    return presets.resolve("tiny", policy_names=["bf16"], assignments=assignments)


def test_a_policy_takes_changes_of_its_recipes():
    fp8 = cases.policy_of("ti2d+fp8", config())
    assert {r.recipe.compute for r in fp8.rules} | {fp8.default.compute} == {"fp8"}
    packed = cases.policy_of("nvfp4+packed", config())
    assert packed.default.residuals == "packed"
    assert {rule.recipe for rule in packed.rules} == {recipes.bf16()}
    both = cases.policy_of("ti2d+fp8+packed", config())
    assert (both.default.compute, both.default.residuals) == ("fp8", "packed")


def test_experts_have_no_products_in_fp8():
    shape = presets.resolve("moe_tiny", policy_names=["bf16"])
    policy = cases.policy_of("ti2d+fp8", shape)
    policy.check(shape.model.layer_paths)
    compute = {
        path: policy.recipe(f"blocks/1/{path}").compute
        for path in ("moe/up", "moe/down", "moe/shared/up", "attention/value")
    }
    assert list(compute.values()) == ["bf16", "bf16", "fp8", "fp8"]


@pytest.mark.parametrize("name", ["fp8", "ufp4+fast", "qwix+packed", ""])
def test_an_unknown_case_is_named(name):
    with pytest.raises(ValueError, match=f"or not, got '{name}'".replace("+", r"\+")):
        cases.policy_of(name, config())


@pytest.mark.parametrize("documents", ["0", "65"])
def test_a_row_has_a_document_and_documents_have_tokens(documents, capsys):
    assert step.main(["--tiny", "--names", "bf16", "--documents", documents]) == 2
    expected = f"from 1 to the tokens of a row, 64, got {documents}"
    assert expected in capsys.readouterr().err


def test_small_sizes_are_of_what_was_not_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(step, "run", lambda arguments: asked.append(arguments) or [])
    assert step.main(["--tiny", "--batch", "8", "--names", "ufp4"]) == 0
    (found,) = asked
    assert (found.model, found.batch, found.sequence) == ("tiny", 8, 64)
    assert found.names == ("ufp4",)


def test_every_case_that_is_measured_by_default_exists():
    names = list(cases.known())
    assert names[0] == "bf16" and cases.QWIX in names
    for name in names[:-1]:
        cases.policy_of(name, config())


def test_rows_tell_time_memory_and_setting(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(programs, "_BLOCK_SECONDS", 1e-6)
    out = tmp_path / "steps.jsonl"
    sets = [word for text in SMALL for word in ("--set", text)]
    size = ["--batch", "2", "--sequence", "32", "--out", str(out)]
    assert step.main(["--model", "tiny", "--names", "bf16", *sets, *size]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["case"] == "bf16" and row["ratio"] == 1
    best = min(row["milliseconds"])
    assert row["tokens_per_second"] == pytest.approx(1e3 * 2 * 32 / best)
    assert row["utilization"] is None  # of a CPU
    # Parameters and two moments at least.
    assert row["program_bytes"] > 3 * 4 * 32 * (3 * 32 + 2 * 32)
    assert row["nonzero_gradients"] > 0.9 and row["loss"] < row["first_loss"]
    assert "jax" in row["versions"] and row["device"]["platform"] == "cpu"
    assert "bf16" in capsys.readouterr().out


def test_what_cannot_be_compiled_is_a_row_and_a_status(capsys, monkeypatch):
    def fail():
        raise NotImplementedError("no such kernel\nat all")

    broken = types.SimpleNamespace(compile=fail)
    lowered = programs.Lowered(broken, broken, False)
    monkeypatch.setattr(programs, "lower", lambda *a, **k: lowered)
    small = [word for text in SMALL for word in ("--set", text)]
    assert step.main(["--tiny", "--names", "bf16", *small]) == 1
    assert "no such kernel" in capsys.readouterr().out


def test_nothing_is_compared_with_a_first_case_that_failed(capsys, monkeypatch):
    def prepare(task):
        speed = {"tokens_per_second": 1.0, "utilization": None, "device_bytes": None}
        train = {"program_bytes": 1, "nonzero_gradients": 1.0, "loss": 1.0}
        row = {"milliseconds": [2.0, 1.0], **speed, **train}
        return lambda: {"error": "out of memory"} if task[1] == "bf16" else row

    monkeypatch.setattr(step, "prepare", prepare)
    names = ("bf16", "ufp4", "nvfp4")
    arguments = step.Arguments(model="tiny", names=names)
    rows = list(step.run(arguments))
    assert "milliseconds" in rows[1] and not any("ratio" in row for row in rows)
    step.table(rows)
    assert show.markdown(rows).count("| 1.0 |") == 2
    rows = list(step.run(dataclasses.replace(arguments, names=names[1:])))
    assert [row["ratio"] for row in rows] == [1, 1]


def test_an_unknown_name_is_one_sentence(capsys):
    assert step.main(["--tiny", "--names", "fp3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: policy: must be") and error.count("\n") == 1


@pytest.mark.parametrize("documents", [1, 3])
def test_batches_tell_documents_apart_where_there_are_several(documents):
    shape = config("data.batch_size=2", "data.sequence_length=8")
    first, second = programs.batches(shape, documents=documents)
    assert (first["inputs"] != second["inputs"]).any()
    np.testing.assert_array_equal(first["inputs"][:, 1:], first["targets"][:, :-1])
    assert ("segment_ids" in first) == (documents > 1)
    if documents > 1:
        assert first["segment_ids"][0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
        assert first["positions"][1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_gradients_are_counted_where_they_are_not_zero():
    moments = nnx.State(
        {
            "kernel": nnx.Param(jnp.array([[1.0, 0.0], [0.0, 0.0]])),
            "bias": nnx.Param(jnp.ones(2)),
        }
    )
    adam = optax.ScaleByAdamState(count=jnp.int32(1), mu=moments, nu=moments)
    state = types.SimpleNamespace(opt_state=(adam, optax.EmptyState()))
    assert programs.nonzero_gradients(state) == 0.25


def test_a_library_that_is_not_there_is_one_sentence(capsys, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert step.main(["--tiny", "--names", "qwix"]) == 2
    assert "qwix must be installed" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwix_quantizes_the_layers_that_nvfp4_does():
    pytest.importorskip("qwix")
    shape = config(*SMALL, "model.num_layers=2", "data.batch_size=1")
    case = cases.find(cases.QWIX, shape)
    assert case.about["rule"]["weight_qtype"] == "nvfp4"
    plain = Transformer(shape.model, policies.bf16(shape.model), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (1, 32), 0, 512)

    def loss(model):
        return -jnp.mean(jax.nn.log_softmax(model.forward(tokens).logits)[..., 0])

    with case.tracing():
        found, grads = nnx.jit(nnx.value_and_grad(loss))(case.make_model())
    assert 1e-3 < abs(found - nnx.jit(loss)(plain)) < 1
    for stack in grads["stacks"].values():  # the quantized block, and the last
        assert (stack["mlp"]["up"]["kernel"].get_value() != 0).mean() > 0.9
