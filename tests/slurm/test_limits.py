"""What a cluster cannot give is refused before submission, with the key and a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launchers.base import Resources
from rlinf.errors import PlanError
from slurm.client import Partition
from slurm.limits import check_resources
from slurm.site import load_site

CLUSTER = {
    "a100": Partition("a100", 1440, 2, 8, 16000, {"a100": 4}, default=True),
    "cpu": Partition("cpu", None, 1, 8, 16000, {}),
}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"partition": "a10"}, "no partition 'a10' here; did you mean 'a100'"),
        ({"partition": "a100", "gpus_per_node": 1, "gpu_type": "h100"}, "no GPU 'h100'"),
        ({"partition": "a100", "gpus_per_node": 5}, "5 asked, nodes of partition 'a100' have 4"),
        ({"partition": "cpu", "gpus_per_node": 1}, "has no GPUs"),
        ({"partition": "a100", "time_min": 2000}, "allows 1440"),
        ({"nodes": 3}, "3 asked, partition 'a100' has 2"),
        ({"cpus_per_task": 3, "tasks_per_node": 4}, "12 asked"),
        ({"mem_mb": 99999}, "99999 asked"),
    ],
)
def test_impossible_requests(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_resources(Resources(**wanted), CLUSTER, "train")


def test_a_possible_request_passes() -> None:
    check_resources(
        Resources("a100", nodes=2, gpus_per_node=4, gpu_type="a100", time_min=60), CLUSTER, "train"
    )


def test_example_sites_are_valid() -> None:
    folder = Path(__file__).parents[2] / "slurm" / "sites"
    sites = {path.name: load_site(path) for path in folder.glob("*.yaml")}
    assert len(sites) >= 2
    modules = sites["example-modules.yaml"]
    assert modules.of("a100").account == "my-project", "defaults hold for every partition"
    assert modules.of("preempt").signal_delay_s == 60


def test_a_misspelt_site_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("defaults: {acount: x}")
    with pytest.raises(PlanError, match=r"defaults\.acount.*did you mean 'account'"):
        load_site(path)
