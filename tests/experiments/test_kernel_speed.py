"""The table of speeds, and its file."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from experiments.kernels import chosen, grouped, linear, packed, quantize, show, timing
from fp4jax.kernels import partition
from fp4jax.kernels.choice import Kernels
from fp4jax.kernels.exchange import DENSE
from fp4jax.kernels.quantize import XLA
from fp4jax.ops.grouped_matmul import RAGGED, SCAN


def test_writes_rows_versions_and_device(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    monkeypatch.setattr(quantize, "CASES", quantize.CASES[:1])
    out = tmp_path / "speed.jsonl"
    quantize.main(((32, 64),), implementations=("xla",), out=out)
    row = json.loads(out.read_text())
    assert row["bytes"] == 2 * 2 * 32 * 64
    assert row["ratio_to_copy"] == row["microseconds"] / row["copy_microseconds"]
    assert row["ratio_to_xla"] == 1 and row["microseconds"] <= row["again_microseconds"]
    assert row["device"]["platform"] == "cpu" and "jax" in row["versions"]
    assert "UNIFORM rows, RHT16" in capsys.readouterr().out


def test_bytes_of_both_axes_are_of_one_read(monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    case = next(case for case in quantize.CASES if "one read" in case.name)
    row = quantize.measure(case, (32, 64), "xla")
    assert row["bytes"] == 3 * 2 * 32 * 64


def test_a_kernel_that_cannot_run_here_says_why(capsys):
    only = quantize.CASES[0].name
    assert quantize.main(((256, 256),), implementations=("mosaic",), only=only) == 0
    assert "implementation='mosaic' cannot do this" in capsys.readouterr().out


def test_a_case_that_there_is_not_is_an_error(capsys):
    assert quantize.main(only="nope") == 2
    assert "E2M1 rows, RHT16; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "main, argv",
    [
        (quantize.main, ["--shapes", "12xx3"]),
        (linear.main, ["--shapes", "0x64x64"]),
        (linear.main, ["--names", "nope"]),
        (packed.main, ["--names", "bf16"]),
        (grouped.main, ["--shape", "2x256x128"]),
        (show.main, ["/nowhere/steps.jsonl"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(main, argv, capsys):
    with pytest.raises(SystemExit) as ended:
        tyro.cli(main, args=argv)
    assert ended.value.code == 2
    assert argv[-1] in capsys.readouterr().err


def test_a_linear_layer_is_timed_over_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    out = tmp_path / "linear.jsonl"
    linear.main(((32, 32, 32),), names=("bf16", "mxfp4, FP8"), out=out)
    bf16, mxfp4 = map(json.loads, out.read_text().splitlines())
    assert bf16["ratio"] == 1
    expected = min(mxfp4["milliseconds"]) / min(bf16["milliseconds"])
    assert abs(mxfp4["ratio"] / expected - 1) < 1e-6


def test_products_of_what_is_packed_are_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packed, "measurements", lambda *_, count: [2e-6] * count)
    dw, _ = found = packed.products(packed.RECIPES["mxfp4"](), 64, 32, 96)
    assert [product.name for product in found] == ["dw", "dx"]
    assert "got" in dw.why_not(packed.MOSAIC)
    monkeypatch.setattr(packed, "products", lambda *_: (dw,))
    monkeypatch.setattr(packed, "MOSAIC", packed.XLA)
    out = tmp_path / "packed.jsonl"
    packed.main(((64, 32, 96),), names=("mxfp4",), out=out)
    row = json.loads(out.read_text())
    assert row["mosaic"] == row["xla"] == row["decoded"] == [2e-6, 2e-6]
    assert row["difference"] == 0 and row["product"] == "dw"
    assert "1.000" in capsys.readouterr().out


def test_a_layer_without_bf16_has_no_ratio(tmp_path, monkeypatch):
    monkeypatch.setattr(
        linear, "measurements", lambda *_, count, options: [0.1] * count
    )
    out = tmp_path / "linear.jsonl"
    linear.main(((32, 32, 32),), names=("ti2d", "bf16", "ufp4"), out=out)
    rows = map(json.loads, out.read_text().splitlines())
    assert [row.get("ratio") for row in rows] == [None, 1, 1]


def test_uneven_groups_have_all_rows_and_one_has_none():
    sizes = grouped.group_sizes(8, 1000, seed=0)
    assert sizes.sum() == 1000 and sizes[-1] == 0
    assert sizes[:-1].min() > 0 and len(set(sizes.tolist())) > 5


def test_the_yardstick_multiplies_equal_groups():
    x, w, *_ = grouped.operands(4, 32, 16, 8, seed=0)
    expected = np.concatenate(
        [x[8 * i : 8 * i + 8].astype(jnp.float32) @ w[i] for i in range(4)]
    )
    np.testing.assert_allclose(grouped.einsum(x, w), expected, atol=0.05)


def test_grouped_products_are_timed_over_an_einsum(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-6)
    monkeypatch.setattr(partition, "is_whole", lambda mesh: True)
    out = tmp_path / "grouped.jsonl"
    names = ("lax.ragged_dot", "bf16, hopper")
    assert grouped.main((2, 256, 128, 128), names=names, out=out) == 0
    einsum, plain, hopper = map(json.loads, out.read_text().splitlines())
    assert einsum["rate_over_einsum"] == 1 and plain["rate_over_einsum"] > 0
    assert "error" in hopper  # those kernels do not run on a CPU
    assert "lax.ragged_dot" in capsys.readouterr().out


def test_without_a_yardstick_there_is_no_rate(capsys, monkeypatch):
    def prepare(task):
        failed = {"error": "out of memory"}
        return lambda: failed if task[1] == "einsum" else {"milliseconds": [2.0, 1.0]}

    monkeypatch.setattr(grouped, "prepare", prepare)
    einsum, bf16 = grouped.rows((2, 8, 8, 8), ["bf16"])
    assert einsum["error"] == "out of memory"
    assert bf16["teraflops"] > 0 and "rate_over_einsum" not in bf16
    assert grouped.main((2, 8, 8, 8), names=("bf16",)) == 0
    assert "out of memory" in capsys.readouterr().out


def test_names_choose_kernels():
    assert chosen.choice() == Kernels()
    assert chosen.choice(grouped="scan") == Kernels(products=SCAN)
    found = chosen.choice(
        grouped="ragged", quantize="xla", packed="mosaic", exchange="dense"
    )
    assert found == Kernels(
        quantize=XLA, products=RAGGED, scaled_matmul=packed.MOSAIC, exchange=DENSE
    )
