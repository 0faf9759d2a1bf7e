"""The link between GPUs: what an all-reduce or all-gather over it takes."""

from __future__ import annotations

from dataclasses import dataclass

from vsim.models.hardware import Gpu


@dataclass(frozen=True, slots=True)
class Link:
    """Ring collectives between `ranks` GPUs: a fixed latency, then the bytes that cross one link one way."""

    ranks: int
    latency_s: float
    bytes_per_s: float

    def all_reduce_s(self, num_bytes: float) -> float:
        """All-reduce of a tensor of `num_bytes`: each rank sends 2 (ranks - 1) / ranks of it."""
        sent = num_bytes * 2 * (self.ranks - 1) / self.ranks
        return self.latency_s + sent / self.bytes_per_s

    def all_gather_s(self, local_bytes: float) -> float:
        """All-gather (or the reduce-scatter that undoes it) of `local_bytes` from each rank."""
        return self.latency_s + local_bytes * (self.ranks - 1) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkFigures:
    latency_s: float
    bytes_per_s: float
    source: str
    measured: bool


# Two RTX PRO 6000 on PCIe 5.0, NCCL all-reduce in bf16 under CUDA graphs (median of three runs): 12.7 us at
# 4 KiB, 14.8 at 64 KiB, 21.7 at 256 KiB, 41.0 at 1 MiB, 124.9 at 4 MiB, 471 at 16 MiB. The line below is
# within 10 % of each.
_RTX_PRO_6000 = LinkFigures(
    13e-6,
    36.5e9,
    "casys-kaist/LLMServingSim profiler/perf/RTXPRO6000/hardware.yaml (MIT): two GPUs, NCCL",
    measured=True,
)
# Between GPUs without a link of their own; the authors of the layerwise tables assume the same for a pair of
# GPUs: 20 us, then half the bytes at 16 GB/s each way.
_PCIE = LinkFigures(20e-6, 32e9, "PCIe: 20 us and 32 GB/s assumed", measured=False)


def link_figures(gpu: Gpu | None) -> LinkFigures:
    """Latency and one-way rate between two `gpu` in one machine, measured where there is a measurement."""
    if gpu is None:
        return _PCIE
    if gpu.name == "RTX-PRO-6000":
        return _RTX_PRO_6000
    if gpu.nvlink_gb_s:
        rate = 0.7 * gpu.nvlink_gb_s
        return LinkFigures(
            10e-6,
            rate * 1e9,
            f"NVLink: 10 us and {rate:g} GB/s (70 % of the data sheet) assumed",
            False,
        )
    return _PCIE
