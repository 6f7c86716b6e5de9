"""Devices from data sheets and inventories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.cost.hardware import device_from_data_sheet, device_from_node_group
from rlinf.errors import PlanError
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup
from tests.pipeline.planning.cost.shapes import A100


@pytest.mark.parametrize("model", GPUS)
def test_every_known_gpu_has_a_device_with_the_sources_of_its_numbers(model):
    device = device_from_data_sheet(model)
    assert device.usable_bytes > 0
    assert device.flops > device.bandwidth_bytes_per_s
    assert set(device.sources) == {
        "flops",
        "bandwidth_bytes_per_s",
        "memory_bytes",
        "intra",
        "inter",
    }
    assert all(device.sources.values())


def test_a_v100_counts_in_float16_and_says_so():
    device = device_from_data_sheet("v100-32gb")
    assert device.flops == 125e12
    assert "float16" in device.sources["flops"]


def test_an_inventory_overrides_the_data_sheet():
    group = NodeGroup(
        count=2,
        gpu_type="a100",
        gpus_per_node=4,
        cpus_per_node=64,
        mem_mb_per_node=1,
        gpu_model="a100-80gb-sxm",
        gpu_memory_gib=79,
        inter_node_bandwidth_bytes_per_s=100e9,
        slowdown=2.0,
    )
    device = device_from_node_group("gpu", group)
    assert (device.name, device.gpus_per_node, device.memory_bytes) == ("gpu", 4, 79 * 2**30)
    assert device.inter.bytes_per_s == pytest.approx(80e9)
    assert device.sources["inter"] == "given"
    slow, quick = (sum(d.roofline(1e12, 1e6)) for d in (device, A100))
    assert slow == pytest.approx(2 * quick)


def test_unknown_gpus_are_named():
    with pytest.raises(PlanError, match="did you mean 'h100-sxm'"):
        device_from_data_sheet("h100-smx")
    bare = NodeGroup(count=1, gpu_type="x9", gpus_per_node=4, cpus_per_node=1, mem_mb_per_node=1)
    with pytest.raises(PlanError, match=r"'x9'.*gpu_model in the site file"):
        device_from_node_group("odd", bare)
    none = NodeGroup(count=1, cpus_per_node=1, mem_mb_per_node=1)
    with pytest.raises(PlanError, match="have no GPUs"):
        device_from_node_group("cpu", none)


@given(st.floats(0, 1e18), st.floats(0, 1e12))
def test_the_roofline_is_the_larger_side_alone(flops, size):
    compute, bandwidth = A100.roofline(flops, size)
    assert min(compute, bandwidth) == 0
    assert max(compute, bandwidth) == pytest.approx(
        max(flops / (0.7 * 312e12), size / (0.8 * 2039e9))
    )


def test_groups_inside_a_node_use_its_links_and_share_the_way_out():
    inside, outside = A100.group_link(8, 1), A100.group_link(16, 1)
    assert inside.bytes_per_s == A100.intra.bytes_per_s
    assert outside.bytes_per_s == min(A100.inter.bytes_per_s, A100.intra.bytes_per_s)
    shared = A100.group_link(4, 8)
    assert shared.bytes_per_s == pytest.approx(A100.inter.bytes_per_s / 8)
    everyone = A100.group_link(16, 1, pairwise=True)
    assert everyone.bytes_per_s == pytest.approx(A100.inter.bytes_per_s / 8)
    assert np.shape(A100.group_link(np.array([2, 16]), 1).bytes_per_s) == (2,)
