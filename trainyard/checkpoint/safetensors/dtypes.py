"""What torch calls the types that files hold."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names in safetensors headers."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
