"""Accelerators as their makers describe them.

Bandwidth and FP16 rates are the vendors' peaks, dense, with sums in FP32; links are the sum of both
directions. Memory is what the driver reports, rounded down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.runtime.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """One card.

    Attributes:
        memory_gib: as the driver reports it.
        bandwidth_gb_s: of its memory, 1e9 bytes.
        fp16_tflops: of matrix products.
        link_gb_s: to its peers, both directions; of the bus where there is no NVLink.
        source: of these figures.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    fp16_tflops: float
    link_gb_s: float
    source: str


_AMPERE = "NVIDIA A100 datasheet, 2021"
_HOPPER = "NVIDIA H100 datasheet, 2023"
DEVICES = (
    Device("A100-40GB", 39.4, 1555, 312, 600, _AMPERE),
    Device("A100-80GB", 79.2, 2039, 312, 600, _AMPERE),
    Device("H100-80GB", 79.6, 3350, 989, 900, _HOPPER),
    Device("H200-141GB", 139.8, 4800, 989, 900, "NVIDIA H200 datasheet, 2024"),
    Device("L40S-48GB", 44.9, 864, 362, 64, "NVIDIA L40S datasheet, 2023"),
    Device("L4-24GB", 22.5, 300, 121, 64, "NVIDIA L4 datasheet, 2023"),
    Device("A10-24GB", 22.5, 600, 125, 64, "NVIDIA A10 datasheet, 2021"),
    Device("T4-16GB", 14.6, 320, 65, 32, "NVIDIA T4 datasheet, 2019"),
    Device("RTX3090-24GB", 23.7, 936, 71, 64, "NVIDIA Ampere GA102 whitepaper, 2021"),
    Device("RTX4090-24GB", 23.5, 1008, 165, 64, "NVIDIA Ada whitepaper, 2022"),
    Device("RTX5090-32GB", 31.4, 1792, 209, 128, "NVIDIA RTX Blackwell whitepaper, 2025"),
)


def parse_devices(text: str) -> tuple[int, Device]:
    """`4xA100-80GB`, `RTX4090`: how many of which.

    Raises:
        ConfigError: no such device, or a name that fits several.
    """
    match = re.fullmatch(r"\s*(?:([1-9]\d{0,2})\s*[xX*]\s*)?(\S.*?)\s*", text)
    if match is not None:
        wanted = _plain(match[2])
        found = [d for d in DEVICES if _plain(d.name).startswith(wanted)]
        exact = [d for d in found if wanted in (_plain(d.name), _plain(d.name.split("-")[0]))]
        if len(exact or found) == 1:
            return int(match[1] or 1), (exact or found)[0]
    names = ", ".join(device.name for device in DEVICES)
    raise ConfigError("devices", text, f"a number and one of {names}, such as 4xA100-80GB")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
