"""Number formats and checkpoint files for the oracle: stored dtypes, and the fake quantisers of section 4.

Written from spec/model.md sections 3 and 4 in numpy, sharing no code with `deepinfer`.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray

# ---------------------------------------------------------------- number formats (section 4)


def _e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(256)])
E2M1_VALUES = np.array([s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


def decode_e8m0(codes: Array) -> Array:
    return 2.0 ** (codes.astype(np.float64) - 127)


def decode_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def unpack_e2m1(packed: Array) -> Array:
    """uint8 [N, K/2] -> values [N, K]; the even column is the low nibble."""
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2], values[:, 1::2] = E2M1_VALUES[packed & 15], E2M1_VALUES[packed >> 4]
    return values


def dequantise(values: Array, scale_codes: Array) -> Array:
    """Multiply every block of `values` [N, K] by its E8M0 scale; the two shapes give the block shape."""
    for axis in (0, 1):
        scale_codes = scale_codes.repeat(values.shape[axis] // scale_codes.shape[axis], axis=axis)
    return values * decode_e8m0(scale_codes)


def _round_to_grid(x: Array, mantissa_bits: int, least_exponent: int, largest: float) -> Array:
    """Nearest even value of a small float format, saturating. frexp: |x| = m * 2^e with m in [0.5, 1)."""
    exponent = np.maximum(np.frexp(x)[1] - 1, least_exponent)
    step = 2.0 ** (exponent - mantissa_bits)
    return np.clip(np.rint(x / step) * step, -largest, largest)


def round_e4m3(x: Array) -> Array:
    return _round_to_grid(x, 3, -6, 448.0)


def round_e2m1(x: Array) -> Array:
    return _round_to_grid(x, 1, 0, 6.0)


def round_bf16(x: Array) -> Array:
    """Nearest even BF16 of the FP32 value, as a float64 array."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return decode_bf16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def pow2ceil(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)
    return 2.0 ** np.where(mantissa == 0.5, exponent - 1, exponent)


def _amax_of_groups(x: Array, size: int) -> tuple[Array, Array]:
    groups = x.reshape(*x.shape[:-1], -1, size)
    return groups, np.abs(groups).max(-1, keepdims=True)


def fake_fp8(x: Array) -> Array:
    """Activations and window KV: e4m3, power-of-two scale per 32."""
    groups, amax = _amax_of_groups(x, 32)
    scale = pow2ceil(np.maximum(amax, 1e-4) / 448)
    return (round_e4m3(groups / scale) * scale).reshape(x.shape)


def fake_fp4_index(x: Array) -> Array:
    """Index queries and keys: e2m1, power-of-two scale per 32."""
    groups, amax = _amax_of_groups(x, 32)
    scale = pow2ceil(np.maximum(amax, 6 * 2.0**-126) / 6)
    return (round_e2m1(groups / scale) * scale).reshape(x.shape)


def fake_fp4_latent(x: Array) -> Array:
    """Compressed KV: e2m1 with an e4m3 scale per 16."""
    groups, amax = _amax_of_groups(x, 16)
    scale = np.clip(round_e4m3(np.maximum(amax, 6 * 2.0**-9) / 6), 2.0**-9, 448.0)
    return (round_e2m1(groups / scale) * scale).reshape(x.shape)


# ---------------------------------------------------------------- checkpoint files (section 3)


_STORED = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_STORED["BOOL"] = "?"  # FP8, FP4 and E8M0 stay bytes


def read_safetensors(path: Path) -> dict[str, Array]:
    """Tensors of one file in the oracle's form: FP8, FP4 and E8M0 as uint8 codes, BF16 as float64."""
    data = Path(path).read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + header_size]).items():
        if name == "__metadata__":
            continue
        start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[start:stop], _STORED.get(entry["dtype"], "u1")).reshape(entry["shape"])
        tensors[name] = decode_bf16(array) if entry["dtype"] == "BF16" else array
    return tensors


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(config, weights) of a checkpoint folder."""
    folder, weights = Path(folder), {}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in sorted(set(index["weight_map"].values())):
        weights.update(read_safetensors(folder / shard))
    return json.loads((folder / "config.json").read_text()), weights
