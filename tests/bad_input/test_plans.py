"""Bad plans and site files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import SlurmError
from tests.bad_input.door import Base, refused

ALL = ["rollout", "reward", "inference", "train"]


def pools(*given: dict[str, Any], **further: Any) -> dict[str, Any]:
    return {"pools": list(given), **further}


def pool(*stages: str, **further: Any) -> dict[str, Any]:
    return {"stages": list(stages or ALL), "devices": {"cpu": 1}, **further}


HELPS = pools(pool("reward", "inference", "train", also_generates=True), pool("rollout"))
PLANS: list[tuple[str, Any, list[str]]] = [
    ("stage", {"stages": {"trian": {}}}, ["plan.stages", "did you mean 'train'"]),
    ("key", {"stages": {"train": {"gpu": 1}}}, ["train.gpu", "did you mean 'gpus'"]),
    ("top", {"stage": {}}, ["plan.stage", "did you mean 'stages'"]),
    ("default", {"defaults": {"cpu": 1}}, ["plan.defaults.cpu", "cpus"]),
    ("no-cpus", {"defaults": {"cpus": 0}}, ["plan.defaults.cpus"]),
    ("text", {"defaults": {"cpus": "4"}}, ["plan.defaults.cpus"]),
    ("flag", {"defaults": {"nodes": True}}, ["plan.defaults.nodes"]),
    ("gpus", {"defaults": {"gpus": -1}}, ["plan.defaults.gpus"]),
    ("memory", {"defaults": {"mem_mb": "4G"}}, ["plan.defaults.mem_mb"]),
    ("time", {"defaults": {"time_limit_min": 0}}, ["plan.defaults.time_limit_min"]),
    ("clock", {"defaults": {"time_limit_min": "1:30"}}, ["plan.defaults.time_limit_min"]),
    ("share", {"defaults": {"processes": 2, "speed_weights": [1.0]}}, ["speed_weights"]),
    ("negative-share", {"defaults": {"speed_weights": [-1.0]}}, ["plan.defaults.speed_weights"]),
    ("chunks", {"num_chunks": 0}, ["plan.num_chunks"]),
    ("stages", {"stages": []}, ["plan.stages"]),
    ("edge", {"transports": {"rollout -> rewards": "file"}}, ["did you mean 'rollout -> reward'"]),
    ("way", {"transports": {"rollout -> reward": "http"}}, ["rollout -> reward", "'socket'"]),
    ("sockets", {"transports": {"sync -> rollout": "socket"}}, ["weights do not go by socket"]),
    ("weights", {"transports": {"rollout -> reward": "nccl"}}, ["carries weights alone"]),
    ("in-process", pools(pool()), ["pools need processes", "cluster=local"]),
    ("twice", pools(pool(), pool("train")), ["plan.pools", "'train' is in two"]),
    ("unknown", pools(pool("rolout", "train")), ["pools[0].stages", "did you mean 'rollout'"]),
    ("empty", pools({"stages": [], "devices": {"cpu": 1}}), ["plan.pools.0.stages"]),
    ("no-gpus", pools({"stages": ALL, "devices": {}}), ["plan.pools.0.devices"]),
    ("no-device", pools(pool(devices={"cpu": 0})), ["plan.pools.0.devices.cpu"]),
    ("no-train", pools(pool("rollout", "reward")), ["plan.pools", "no pool holds train"]),
    ("no-rollout", pools(pool("train", "reward")), ["plan.pools", "no pool holds rollout"]),
    ("helps", HELPS, ["pools[0].also_generates: needs an elastic pool"]),
    ("workers", pools(pool(workers=2)), ["workers", "elastic"]),
    ("alone", pools(pool(), hetjob=True), ["plan.hetjob"]),
    ("number", 5, ["plan"]),
    ("file", "/no/plan.yaml", ["plan", "no file /no/plan.yaml"]),
    ("folder", "/tmp", ["plan", "/tmp is a folder"]),
    ("device", "/dev/null", ["plan", "not a regular file"]),
]


@pytest.mark.parametrize(
    ("plan", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in PLANS]
)
def test_a_bad_plan(base: Base, plan: Any, words: list[str]) -> None:
    refused(base("arithmetic", {"plan": plan}), *words)


FILES: list[tuple[str, bytes, list[str]]] = [
    ("binary", bytes(range(256)), ["not UTF-8"]),
    ("gzip", b"\x1f\x8b\x08\x00abc\xff", ["gzip"]),
    ("list", b"[1, 2]", ["expected a mapping"]),
    ("text", b"hello", ["expected a mapping"]),
    ("zero", b"0", ["expected a mapping"]),
    ("tab", b"defaults:\n\tcpus: 1\n", ["line 2", "not valid YAML"]),
    ("open", b"defaults: {cpus: 1", ["line 2", "not valid YAML"]),
    ("object", b"defaults: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ("itself", b"defaults: &a {cpus: *a}", ["plan.yaml"]),
    ("twice", b"defaults: {cpus: 1, cpus: 2}", ["line 1", "'cpus' stands there twice"]),
    ("twice-deep", b"stages:\n  train: {}\n  train: {}\n", ["line 3", "'train'"]),
    ("clock", b"defaults: {time_limit_min: 1:30}", ["defaults.time_limit_min", "'1:30'"]),
    ("date", b"defaults: {partition: 3}", ["defaults.partition"]),
    ("sequence-key", b"? [a]\n: 1\n", ["plan.yaml"]),
]


@pytest.mark.parametrize(
    ("content", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in FILES]
)
def test_a_bad_plan_file(base: Base, tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    refused(base("arithmetic", {"plan": str(path)}), str(path), *words)


SITES: list[tuple[str, bytes, list[str]]] = [
    ("binary", bytes(range(256)), ["not UTF-8"]),
    ("list", b"[]\n- 1", ["not valid YAML"]),
    ("sequence", b"- a\n- b", ["expected a mapping"]),
    ("twice", b"defaults: {}\ndefaults: {}\n", ["line 2", "'defaults' stands there twice"]),
    ("unknown", b"default: {}", ["default: unknown key", "'defaults'"]),
    ("deep", b"partitions: {a: {acount: x}}", ["partitions.a.acount", "'account'"]),
    ("signal", b"defaults: {signal_delay_s: -5}", ["defaults.signal_delay_s"]),
    ("signal-text", b"defaults: {signal_delay_s: 1:30}", ["defaults.signal_delay_s"]),
    ("losses", b"defaults: {interruptions_per_hour: -1}", ["defaults.interruptions_per_hour"]),
    ("slowdown", b"defaults: {slowdown: 0}", ["defaults.slowdown"]),
    ("memory", b"defaults: {gpu_memory_gib: 80GB}", ["defaults.gpu_memory_gib"]),
    ("gpu", b"defaults: {gpu_model: b9000}", ["defaults.gpu_model", "b9000"]),
    ("cost", b"defaults: {cost_per_gpu_hour: true}", ["defaults.cost_per_gpu_hour"]),
    ("duty", b"defaults: {duty_cycle: 2.0}", ["defaults.duty_cycle"]),
    ("setup", b"defaults: {setup: module load cuda}", ["defaults.setup"]),
    ("env", b"defaults: {env: {THREADS: 4}}", ["defaults.env.THREADS"]),
    ("python", b"defaults: {python: apptainer}", ["defaults.python"]),
    ("partitions", b"partitions: [a, b]", ["partitions"]),
]


@pytest.mark.parametrize(
    ("content", "words"), [pytest.param(*entry[1:], id=entry[0]) for entry in SITES]
)
def test_a_bad_site_file(base: Base, tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "site.yaml"
    path.write_bytes(content)
    refused(base("arithmetic", {"cluster.site": str(path)}), "cluster.site", str(path), *words)


def test_a_folder_as_site(base: Base, tmp_path: Path) -> None:
    refused(base("arithmetic", {"cluster.site": str(tmp_path)}), "cluster.site", "is a folder")


def test_no_slurm(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    from pipeline.commands.experiment import prepare_run

    with pytest.raises(SlurmError, match="this machine has no Slurm"):
        prepare_run(base("arithmetic", {"cluster.launcher": "slurm"}))
    assert not (tmp_path / "runs").exists()
