"""What cannot be is refused with the key and the nearest name, before anything is planned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import compose
from pipeline.inventory import load_or_survey
from pipeline.planning.planner.available_devices import local_devices, select_devices
from pipeline.planning.planner.problem import read_problem
from pipeline.planning.planner.request import parse_counts, parse_pins
from pipeline.planning.profile.device_kinds import list_kinds
from rlinf.config import RunConfig, validate
from rlinf.errors import PlanError
from slurm.site import SiteConfig
from stages.flow import on_policy
from tests.pipeline.planning.planner import clusters


def problem() -> dict[str, Any]:
    seconds = {"h100": {1: 10.0, 2: 6.0}}
    return {
        "kinds": {"h100": {"gpus": 2}},
        "stages": {
            "rollout": {"seconds": seconds},
            "train": {"seconds": seconds, "after": ["rollout"]},
        },
    }


def put(values: Any, keys: tuple[Any, ...], value: object) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("stages", "train", "after"), ["rolout"], "after: no such stage 'rolout'.*'rollout'"),
        (("stages", "train", "switch_s"), {"h10": 1.0}, "switch_s: no such kind 'h10'.*'h100'"),
        (
            ("stages", "train", "switch_s"),
            {"h100": -1.0},
            r"train\.switch_s\.h100: .*greater than or equal to 0",
        ),
        (("stages", "train", "seconds", "h100", 1), -1.0, r"seconds\.h100\.1.*greater than 0"),
        (("stages", "train", "seconds", "h100", 1), float("inf"), r"seconds\.h100\.1.*finite"),
        (("stages", "train", "seconds", "h10"), {1: 1.0}, "no kind 'h10'.*'h100'"),
        (("stages", "train", "secs"), 1, r"train\.secs: unknown key"),
        (("kinds", "h100", "price"), float("nan"), r"kinds\.h100\.price.*finite"),
        (("kinds", "h100", "gpu"), 1, r"kinds\.h100\.gpu: unknown key.*'gpus'"),
        (("sync",), ["trian", "rollout"], "sync: no stage 'trian'.*'train'"),
        (("sync_s",), {"h100": {"h10": 1.0}}, r"sync_s\.h100: no such kind 'h10'.*'h100'"),
        (
            ("sync_s",),
            {"h100": {"h100": -1.0}},
            r"sync_s\.h100\.h100: .*greater than or equal to 0",
        ),
        (("mixes",), ["rolout"], "mixes: no such stage 'rolout'.*'rollout'"),
        (("mixing",), 1.5, "mixing: 1.5 is not"),
        (("micro_batches",), [1], "problem.micro_batches: unknown key; it is 'chunks' now"),
        (
            ("kinds", "h100", "wait_s"),
            9,
            r"h100\.wait_s: unknown key; it was removed: give waits_s",
        ),
    ],
)
def test_a_problem_file(tmp_path: Path, keys: tuple[Any, ...], value: object, words: str) -> None:
    values = problem()
    path = tmp_path / "problem.yaml"
    path.write_text(yaml.safe_dump(values))
    assert read_problem(path)[1] is None
    put(values, keys, value)
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(PlanError, match=words):
        read_problem(path)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return validate(RunConfig, compose(["experiment=arithmetic_grpo", "rollout.batch_size=16"]))


def test_a_stage_of_a_profile_that_no_flow_has(config: RunConfig) -> None:
    made = json.loads(clusters.profile(config).model_dump_json().replace('"train"', '"trian"'))
    profile = type(clusters.profile(config)).model_validate(made)
    words = r"p\.json: kinds\.a100\.points\[\d+\]\.stage: no stage 'trian'.*'train'"
    with pytest.raises(PlanError, match=words):
        profile.check_stages(on_policy.all_stages, "p.json")


def test_nodes_of_another_size_than_measured(config: RunConfig) -> None:
    profile = clusters.profile(config)
    own = profile.kinds["h100"].model_copy(update={"devices_per_node": 8})
    other = profile.model_copy(update={"kinds": {**profile.kinds, "h100": own}})
    with pytest.raises(PlanError, match=r"h100\.devices_per_node: measured on nodes of 8.* have 2"):
        select_devices(clusters.inventory(), SiteConfig(), other)
    kind = list_kinds(clusters.inventory(), SiteConfig())["h100"]
    with pytest.raises(PlanError, match="measured on nodes of 8 devices, here they have 2"):
        local_devices(other, kind)


def test_a_cluster_all_of_whose_nodes_are_down(config: RunConfig) -> None:
    def down(group: Any) -> Any:
        gone = {"down_nodes": group.count, "idle_nodes": 0, "idle_gpus": 0}
        return group.model_copy(update=gone)

    cluster = clusters.inventory()
    partitions = {
        name: own.model_copy(update={"groups": tuple(down(group) for group in own.groups)})
        for name, own in cluster.partitions.items()
    }
    broken = cluster.model_copy(update={"partitions": partitions})
    with pytest.raises(PlanError, match="no node of this cluster can be used now: 9 are down"):
        select_devices(broken, SiteConfig(), clusters.profile(config))


def test_a_site_file_that_speaks_of_another_cluster(tmp_path: Path) -> None:
    saved, site = tmp_path / "inventory.json", tmp_path / "site.yaml"
    clusters.inventory().save(saved)
    site.write_text("partitions: {h10: {cost_per_gpu_hour: 2}}")
    with pytest.raises(PlanError, match=r"partitions\.h10: .*did you mean 'h100'"):
        load_or_survey(saved, site)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["trian=h100"], "no stage 'trian'.*'train'"),
        (["train=h10"], "no kind 'h10'.*'h100'"),
        (["train=h100", "train=a100"], "'train' is pinned twice"),
    ],
)
def test_pins(config: RunConfig, pins: list[str], words: str) -> None:
    found, _ = select_devices(clusters.inventory(), SiteConfig(), clusters.profile(config))
    with pytest.raises(PlanError, match=words):
        parse_pins(pins, found, on_policy)


def test_numbers_that_python_takes_for_digits() -> None:
    with pytest.raises(PlanError, match="expected KIND=NUMBER"):
        parse_counts(["h100=²"])


def test_a_reader_that_stops_reading_has_the_plan_all_the_same(
    config: RunConfig, compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    words = ["experiment=arithmetic_grpo", "rollout.batch_size=16"]
    clusters.inventory().save(tmp_path / "inventory.json")
    clusters.profile(config).save(tmp_path / "profile.json")
    command = [sys.executable, "-m", "rlinf", "plan", *words, "--from", "inventory.json"]
    plan = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert plan.stdout is not None
    plan.stdout.close()
    _, outputs = plan.communicate()
    assert (tmp_path / "plan.yaml").exists(), outputs
    assert b"Traceback" not in outputs
