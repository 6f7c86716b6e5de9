"""GPUs are known by the names that clusters give them."""

from __future__ import annotations

import pytest

from slurm.gpus import GPUS, find_gpu, is_gpu_feature


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("a100", "a100-40gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("a100_pcie", "a100-40gb"),
        ("nvidia_a100_80gb_pcie", "a100-80gb-pcie"),
        ("a100-sxm4-80gb", "a100-80gb-sxm"),
        ("a100_80g", "a100-80gb-sxm"),
        ("h100", "h100-sxm"),
        ("nvidia_h100_80gb_hbm3", "h100-sxm"),
        ("h100pcie", "h100-pcie"),
        ("h100_nvl", "h100-nvl"),
        ("NVIDIA-H200", "h200-sxm"),
        ("h200-nvl", "h200-nvl"),
        ("nvidia_b200", "b200"),
        ("l40s", "l40s"),
        ("nvidia_a40", "a40"),
        ("rtx_a6000", "rtx-a6000"),
        ("a6000", "rtx-a6000"),
        ("nvidia_rtx_6000_ada_generation", "rtx-6000-ada"),
        ("rtx6000ada", "rtx-6000-ada"),
        ("tesla_v100-sxm2-16gb", "v100-16gb"),
        ("v100-pcie-32gb", "v100-32gb"),
        ("mi250", "mi250x"),
        ("amd_instinct_mi250x", "mi250x"),
        ("mi300x", "mi300x"),
    ],
)
def test_names(name: str, want: str) -> None:
    found = find_gpu(name)
    assert found is not None
    assert found.name == want


@pytest.mark.parametrize(
    "name",
    [
        *("", "gpu", "a10", "a4000", "l40", "h20", "gh200", "gb200", "v100s", "mi300a", "a100x"),
        *("quadro_rtx_6000", "a100-64gb", "1g.10gb", "a100_1g.5gb", "nvidia_a100_3g.20gb"),
    ],
)
def test_other_gpus_and_slices_are_not_taken_for_known_ones(name: str) -> None:
    assert find_gpu(name) is None


def test_features_settle_what_the_name_leaves_open() -> None:
    assert find_gpu("a100", ("ss11", "hbm80g")) is GPUS["a100-80gb-sxm"]
    assert find_gpu("a100", ("80gb", "pcie")) is GPUS["a100-80gb-pcie"]
    assert find_gpu("a100", ("mem512gb", "nvlink")) is GPUS["a100-40gb"], "of something else"
    assert find_gpu("h100", ("nvlink",)) is GPUS["h100-sxm"], "a link is no NVL card"


@pytest.mark.parametrize(
    ("feature", "want"),
    [("hbm40g", True), ("a100", True), ("gpu_mem_80gb", True), ("rack12", False), ("ib", False)],
)
def test_features_that_tell_the_gpu(feature: str, want: bool) -> None:
    assert is_gpu_feature(feature) is want


def test_every_name_of_the_table_is_found_by_itself() -> None:
    assert {find_gpu(name) for name in GPUS} == set(GPUS.values())


def test_figures_are_plausible() -> None:
    for gpu in GPUS.values():
        assert 16 <= gpu.memory_gib <= 192
        assert 6e11 < gpu.bandwidth_bytes_per_s <= 8e12
        assert gpu.bf16_flops is None or 1e14 < gpu.bf16_flops < 3e15
        assert gpu.source
