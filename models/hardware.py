"""GPUs: what a device is, as far as memory, speed and vLLM's defaults can depend on it."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from vsim.errors import UserError

CATALOGUE = Path(__file__).with_name("gpus.json")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Figures are the vendor's dense peaks; None where the part has no such unit or none is known.

    `memory_bytes` is the total that the driver reports to PyTorch (`mem_get_info`), which vLLM multiplies by
    `gpu_memory_utilization`; it is less than the figure on the box. `device_name` is the driver's name, in
    which vLLM 0.32 looks for "a100" when it picks its batch defaults. Link speeds are per direction.
    `sources` names the document behind each field ("default": every field without its own entry).
    """

    name: str
    device_name: str
    platform: Literal["cuda", "npu", "cpu"]
    memory_bytes: int  # 0 for the CPU: the KV space is a flag there
    bf16_tflops: float | None
    fp16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    memory_bandwidth_gb_s: float | None
    pcie_gb_s: float | None
    nvlink_gb_s: float | None  # None: no peer link; ranks talk over PCIe
    compute_capability: tuple[int, int] | None
    aliases: tuple[str, ...]
    sources: dict[str, str]

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / 2**30

    def source(self, field: str) -> str:
        """The document a figure comes from."""
        return self.sources.get(field, self.sources.get("default", "not stated"))


def _key(name: str) -> str:
    """Names compare without case, spaces, underscores, hyphens or a leading vendor."""
    text = name.lower()
    for vendor in ("nvidia", "geforce", "tesla", "huawei"):
        text = text.replace(vendor, "")
    return "".join(ch for ch in text if ch.isalnum())


@cache
def gpus() -> tuple[Gpu, ...]:
    """The bundled catalogue (models/gpus.json), in file order."""
    rows = json.loads(CATALOGUE.read_text(encoding="utf-8"))["gpus"]
    return tuple(
        Gpu(
            **{
                **row,
                "aliases": tuple(row["aliases"]),
                "compute_capability": tuple(row["compute_capability"])
                if row["compute_capability"]
                else None,
            }
        )
        for row in rows
    )


@cache
def _by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in gpus() for name in (gpu.name, gpu.device_name, *gpu.aliases)}


def find_gpu(name: str) -> Gpu:
    """The catalogue's `Gpu` of that name, alias or driver name, case-insensitive ("a100", "RTX 4090").

    Raises `UserError` naming near matches for anything else.
    """
    table = _by_key()
    key = _key(name)
    if key in table:
        return table[key]
    near = [table[k].name for k in difflib.get_close_matches(key, list(table), n=4, cutoff=0.6)]
    hint = f"near matches: {', '.join(dict.fromkeys(near))}; " if near else ""
    known = ", ".join(gpu.name for gpu in gpus())
    raise UserError(f"unknown GPU {name!r}: {hint}known are {known} (`vsim catalog` shows them)")
