"""Rollouts whose policy is in other workers than their simulators: the same, whatever dies."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.experiment import prepare_run, run_experiment, validate_experiment
from pipeline.commands.workflow import Workflow
from pipeline.plan import parse_plan
from pipeline.planning.planner.planner import assess_plan
from pipeline.resume import OnMismatch
from pipeline.validate_config import check_separate_policy
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record
from rlinf.errors import EXIT_BAD_INPUT, PlanError, RlinfError
from rlinf.hydra_config import force_add
from stages.flow import get_flow, on_policy
from tests.conftest import QUIET
from tests.pipeline.helpers import contents, output, start_driver, until
from tests.pipeline.planning.planner.test_propose import ask
from tests.pipeline.pools.test_executor import _hydra, rows, workers

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
LATER = ["reward", "inference", "train"]
ITERATIONS = 3
SMALL = [
    *(f"iterations={ITERATIONS}", "rollout.batch_size=8", "rollout.horizon=32"),
    *("algorithm.minibatches=2", "algorithm.epochs=2"),
    *("evaluate.every=1", "evaluate.samples=4", "evaluate.horizon=16"),
]
GOES_ON = ["task.carry_over_episodes=true", "task.double_buffer=true"]


def pools(*held: tuple[list[str], int]) -> dict[str, Any]:
    """A plan by the stages and processes of its pools."""
    sizes = {stage: count for stages, count in held for stage in stages}
    return {
        "stages": {
            stage: {"processes": count} for stage, count in sizes.items() if stage != "reward"
        },
        "pools": [{"stages": stages, "devices": {"local": count}} for stages, count in held],
    }


APART = pools((["rollout"], 1), (["rollout.generate", *LATER], 1))
THREE = pools(
    (["sft", "rollout", "reward"], 2), (["rollout.generate"], 1), (["inference", "train"], 1)
)
MANY = pools((["rollout"], 3), (["rollout.generate"], 2), (LATER, 1))
BESIDE = {
    "stages": {stage: {"processes": 2} for stage in ("rollout", "inference", "train")},
    "pools": [
        {
            "stages": ["rollout", "rollout.generate", *LATER],
            "devices": {"local": 2},
            "stage_ranks": {"rollout": [0], "rollout.generate": [1]},
        }
    ],
}


@pytest.fixture(scope="module", autouse=True)
def same_kernels() -> Iterator[None]:
    """Processes of this module compute with kernels whose results do not depend on batch sizes.

    By default, MKL on a CPU from Intel rounds a row of a product differently in batches of other
    sizes, and the processes of a plan have smaller batches than one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, same_kernels: None) -> Callable[..., Path]:
    """Runs, left alone, in one process."""
    root, made = tmp_path_factory.mktemp("references"), dict[tuple[str, ...], Path]()

    def reference(*words: str) -> Path:
        if words not in made:
            name = f"reference-{len(made)}"
            place = [f"run.root={root}", f"run.name={name}"]
            command = [force_add(word) for word in ("experiment=cartpole_ppo", *SMALL, *words)]
            driver = start_driver([*command, *QUIET, *place], root / "log")
            assert driver.wait(timeout=280) == 0, (root / "log").read_text()
            made[words] = root / name
        return made[words]

    return reference


def run_apart(
    compose: Compose, plan: dict[str, Any], *words: str, experiment: str = "cartpole_ppo"
) -> None:
    values = compose(*SMALL, *words, "run.name=apart", experiment=experiment)
    run_experiment(values | {"plan": plan, "cluster": {"launcher": "local"}})


def records(run: Path, iteration: int) -> list[Record]:
    _, data = output(run, "it", f"{iteration:04d}", "rollout")
    return list(RecordFileReader(data.glob("trajectories-r*.h5")))


def assert_same_but_for_files(run: Path, reference: Path) -> None:
    """The same records, metrics and weights; each process of a stage has its own files."""
    for iteration in range(ITERATIONS):
        ours, theirs = (records(folder, iteration) for folder in (run, reference))
        assert [record.digest() for record in ours] == [record.digest() for record in theirs]
    ours, theirs = (
        {name: digest for name, digest in contents(folder).items() if "sync" in name}
        for folder in (run, reference)
    )
    assert ours == theirs
    for one, other in zip(rows(run), rows(reference), strict=True):
        same = [name for name in one if name.startswith(("train", "reward", "inference", "eval"))]
        assert same
        assert {n: one[n] for n in same} == pytest.approx({n: other[n] for n in same}, rel=1e-12)


def test_simulators_and_policy_in_pools_of_their_own_give_the_bytes_of_one_process(
    references: Callable[..., Path], compose: Compose, tmp_path: Path
) -> None:
    run_apart(compose, APART, *GOES_ON)
    assert contents(tmp_path / "apart") == contents(references(*GOES_ON))
    for stage in (("it", "0001", "rollout"), ("evaluate", "0002")):
        spans = output(tmp_path / "apart", *stage)[0].timing["spans"]
        by = {(span["worker"], span["name"]) for span in spans}
        assert ("pool-1-0-r0", "generate") in by, "who has the policy answers"
        assert ("pool-0-0-r0", "load") not in by, "who has the simulators loads none"


@pytest.mark.parametrize("plan", [THREE, pytest.param(MANY, marks=pytest.mark.slow)])
def test_several_processes_of_each_give_the_records_of_one_process(
    references: Callable[..., Path], compose: Compose, tmp_path: Path, plan: dict[str, Any]
) -> None:
    run_apart(compose, plan)
    assert_same_but_for_files(tmp_path / "apart", references())


def test_side_by_side_in_one_job_they_end_as_in_one_process(
    references: Callable[..., Path], compose: Compose, tmp_path: Path
) -> None:
    """Both processes train, which sums in another order."""
    run_apart(compose, BESIDE)
    run, reference = tmp_path / "apart", references()
    ours, theirs = (records(folder, 0) for folder in (run, reference))
    assert [record.digest() for record in ours] == [record.digest() for record in theirs]
    for one, other in zip(rows(run), rows(reference), strict=True):
        same = [name for name in one if name.startswith(("train", "reward", "inference", "eval"))]
        assert {n: one[n] for n in same} == pytest.approx({n: other[n] for n in same}, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("cartpole_ppo", ["algorithm=async_ppo"]),
        (
            "halfcheetah_ppo",
            [
                "algorithm=dapo",
                *("rollout.max_resamples=1", "rollout.group_size=2"),
            ],
        ),
    ],
)
def test_rollouts_that_run_ahead_or_draw_anew_give_the_same_bytes(
    compose: Compose, tmp_path: Path, experiment: str, words: list[str]
) -> None:
    run_experiment(compose(*SMALL, *words, "run.name=one", experiment=experiment))
    run_apart(compose, APART, *words, experiment=experiment)
    assert contents(tmp_path / "apart") == contents(tmp_path / "one")


@pytest.mark.slow
def test_newer_weights_come_to_the_policy_in_a_rollout(compose: Compose, tmp_path: Path) -> None:
    """Which ones chose a step depends on timing."""
    words = ["algorithm=async_ppo", "rollout.in_flight_updates=true", "evaluate.every=0"]
    run_apart(compose, APART, *words, "checkpoint.keep_trajectories=9")
    for iteration in range(ITERATIONS):
        for record in records(tmp_path / "apart", iteration):
            versions = record.steps["versions"].tolist()
            assert versions == sorted(versions)
            assert {max(0, iteration - 1), iteration} >= set(versions)


LONG = ["rollout.horizon=300", "evaluate.every=0"]


def words_of(root: Path, plan: dict[str, Any], *more: str) -> list[str]:
    """The command line of a driver."""
    words = ["experiment=cartpole_ppo", f"run.root={root}", "run.name=apart", "log.trackers=[]"]
    words += [
        "cluster=local",
        "cluster.poll_interval_s=0.2",
        "cluster.max_retries=3",
        f"plan={_hydra(plan)}",
    ]
    return [*words, *SMALL, *more]


def began(run: Path, iteration: int) -> bool:
    """Whether a rollout is under way."""
    return any((run / f"it/{iteration:04d}/rollout").glob("data-*"))


POOLS = ("pool-0-0", "pool-1-0")


@pytest.mark.parametrize(
    ("plan", "victim", "seed"),
    [
        *((APART, pool, 0) for pool in POOLS),
        *(pytest.param(APART, p, n, marks=pytest.mark.slow) for p in POOLS for n in (1, 2)),
        *(pytest.param(THREE, pool, 3, marks=pytest.mark.slow) for pool in POOLS),
    ],
)
def test_killing_simulators_or_policy_in_a_rollout_changes_nothing(
    references: Callable[..., Path], tmp_path: Path, plan: dict[str, Any], victim: str, seed: int
) -> None:
    run, log, chance = tmp_path / "apart", tmp_path / "log", random.Random(seed)
    driver = start_driver(words_of(tmp_path, plan, *LONG), log)
    until(lambda: began(run, 1), driver, log)
    time.sleep(chance.uniform(0.0, 0.5))
    chance.choice([one for one in workers(run) if victim in one.cmdline()]).kill()
    assert driver.wait(timeout=200) == 0, log.read_text()
    assert "killed by SIGKILL" in log.read_text()
    if plan is APART:
        assert contents(run) == contents(references(*LONG))
    else:
        assert_same_but_for_files(run, references(*LONG))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killing_the_driver_in_a_rollout_changes_nothing(
    references: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    """Locally workers end with it; the next one orders the rollout anew."""
    run, log, chance = tmp_path / "apart", tmp_path / "log", random.Random(seed)
    for iteration in (0, 1):
        driver = start_driver(words_of(tmp_path, APART, *LONG), log)
        until(lambda at=iteration: began(run, at), driver, log)
        time.sleep(chance.uniform(0.0, 0.5))
        driver.kill()
        driver.wait()
    driver = start_driver(words_of(tmp_path, APART, *LONG), log)
    assert driver.wait(timeout=200) == 0, log.read_text()
    assert contents(run) == contents(references(*LONG))


def refused(compose: Compose, plan: dict[str, Any], *words: str, experiment: str) -> str:
    with pytest.raises(RlinfError) as error:
        validate_experiment(
            {**compose("cluster=local", *words, experiment=experiment), "plan": plan}
        )
    assert error.value.exit_code == EXIT_BAD_INPUT
    return str(error.value)


BOTH = ["rollout", "rollout.generate", *LATER]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            pools((["rollout"], 1), (["rollout.genrate", *LATER], 1)),
            r"plan\.stages: unknown stage 'rollout\.genrate'; did you mean 'rollout\.generate'",
        ),
        (
            {"stages": {"rollout.generate": {"gpus": 1}}},
            r"plan\.stages\.rollout\.generate: without pools, .* in one process",
        ),
        (
            pools((["rollout", *LATER], 1)) | {"stages": {"rollout.generate": {"cpus": 2}}},
            r"plan\.stages\.rollout\.generate: no pool holds it; name it in the stages of one",
        ),
        (pools((["rollout.generate", *LATER], 1)), "plan.pools: no pool holds rollout"),
        (
            {
                "pools": [
                    {"stages": ["rollout"], "devices": {"local": 1}, "workers": 1},
                    {"stages": ["rollout.generate", *LATER], "devices": {"local": 1}},
                ],
            },
            r"plan\.pools\[0\]\.workers: elastic workers have .*; remove workers",
        ),
        (
            pools((BOTH, 1)),
            r"plan\.pools\[0\]\.stage_ranks: rollout and rollout\.generate in one pool need ",
        ),
        (
            {
                "pools": [
                    {
                        "stages": BOTH,
                        "devices": {"local": 2},
                        "stage_ranks": {"rollout": [0], "rollout.generate": [1], "evaluate": [1]},
                    }
                ],
                "defaults": {"processes": 2},
            },
            r"plan\.pools\[0\]\.stage_ranks: evaluate and rollout\.generate in one pool need ",
        ),
        (
            pools((["rollout"], 1), (["rollout.generate", *LATER], 2))
            | {"stages": {"rollout.generate": {"processes": 2, "layout": {"tp": 2}}}},
            r"plan\.stages\.rollout\.generate\.layout: each of its processes holds a whole",
        ),
    ],
)
def test_what_a_plan_cannot_place_apart_is_refused(
    compose: Compose, plan: dict[str, Any], message: str
) -> None:
    assert re.search(message, refused(compose, plan, experiment="cartpole_ppo"))


def test_a_task_without_simulators_has_nothing_to_place_apart(compose: Compose) -> None:
    result = refused(compose, APART, experiment="arithmetic_grpo")
    assert "rollout.generate: task 'arithmetic' has no simulators" in result


def test_an_own_evaluation_without_remote_policy_is_not_placed_with_the_simulators(
    compose: Compose,
) -> None:
    config = validate(RunConfig, compose(experiment="cartpole_ppo"))
    evaluate = replace(on_policy.evaluate, module="stages.reward")
    flow = replace(on_policy, evaluate=evaluate)
    with pytest.raises(
        PlanError, match=r"has no 'policy_runner'.*evaluate in another pool than rollout"
    ):
        check_separate_policy(config, parse_plan(APART, "plan", flow))
    own = pools((["rollout"], 1), (["rollout.generate", *LATER], 1), (["evaluate"], 1))
    check_separate_policy(config, parse_plan(own, "plan", flow))


def test_a_flow_without_rollouts_has_nothing_to_place_apart() -> None:
    plan = pools((["rollout.generate", "train"], 1))
    with pytest.raises(PlanError, match=r"'rollout\.generate': this flow collects nothing"):
        parse_plan(plan, "plan", get_flow("offline"))


def test_snakemake_does_not_make_whole_jobs_of_what_a_plan_places_apart(
    compose: Compose, tmp_path: Path
) -> None:
    values = compose("cluster=local", "run.name=flow", experiment="cartpole_ppo")
    run = prepare_run(values | {"plan": APART})
    with pytest.raises(PlanError, match=r"rollout\.generate: Snakemake runs .*rlinf run"):
        Workflow(run, OnMismatch.ERROR)


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("cartpole_ppo", r"plan\.yaml: .*rollout\.generate: the plan can be run, .* not predicted"),
        ("arithmetic_grpo", r"rollout\.generate: task 'arithmetic' has no simulators"),
    ],
)
def test_the_planner_knows_such_a_plan_and_says_that_it_predicts_none(
    compose: Compose, experiment: str, message: str
) -> None:
    config = validate(RunConfig, compose("rollout.batch_size=16", experiment=experiment))
    held = (["rollout"], "h100"), (["rollout.generate", *LATER], "a100")
    pools = [{"stages": stages, "devices": {kind: 1}} for stages, kind in held]
    plan = parse_plan({"pools": pools}, "plan.yaml")
    with pytest.raises(PlanError, match=message):
        assess_plan(ask(config, "a100", "h100", execution="pools"), plan, "plan.yaml")
