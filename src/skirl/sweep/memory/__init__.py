"""Memory of many models: a step of all variants is captured, simulated, planned under a limit, and run as planned."""

from typing import TYPE_CHECKING

import torch

from skirl.tools.machine import free_bytes
from skirl.tools.units import parse_bytes

if TYPE_CHECKING:
    from skirl.sweep.memory.orchestrate import Memory

RATE = 32e9
"""Bytes a second to the host and back: PCIe 4."""


def planned(limit: str, device: torch.device) -> "Memory":
    """Return what trains variants in steps that hold at most `limit`: a size, or auto, what is free now."""
    try:
        from skirl.sweep.memory.execute import DeviceLink, EmulatedLink
        from skirl.sweep.memory.orchestrate import Memory
    except ImportError as error:  # of another torch
        raise ValueError(str(error)) from error

    link = (DeviceLink if device.type == "cuda" else EmulatedLink)(RATE)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    return Memory(free if limit == "auto" else parse_bytes(limit), link)
