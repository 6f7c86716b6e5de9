"""What the driver asks of a cluster is checked against it before anything is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.driver_job import driver_resources
from pipeline.commands.experiment import prepare_run, validate_experiment
from pipeline.job_executor import create_launcher
from pipeline.plan import Plan, StagePlan, parse_plan
from pipeline.resources import (
    ClusterConfig,
    DriverJobConfig,
    job_resources,
    pool_job_requests,
    pool_resources,
    resolve_plan,
)
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError
from slurm import sbatch_options as option_names
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import Inventory
from slurm.sbatch_options import sbatch_options
from slurm.site import PartitionSettings

SINFO = "".join(
    f"{partition}{kind}{number}|{partition}|idle|64|500000|{gres}|\n"
    for partition, kind, count, gres in (
        ("cpu", "n", 4, "(null)"),
        ("gpu", "a", 4, "gpu:a100:4"),
        ("gpu", "h", 1, "gpu:h100:2"),
        ("h100", "n", 2, "gpu:h100:4"),
    )
    for number in range(count)
)
RULES = "AllowAccounts=ALL AllowQos=ALL QoS=N/A State=UP"
CLUSTER = ClusterConfig(launcher="slurm")
Compose = Callable[..., dict[str, Any]]


class Answers:
    """Of a cluster on which a user has 8 GPUs at a time."""

    qos = "normal|0||||||||"
    """Name, priority, preempted QOS, time, jobs, submitted, of a user, of a job, of all."""
    associations = "dev|team||normal||||||normal"
    cpu_time = "UNLIMITED"
    default = "cpu"

    def run(self, *command: str, errors: bool = False) -> str:
        if command == ("sinfo", "--version"):
            return "slurm-wlm 22.05.8\n"
        if command[0] == "sinfo":
            return SINFO
        if command[:3] == ("scontrol", "show", "config"):
            return "AccountingStorageEnforce = limits\nClusterName = dev\nSLURM_VERSION = 22.05.8\n"
        if command[0] == "scontrol":
            names = ("cpu", "gpu", "h100")
            default, times = {self.default: "YES"}, {"cpu": self.cpu_time}
            return "".join(
                f"PartitionName={name} Default={default.get(name, 'NO')} "
                f"MaxTime={times.get(name, 'UNLIMITED')} {RULES}\n"
                for name in names
            )
        return self.qos if "qos" in command else self.associations


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers()
    monkeypatch.setattr(SlurmClient, "run", found.run)
    return found


def survey() -> Inventory:
    """The inventory that the answers make."""
    return discover_inventory(SlurmClient(), with_usage=False)


@contextmanager
def checked(plan: Plan, cluster: ClusterConfig = CLUSTER) -> Iterator[None]:
    launcher = create_launcher(cluster, plan)
    try:
        yield
    finally:
        launcher.close()


def pools(*given: dict[str, Any], **defaults: int) -> Plan:
    values = {"defaults": defaults, "pools": list(given)}
    return parse_plan(values, "plan")


REST = ["reward", "inference", "train"]


def test_every_kind_of_an_elastic_pool_is_checked_also_in_one_partition(answers: Answers) -> None:
    held = {"gpu:none": 1, "gpu:a100": 1}
    train = {"stages": REST, "devices": {"h100": 1}}
    plan = pools({"stages": ["rollout"], "workers": 2, "devices": held}, train, gpus=1)
    assert [needs.gpu_type for needs in pool_job_requests(plan, CLUSTER)["pools[0]"]] == [
        "none",
        "a100",
    ]
    with pytest.raises(PlanError, match=r"pools\[0\]\.gpu_type: .* no GPU 'none'"):
        create_launcher(CLUSTER, plan)


def test_pools_that_accounting_never_lets_run_at_once_are_refused(answers: Answers) -> None:
    plan = pools(
        {"stages": ["rollout"], "devices": {"gpu:a100": 4}},
        {"stages": REST, "devices": {"gpu:h100": 2, "h100": 4}},
        processes=4,
        gpus=4,
    )
    with checked(plan):
        pass
    answers.qos = "normal|0|||||gres/gpu=9|||"
    words = r"pools\[0\] and pools\[1\] on gpu:h100 and pools\[1\] on h100: .* 10 gpus in all"
    with pytest.raises(PlanError, match=words):
        create_launcher(CLUSTER, plan)


def test_one_worker_of_an_elastic_pool_is_enough(answers: Answers) -> None:
    train = {"stages": REST, "devices": {"h100": 1}}
    plan = pools({"stages": ["rollout"], "workers": 8, "devices": {"gpu:a100": 1}}, train)
    answers.qos = "normal|0|||2||cpu=2|||"
    with checked(plan):
        pass
    answers.qos = "normal|0|||1|||||"
    with pytest.raises(PlanError, match=r"pools\[0\] and pools\[1\]: .* 2 jobs in all"):
        create_launcher(CLUSTER, plan)


TWO = pools(
    {"stages": ["rollout"], "devices": {"gpu:a100": 1}},
    {"stages": REST, "devices": {"h100": 1}},
    gpus=1,
)


def test_a_driver_in_a_job_takes_a_place_beside_the_pools(
    answers: Answers, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.associations = "dev|team||normal||2||||normal"
    with checked(TWO):
        pass
    words = (
        r"cluster\.driver and pools\[0\] and pools\[1\]: .* 3 jobs in all, account team allows 2"
    )
    with pytest.raises(PlanError, match=words):
        driver_resources(CLUSTER, TWO, survey())
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(PlanError, match=words):
        prepare_run({**compose("cluster=slurm"), "plan": TWO.to_dict()})
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "other")
    prepare_run({**compose("cluster=slurm"), "plan": TWO.to_dict()})
    answers.associations = "dev|team||normal||3||||normal"
    driver_resources(CLUSTER, TWO, survey())


def test_a_driver_in_a_job_takes_its_part_beside_each_stage(answers: Answers) -> None:
    plan = parse_plan({"stages": {"train": {"cpus": 2}}}, "plan")
    answers.qos = "normal|0|||||cpu=2|||"
    with checked(plan):
        pass
    with pytest.raises(PlanError, match=r"cluster\.driver and stages\.train: .* 3 cpus in all"):
        driver_resources(CLUSTER, plan, survey())
    driver_resources(ClusterConfig(launcher="local"), plan, survey())


def test_the_default_partition_has_its_own_settings_of_the_site(
    answers: Answers, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        "defaults: {account: team}\npartitions: {cpu: {qos: long, setup: [module load cuda]}}\n"
    )
    cluster = ClusterConfig(launcher="slurm", site=site)
    stages = {"rollout": {"partition": "gpu"}, "train": {"partition": None, "cpus": 2}}
    plan = resolve_plan(parse_plan({"stages": stages}, "plan"), cluster)
    for stage, partition, qos in (
        ("rollout", "gpu", None),
        ("train", "cpu", "long"),
        ("reward", "cpu", "long"),
    ):
        needs = job_resources(plan.stage_plan(stage), cluster)
        assert (needs.partition, needs.account, needs.qos) == (partition, "team", qos)
        assert needs.setup == (("module load cuda",) if qos else ())
    assert plan.stage_plan("train").cpus == 2
    assert resolve_plan(plan, cluster) == plan, "as a resumed run has it"
    needs = driver_resources(cluster, plan, survey())
    assert (needs.partition, needs.qos) == ("cpu", "long")


def test_a_driver_has_the_time_of_its_own_partition(answers: Answers) -> None:
    answers.cpu_time = "30:00"
    for partition, minutes in ((None, 30), ("gpu", 24 * 60), ("gpu,cpu", 30)):
        cluster = ClusterConfig(launcher="slurm", driver={"partition": partition})  # type: ignore[arg-type]
        assert driver_resources(cluster, parse_plan({}, "plan"), survey()).time_limit_min == minutes


def test_a_plan_names_no_partition_where_no_site_speaks_of_any(answers: Answers) -> None:
    plan = parse_plan({"stages": {"train": {"cpus": 2}}}, "plan")
    assert resolve_plan(plan, CLUSTER) is plan


def test_stages_without_gpus_go_to_a_partition_without_gpus(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "default", "gpu")
    answers.cpu_time = "30:00"
    stages = {
        "train": {"gpus": 1},
        "evaluate": {"time_limit_min": 60},
        "sync": {"partition": "h100"},
    }
    plan = resolve_plan(parse_plan({"stages": stages}, "plan"), CLUSTER)
    named = {stage: plan.stage_plan(stage).partition for stage in plan.flow.all_stages}
    assert named["reward"] == named["rollout"] == named["sft"] == "cpu"
    assert named["train"] is None, "Slurm's default, which has GPUs"
    assert named["evaluate"] is None, "the other partition does not allow it an hour"
    assert named["sync"] == "h100"
    with checked(plan):
        pass


@pytest.mark.parametrize(
    ("devices", "nodes", "processes"),
    [
        ({"h100": 4}, [1], [4]),
        ({"h100": 8}, [2], [4]),
        ({"h100": 6}, [2], [3]),
        ({"h100": 5}, [5], [1]),
        ({"gpu:h100": 2, "h100": 4}, [1, 1], [2, 4]),
        ({"cpu": 4}, [4], [1]),
    ],
)
def test_a_number_of_gpus_fills_nodes(
    answers: Answers, devices: dict[str, int], nodes: list[int], processes: list[int]
) -> None:
    train = {"stages": REST, "devices": devices}
    plan = resolve_plan(pools({"stages": ["rollout"], "devices": {"h100": 1}}, train), CLUSTER)
    components = pool_resources(plan, 1)
    assert [part.nodes for part in components] == nodes
    assert [part.processes for part in components] == processes
    gpus = [0] if "cpu" in devices else processes
    assert [part.gpus for part in components] == gpus
    assert plan.stage_plan("reward").processes == 1
    chosen = pools({"stages": ["rollout"], "devices": {"h100": 1}}, train, processes=1)
    assert pool_resources(resolve_plan(chosen, CLUSTER), 1)[0].nodes == next(iter(devices.values()))


def test_gpus_that_no_process_would_use_are_refused(compose: Compose) -> None:
    values = compose("cluster=local")
    with pytest.raises(
        PlanError, match=r"stages\.train: gpus: 8, but processes: 1, .* set processes: 8"
    ):
        validate_experiment({**values, "plan": {"stages": {"train": {"gpus": 8}}}})
    with pytest.raises(PlanError, match=r"gpus: .*write gpus: 8, gpu_type: h100 and processes: 8"):
        validate_experiment({**values, "plan": {"stages": {"train": {"gpus": {"h100": 8}}}}})
    validate_experiment({**values, "plan": {"stages": {"train": {"gpus": 8, "processes": 8}}}})


def test_a_saved_inventory_stands_for_slurm(
    answers: Answers, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = survey()

    def no_slurm(*command: str, **keywords: object) -> str:
        raise AssertionError(f"Slurm was called: {command}")

    monkeypatch.setattr(SlurmClient, "run", no_slurm)
    values = compose("cluster=slurm")
    _, plan = validate_experiment(values, None, inventory)
    assert plan.stage_plan("train").partition is None
    wrong = {"stages": {"train": {"partition": "h200"}}}
    with pytest.raises(
        PlanError, match=r"stages\.train\.partition: no partition 'h200' here.*h100"
    ):
        validate_experiment({**values, "plan": wrong}, None, inventory)


def texts(section: type[Section]) -> list[str]:
    """The keys of a section whose value may be any text, so far as its type tells."""
    fields = section.model_fields.items()
    # A model of GPU is compared with those known, and goes into no script.
    return [k for k, field in fields if "str" in str(field.annotation) and k != "gpu_model"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (section, key)
        for section in (DriverJobConfig, StagePlan, PartitionSettings)
        for key in texts(section)
    ],
)
def test_text_that_would_not_stay_in_its_place_is_refused_under_every_key(
    section: type[Section], key: str
) -> None:
    """Lines for sbatch end at a line break; lines of shell and words of commands hold all else."""
    odd: dict[str, Any] = {
        "sbatch": {"comment": "a\ntouch x #"},
        "env": {"A;touch x": "1"},
        "setup": ["a\0"],
        "python": ["a\0"],
        "speed_weights": {"a100": 0},  # never text for a script, and here not valid either
        "duty_cycle": {"a100": 2},
    }
    with pytest.raises(ConfigError, match=rf"^section\.{key}\b"):
        validate(section, {key: odd.get(key, "a\ntouch x #")}, "section")


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ({"mem": "64G"}, r"set cluster\.driver\.mem_mb"),
        ({"mem_per_cpu": "8G"}, r"set cluster\.driver\.mem_mb"),
        ({"time": 600}, r"set cluster\.driver\.time_limit_min"),
        ({"cpus-per-task": 4}, r"set cluster\.driver\.cpus"),
        ({"partition": "cpu"}, r"set cluster\.driver\.partition"),
        ({"mail-user": "ada"}, r"set cluster\.driver\.mail"),
        ({"nodes": 2}, "one process without GPUs; leave nodes out"),
        ({"gres": "gpu:1"}, "one process without GPUs; leave gres out"),
        ({"account": "a"}, "beside sbatch; write account: a"),
    ],
)
def test_options_that_the_drivers_job_has_otherwise_are_refused_with_their_cure(
    option: dict[str, Any], cure: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.driver\.sbatch: .*{cure}"):
        validate(ClusterConfig, {"driver": {"sbatch": option}}, "cluster")


def test_whatever_the_drivers_job_may_be_given_is_in_its_script(answers: Answers) -> None:
    names = {
        *option_names._SIZE_OPTIONS,
        *option_names._PLACEMENT_OPTIONS,
        *option_names._RESERVED_OPTIONS,
        *option_names._SITE_KEYS,
        "comment",
        "nice",
    }
    chosen = 0
    for name in sorted(names):
        driver = {"mail": "ada", "sbatch": {name: "7"}}
        try:
            cluster = validate(ClusterConfig, {"driver": driver}, "cluster")
        except ConfigError:
            continue
        written = sbatch_options("driver", driver_resources(cluster, Plan(), survey()))
        assert written[name] == "7", name
        chosen += 1
    assert chosen > 20


@pytest.mark.parametrize(
    "cluster",
    [{"env": {"A B": "1"}}, {"network_interface": "ib0\0"}, {"notify_command": ["tell", "\0"]}],
)
def test_what_no_command_can_be_given_is_refused(cluster: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.{next(iter(cluster))}\b"):
        validate(ClusterConfig, cluster, "cluster")


def test_a_device_of_a_pool_is_one_line() -> None:
    with pytest.raises(PlanError, match=r"pools\.0\.devices\.gpu\n.*control character"):
        pools({"stages": ["rollout"], "devices": {"gpu\nb": 1}})


def test_a_folder_that_slurm_would_read_otherwise_is_refused_before_it_is_made(
    answers: Answers, compose: Compose, tmp_path: Path
) -> None:
    values = compose("cluster=slurm")
    values["run"]["root"] = str(tmp_path / "50%j")
    with pytest.raises(PlanError, match=r"run\.root.*contains %"):
        prepare_run(values)
    assert not (tmp_path / "50%j").exists()
