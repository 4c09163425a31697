"""What devices can do at most, for model FLOPs utilisation (MFU). Standard library only."""

from __future__ import annotations

CONVENTION = "share of the dense bf16 peak of the datasheet"
"""One line for whoever prints an MFU; the operations are those of `trainyard.models.gpt.flops`."""

PEAK_TFLOPS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("RTX 6000 Ada", 364.2),
    ("V100", 125.0),
    ("MI355X", 2516.6),
    ("MI350X", 2300.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)
"""(part of the device's name, dense bf16 TFLOP/s, fp16 where it has no bf16); the first that
matches counts."""


def peak_tflops(device_name: str) -> float | None:
    """Dense 16-bit peak of a device; None for a CPU or one that is not in the table."""
    words = device_name.lower().replace("-", " ")
    for part, tflops in PEAK_TFLOPS:
        if f" {part.lower()} " in f" {words} ":
            return tflops
    return None
