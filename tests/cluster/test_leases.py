"""Pools whose jobs' time runs out are replaced ahead of that, and the run takes no notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stages.layout import POOLS_FOLDER
from tests.cluster.test_chaos import POOLS as PLAN
from tests.cluster.test_runs import words
from tests.pipeline.helpers import contents, run_here, start_driver

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ITERATIONS = 100


@pytest.mark.timeout(1500)
def test_a_run_outlasts_many_leases(cluster: Path, tmp_path: Path) -> None:
    """All end at about the same time; of each the next is there before."""
    run_here(words(tmp_path / "reference", f"iterations={ITERATIONS}"))
    short = {"partition": "cpu", "mem_mb": 2000, "time_limit_min": 1}
    plan, site = tmp_path / "plan.yaml", tmp_path / "site.yaml"
    plan.write_text(yaml.safe_dump({**PLAN, "defaults": short}))
    # Long enough for some leases.
    site.write_text(yaml.safe_dump({"defaults": {"duty_cycle": 0.5}}))
    call = words(
        tmp_path, f"iterations={ITERATIONS}", "cluster=slurm", "cluster.poll_interval_s=0.2"
    )
    call += [f"plan={plan}", f"cluster.site={site}", "cluster.max_retries=0"]
    driver = start_driver(call, tmp_path / "log")
    assert driver.wait(timeout=1200) == 0, (tmp_path / "log").read_text()
    run = tmp_path / "tiny"
    assert contents(run) == contents(tmp_path / "reference" / "tiny")
    for pool in "01":
        assert len(list((run / POOLS_FOLDER / pool).glob("[0-9]*"))) > 2, (
            "a pool had several leases"
        )
    output = (tmp_path / "log").read_text()
    assert "failed" not in output, output
