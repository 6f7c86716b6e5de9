"""GPUs and links from data sheets: equal to values by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.cost.data_sheet import (
    LinkModel,
    device_from_data_sheet,
    device_from_node_group,
)
from rlinf.errors import PlanError
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup
from tests.pipeline.planning.cost.shapes import A100

links = st.builds(LinkModel, st.floats(0, 1e-3), st.floats(1e6, 1e12))
sizes = st.floats(1, 1e12)


@pytest.mark.parametrize("model", GPUS)
def test_every_known_gpu_has_a_device(model):
    device = device_from_data_sheet(model)
    assert device.usable_bytes > 0
    assert device.flops > device.bandwidth_bytes_per_s


def test_a_v100_computes_in_float16():
    assert device_from_data_sheet("v100-32gb").flops == 125e12


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
    slow, quick = (d.roofline_s(1e12, 1e6) for d in (device, A100))
    assert slow == pytest.approx(2 * quick)


def test_unknown_gpus_are_named():
    with pytest.raises(PlanError, match="did you mean 'h100-sxm'"):
        device_from_data_sheet("h100-smx")
    bare = NodeGroup(count=1, gpu_type="x9", gpus_per_node=4, cpus_per_node=1, mem_mb_per_node=1)
    with pytest.raises(PlanError, match=r"'x9'.*gpu_model in the site file"):
        device_from_node_group("odd", bare)


@given(st.floats(0, 1e18), st.floats(0, 1e12))
def test_the_roofline_is_the_larger_side_alone(flops, size):
    longer = max(flops / (0.7 * 312e12), size / (0.8 * 2039e9))
    assert A100.roofline_s(flops, size) == pytest.approx(longer)


def test_groups_inside_a_node_use_its_links_and_share_the_way_out():
    inside, outside = A100.group_link(8, 1), A100.group_link(16, 1)
    assert inside.bytes_per_s == A100.intra.bytes_per_s
    assert outside.bytes_per_s == min(A100.inter.bytes_per_s, A100.intra.bytes_per_s)
    assert A100.group_link(4, 8).bytes_per_s == pytest.approx(A100.inter.bytes_per_s / 8)


@given(links, st.integers(1, 64), sizes)
def test_collectives_cost_their_steps_and_at_least_their_bytes(link, count, size):
    ring = (count - 1) * (link.latency_s + size / count / link.bytes_per_s)
    assert link.all_gather_s(count, size) == pytest.approx(ring)
    time = link.all_reduce_s(count, size)
    assert time <= 2 * ring * (1 + 1e-9)
    assert time >= 2 * (count - 1) / count * size / link.bytes_per_s * (1 - 1e-9)
