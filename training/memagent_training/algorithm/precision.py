"""Which arithmetic a device is made for."""

from __future__ import annotations

import torch


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether bfloat16 is taken to be no slower than float32.

    Of processors those with AVX-512 or SVE, for which oneDNN has kernels. On one with AVX2 alone a product took 45
    times as long as in float32; the others were not compared.
    """
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
