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


def test_a_partition_overrides_single_options_and_variables(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(
        "defaults:\n"
        "  env: {A: '1', B: '1'}\n"
        "  setup: [a]\n"
        "  sbatch: {comment: x, mem: 4G, exclusive: true}\n"
        "partitions:\n"
        "  gpu: {env: {B: '2'}, setup: [b], sbatch: {mem-per-cpu: 2G, exclusive: false}}\n"
        "  cpu: {srun: {mpi: none}}\n"
    )
    site = load_site(path)
    settings = site.settings_for("gpu")
    assert settings.env == {"A": "1", "B": "2"}
    assert settings.setup == ("b",)
    assert settings.sbatch == {"comment": "x", "mem-per-cpu": "2G", "exclusive": False}
    assert site.settings_for("cpu").sbatch == site.defaults.sbatch
    assert site.settings_for("other").env == {"A": "1", "B": "1"}


def test_the_site_file_of_another_cluster_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("partitions: {a100: {}, h100: {}}")
    with pytest.raises(PlanError) as error:
        load_site(path).check_partitions({"normal", "gpu"}, path)
    assert f"{path}: this cluster has none of its partitions (a100, h100), but gpu, normal" in str(
        error.value
    )
    assert "rlinf init-site" in str(error.value)
