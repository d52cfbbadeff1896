"""MXFP4 and MXFP8 codes and scales of torchao.

    python tests/golden/make_mx.py

The files that are kept were made with torchao 0.18.0, torch 2.13.0 on a CPU,
numpy 2.4.6 and ml_dtypes 0.6.0. Blocks are 1x32. Codes of E2M1 are packed, the even
column in the low half of a byte; those of E4M3 and E5M2 are their bytes, and scales are
the bytes of E8M0.
"""

import inputs
import numpy as np
import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

ELEMENTS = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
RULES = {
    "floor": ScaleCalculationMode.FLOOR,
    "truncation_free": ScaleCalculationMode.RCEIL,
    "even": ScaleCalculationMode.EVEN,
}


def quantized(x: torch.Tensor, element: str, rule: str) -> dict:
    """Codes and scale bytes."""
    result = MXTensor.to_mx(x, ELEMENTS[element], 32, RULES[rule])
    as_bytes = lambda a: a.view(torch.uint8).numpy()
    return {"codes": as_bytes(result.qdata), "scales": as_bytes(result.scale)}


def main() -> None:
    """Writes mx_*.npz."""
    shape = inputs.SMALL
    matrices = {
        "normal_float32": inputs.matrix("normal", "float32", shape),
        "heavy_bfloat16": inputs.matrix("heavy", "bfloat16", shape),
        "ladder": inputs.ladder((1, 32)),
    }
    for name, x in matrices.items():
        dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
        flat = {
            f"{element}_{rule}_{part}": value
            for element in ELEMENTS
            for rule in RULES
            for part, value in quantized(
                torch.from_numpy(x).to(dtype), element, rule
            ).items()
        }
        checksum = np.array(inputs.checksum(x))
        inputs.save(f"mx_{name}", input_sha256=checksum, **flat)


if __name__ == "__main__":
    main()
