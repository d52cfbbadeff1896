"""NVFP4 codes and scales of Transformer Engine's Python reference.

    python tests/golden/make_nvfp4.py DIR

where DIR holds the unpacked wheel of transformer_engine. The files that are kept were
made with transformer_engine 2.20.2 (two files of it), torch 2.13.0 on a CPU,
numpy 2.4.6 and ml_dtypes 0.6.0. Codes are packed as the reference does, the even column
in the low half of a byte; scales are the bytes of E4M3.
"""

import argparse
import enum
import importlib.util
import pathlib
import sys
import types

import inputs
import numpy as np
import torch

PYTORCH = "transformer_engine.pytorch"
RECIPES = f"{PYTORCH}.custom_recipes"


def load_reference(root: pathlib.Path) -> types.ModuleType:
    """The module reference_nvfp4, the compiled parts that it imports replaced."""
    package = root / "transformer_engine"

    def stub(name: str, path: pathlib.Path | None = None) -> types.ModuleType:
        module = sys.modules[name] = types.ModuleType(name)
        if path is not None:
            module.__path__ = [str(path)]
        return module

    class Quantizer:
        def __init__(self, *, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    stub("transformer_engine", package)
    stub(PYTORCH, package / "pytorch")
    recipes = stub(RECIPES, package / "pytorch" / "custom_recipes")
    tensor = stub(f"{PYTORCH}.quantized_tensor")
    tensor.QuantizedTensorStorage, tensor.Quantizer = object, Quantizer
    recipes.gemm = stub(f"{RECIPES}.gemm")
    recipes.gemm.MMParams = object
    recipes.gemm.GEMMType = enum.Enum("GEMMType", "FPROP DGRAD WGRAD")

    for name in ("reference_utils", "reference_nvfp4"):
        path = package / "pytorch" / "custom_recipes" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{RECIPES}.{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        setattr(recipes, name, module)
    return recipes.reference_nvfp4


def quantized(
    reference, x: np.ndarray, dtype: str, tile, rotated=False, **options
) -> dict:
    """Packed codes, scale bytes (one row for each row of tiles) and tensor amax."""
    tensor = torch.from_numpy(x).to(getattr(torch, dtype))
    quantizer = reference.NVFP4QuantizerRef(
        dtype=reference.reference_utils.Fp4Formats.E2M1,
        rowwise=not rotated,
        columnwise=rotated,
        quant_tile_shape=tile,
        with_rht=rotated,
        **options,
    )
    if rotated:  # The reference rotates the transposed tensor only.
        result = quantizer.quantize(tensor.t().contiguous())
        codes, scales = result.data_t, result.scale_t
        amax = result.global_amax_col
    else:
        result = quantizer.quantize(tensor)
        codes, scales, amax = result.data, result.scale, result.global_amax_row
    scales = scales.view(torch.uint8).numpy()
    one_a_tile = scales[:: tile[0]]
    assert np.array_equal(np.repeat(one_a_tile, tile[0], 0), scales)
    return {"codes": codes.numpy(), "scales": one_a_tile, "amax": amax.numpy()}


def main() -> None:
    """Writes nvfp4_*.npz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path, help="unpacked transformer_engine")
    reference = load_reference(parser.parse_args().root)
    tiles = {"1d": (1, 16), "2d": (16, 16)}

    def save(name: str, checksum: str, results: dict) -> None:
        flat = {f"{k}_{part}": v for k, r in results.items() for part, v in r.items()}
        inputs.save(name, input_sha256=np.array(checksum), **flat)

    for distribution in inputs.DISTRIBUTIONS:
        for dtype in ("float32", "bfloat16"):
            x = inputs.matrix(distribution, dtype)
            save(
                f"nvfp4_{distribution}_{dtype}",
                inputs.checksum(x),
                {k: quantized(reference, x, dtype, t) for k, t in tiles.items()},
            )
    for name, tile in tiles.items():
        x = inputs.ladder(tile)
        save(
            f"nvfp4_ladder_{name}",
            inputs.checksum(x),
            {
                f"exp{e}": quantized(reference, np.ldexp(x, e), "float32", tile)
                for e in inputs.LADDER_EXPONENTS
            },
        )
    x = np.stack([inputs.ties(amax) for amax in inputs.TIE_AMAXES])
    results = [quantized(reference, matrix, "float32", (1, 16)) for matrix in x]
    save("nvfp4_ties", inputs.checksum(x), {f"{i}": r for i, r in enumerate(results)})
    x = inputs.lattice()
    rotated = quantized(reference, x, "float32", (1, 16), rotated=True)
    save("nvfp4_rotated", inputs.checksum(x), {"rht": rotated})


if __name__ == "__main__":
    main()
