"""Four-over-six codes and scales of Transformer Engine's Python reference.

    python tests/golden/make_four_over_six.py DIR

where DIR holds the unpacked wheel of transformer_engine; versions and layout are those
of make_nvfp4.py. The bound of the tensor scale is 256, the error the mean absolute one,
computed in float32 as the reference does without its fast path.
"""

import argparse
import functools
import pathlib

import inputs
import make_nvfp4
import numpy as np

OPTIONS = {
    "nvfp4_use_4over6": True,
    "nvfp4_e4m3_max": 256,
    "nvfp4_4over6_err_mode": "MAE",
}
TILES = {"1d": (1, 16), "2d": (16, 16)}


def main() -> None:
    """Writes four_over_six_*.npz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path, help="unpacked transformer_engine")
    reference = make_nvfp4.load_reference(parser.parse_args().root)
    quantized = functools.partial(make_nvfp4.quantized, reference, **OPTIONS)

    def save(name: str, x: np.ndarray, dtype: str, tiles: dict) -> None:
        results = {name: quantized(x, dtype, tile) for name, tile in tiles.items()}
        flat = {f"{k}_{part}": v for k, r in results.items() for part, v in r.items()}
        name = f"four_over_six_{name}"
        inputs.save(name, input_sha256=np.array(inputs.checksum(x)), **flat)

    for distribution in inputs.DISTRIBUTIONS:
        for dtype in ("float32", "bfloat16"):
            x = inputs.matrix(distribution, dtype, inputs.SMALL)
            save(f"{distribution}_{dtype}", x, dtype, TILES)
    for name, tile in TILES.items():
        save(f"ladder_{name}", inputs.ladder(tile), "float32", {name: tile})
    save("crowded", inputs.crowded(), "float32", TILES)


if __name__ == "__main__":
    main()
