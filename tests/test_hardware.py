"""The GPU catalogue: names people type, figures that hang together, a source for each."""

from __future__ import annotations

import pytest

from vsim.errors import UserError
from vsim.models.hardware import find_gpu, gpus

FIGURES = (
    *("memory_bytes", "bf16_tflops", "fp16_tflops", "fp8_tflops", "int8_tops"),
    *("memory_bandwidth_gb_s", "pcie_gb_s", "nvlink_gb_s", "compute_capability"),
)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("a100", "A100-80GB"),
        ("A100-80GB", "A100-80GB"),
        ("a100-40gb", "A100-40GB"),
        ("A800", "A800-80GB"),
        ("h100", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("h100-pcie", "H100-PCIe"),
        ("H200", "H200"),
        ("b200", "B200"),
        ("l40", "L40"),
        ("l40s", "L40S"),
        ("a10", "A10"),
        ("rtx4090", "RTX-4090"),
        ("RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx_3090", "RTX-3090"),
        ("RTXPRO6000", "RTX-PRO-6000"),
        ("v100", "V100-32GB"),
        ("v100-16gb", "V100-16GB"),
        ("t4", "T4"),
        ("910b", "Ascend-910B"),
        ("cpu", "cpu"),
    ],
)
def test_a_gpu_is_found_by_the_names_people_use(typed: str, meant: str) -> None:
    assert find_gpu(typed).name == meant


def test_an_unknown_gpu_is_refused_with_near_matches() -> None:
    with pytest.raises(UserError, match=r"unknown GPU 'a1000'.*near matches: A100-80GB"):
        find_gpu("a1000")
    with pytest.raises(UserError, match="unknown GPU ''"):
        find_gpu("")


def test_every_figure_has_a_source() -> None:
    for gpu in gpus():
        for figure in FIGURES:
            if getattr(gpu, figure) is not None:
                assert gpu.source(figure) != "not stated", (gpu.name, figure)


def test_no_two_gpus_share_a_name() -> None:
    for gpu in gpus():
        for name in (gpu.name, gpu.device_name, *gpu.aliases):
            assert find_gpu(name) is gpu, name


def test_figures_are_dense_and_in_proportion() -> None:
    for gpu in gpus():
        if gpu.fp8_tflops is not None and gpu.bf16_tflops is not None:
            assert 1.9 < gpu.fp8_tflops / gpu.bf16_tflops < 2.1, gpu.name
        if gpu.memory_bytes:
            assert 14 * 2**30 < gpu.memory_bytes < 300 * 2**30, gpu.name


def test_the_reported_memory_is_less_than_the_figure_on_the_box() -> None:
    assert find_gpu("h100").memory_gib == pytest.approx(79.19, abs=0.01)
    assert find_gpu("rtx4090").memory_bytes == 25_250_627_584
    assert find_gpu("a100").memory_gib == pytest.approx(79.15, abs=0.01)
