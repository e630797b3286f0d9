"""Whether products in half precision are worth having where a model runs."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch


def multiplies_halves(device: str | torch.device = "cpu") -> bool:
    """Whether products in bfloat16 are about as fast as in float32, or faster, on this device.

    On an x86 processor without AVX-512 torch has no library for them: they take 5 to 80 times as long.
    """
    if torch.device(device).type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def say_if_slow(dtype: torch.dtype, device: str | torch.device, say: Callable[[str], None]) -> None:
    """Say what to do where products in a model's dtype are slow on this device."""
    if dtype in (torch.bfloat16, torch.float16) and not multiplies_halves(device):
        name = str(dtype).removeprefix("torch.")
        say(
            f"this processor has no instructions for {name}, and takes 5 to 80 times as long as for float32: "
            "--dtype float32 reads the same weights, in twice the memory"
        )
