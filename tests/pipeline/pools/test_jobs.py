"""Which jobs of pools a later driver takes over, and which it starts anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.commands.experiment import prepare_run
from pipeline.plan import parse_plan
from pipeline.pools.leases import pool_job, pool_states
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf.config import CheckpointSection
from stages.layout import CODE_FILE

Compose = Callable[..., dict[str, Any]]
ALL = ["rollout", "reward", "inference", "train"]
PLAN = {"pools": [{"stages": ALL, "devices": {"local": 1}}]}


@pytest.fixture
def key(compose: Compose) -> Callable[..., str]:
    """That of the only pool of a run, with other values of its frozen configuration."""
    run = prepare_run({**compose("cluster=local"), "plan": PLAN})

    def made(
        change: dict[str, Any] | None = None, mem_mb: int = 500, code: str = "{}", **cluster: Any
    ) -> str:
        (run.folder / CODE_FILE).write_text(code)
        config = run.config.model_copy(update=change or {})
        plan = parse_plan({**PLAN, "defaults": {"mem_mb": mem_mb}}, "plan")
        settings = ClusterConfig(launcher="local", **cluster)
        return pool_job(Run(run.folder, config), plan, settings, pool_states(plan)[0]).content_key

    return made


def test_what_workers_do_not_see_changes_nothing(key: Callable[..., str]) -> None:
    assert key() == key({"iterations": 7}) == key({"log": {"trackers": ["wandb"]}})
    assert key() == key(max_retries=9)


def test_their_configuration_resources_and_code_are_part_of_it(key: Callable[..., str]) -> None:
    kept = CheckpointSection(keep_trajectories=9)
    others = [key({"seed": 4}), key({"checkpoint": kept}), key(mem_mb=900)]
    others += [key(code='{"a": 1}'), key(env={"A": "1"})]
    assert len({key(), *others}) == 6
