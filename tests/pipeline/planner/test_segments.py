"""The problem of grain ``segment`` says what the profile says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.cost.predict import expect
from pipeline.planner import segments
from pipeline.planner.devices import Devices, devices_of
from pipeline.planner.search import solve
from pipeline.profile.schema import Profile
from pipeline.workflow import compose
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.site import Site
from tests.pipeline.planner import clusters


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch=16"]))


@pytest.fixture(scope="module")
def cluster(config: RunConfig) -> tuple[dict[str, Devices], Profile]:
    profile = clusters.profile(config, "a100", "h100")
    found, _ = devices_of(clusters.inventory(4), Site(), profile, ["a100", "h100"])
    return found, profile


def test_rates_are_those_that_were_measured(cluster, config):
    devices, profile = cluster
    problem = segments.build(devices, profile, config, {})
    for stage in problem.stages:
        for kind in problem.kinds:
            for n in (1, 2, 4):
                true = clusters.work(stage.name, kind.name, n)
                assert 1 / stage.rates[kind.name][n] == pytest.approx(true, rel=0.01)


def test_beyond_what_was_measured_tables_say_so_and_their_spread_grows(cluster, config):
    tables = segments.tables(*cluster, config)
    train = tables["train"]["h100"]
    assert (train.source(4), train.source(8)) == ("measured", "extrapolated")
    assert train.spread[8] > train.spread[4]
    assert train.memory_bytes[8] == 400 << 20
    # One process does all that there is to do.
    assert np.all(tables["reward"]["h100"].used[1:] == 1)


def test_no_more_processes_than_failed_are_planned_with(cluster, config):
    devices, profile = cluster
    own = devices["a100"].profile
    failed = own.points[0].model_copy(
        update={"stage": "train", "processes": 6, "time": None, "failure": "out of memory"}
    )
    profiled = own.model_copy(update={"points": (*own.points, failed)})
    changed = {**devices, "a100": replace(devices["a100"], profile=profiled)}
    tables = segments.tables(changed, profile, config)
    assert tables["train"]["a100"].used[8] == 5
    assert tables["train"]["h100"].used[8] == 8


def test_what_is_expected_of_the_best_plan_holds_its_prediction(cluster, config):
    problem = segments.build(*cluster, config, {})
    best = solve(problem)[0]
    expected = expect(problem, best.placement, segments.tables(*cluster, config))
    assert expected.nominal_s == pytest.approx(best.prediction.total_s)
    assert expected.q10_s <= expected.nominal_s <= expected.q90_s
    assert expected.influences[0].saved_s > 0


def test_a_stage_that_ran_nowhere_is_named(cluster, config):
    devices, profile = cluster
    broken = {
        name: replace(own, profile=own.profile.model_copy(update={"points": points}))
        for name, own in devices.items()
        for points in [tuple(p for p in own.profile.points if p.stage != "train")]
    }
    with pytest.raises(PlanError, match="'train': no measurement"):
        segments.build(broken, profile, config, {})
