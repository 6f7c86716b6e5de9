"""Site files speak of partitions that the cluster has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.errors import PlanError
from slurm.site import load_site


def test_a_partition_that_the_cluster_has_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("partitions: {a100: {account: x}, h1000: {account: y}}")
    with pytest.raises(PlanError, match=r"partitions\.h1000: .*did you mean 'h100'"):
        load_site(path).check_partitions({"a100", "h100", "cpu"}, path)
    load_site(path).check_partitions({"a100", "h1000"}, path)
