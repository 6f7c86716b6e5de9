"""``rlinf evaluate`` scores robot policies on suites whose protocol is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.cli import app
from pipeline.commands.evaluate import (
    SUITE_FOLDER,
    read_robot_suite,
    save_result,
    show_comparison,
    show_result,
)
from pipeline.commands.evaluate_robot import compose_suite, run_robot_evaluation
from pipeline.commands.experiment import compose_words, drive, prepare_run, run_experiment
from pipeline.evaluation.results import EvaluationResult, read_evaluation
from rlinf.channels.record_files import RecordFileReader
from rlinf.envs.simulators.libero import SUITE_STEPS, TASK_SETS
from rlinf.envs.simulators.requirements import get_requirements
from rlinf.errors import ConfigError
from rlinf.models.smolvla import SmolVLAPolicy
from rlinf.models.smolvla_folder import SmolVLAConfig
from tests.pipeline.evaluation.test_policy_check import POLICIES, SPEC, SUITE

SUITES = sorted(p.stem for p in SUITE_FOLDER.glob("*.yaml") if read_robot_suite(p.stem))
LAMP_SPEC: dict[str, Any] = {
    "observation": 3,
    "action": SPEC["action"],
    "images": {"front": [16, 24]},
    "instruction": True,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    cls, config = POLICIES["smolvla"]
    cls.create(config, SPEC, 0, folder)
    return folder


@pytest.fixture(scope="module")
def lamp_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lamps")
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 48}
    vision = {"vision_hidden": 16, "vision_heads": 2, "image_size": 28, "patch_size": 7}
    config = SmolVLAConfig(**sizes, **vision, chunk_size=2)
    SmolVLAPolicy.create(config, LAMP_SPEC, 0, folder)
    return folder


def evaluated(policy: Path, root: Path, *words: str, protocol: int = 8) -> Any:
    """The run directory and the results of a small suite of lamps."""
    task = ["task.name=gym", "task.simulator=tests.pipeline.commands.lamp_worlds:make"]
    task += ["task.id=LAMPS", "task.images={front: [16, 24]}", "task.instruction=true"]
    task += ["task.score_by_success=true", "evaluate.horizon=6", "evaluate.temperature=1e-4"]
    base = ["experiment=evaluation", "engine=direct", "model=smolvla", f"model.path={policy}"]
    base += ["evaluate.samples=8", "evaluate.videos=2", "evaluate.video_episodes=worst"]
    values = compose_words([*base, *task, f"run.root={root}", "run.name=lamps", *words])
    run = prepare_run(values)
    drive(run)
    return run, read_evaluation(run, "lamps", protocol)


def test_a_suite_has_results_by_task_and_videos_of_its_worst_episodes(
    lamp_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av", reason="the extra 'video' is not installed")
    run, result = evaluated(lamp_policy, tmp_path)
    suite = result.suites["lamps"]
    assert [(e.task, e.initial_state, e.score) for e in suite.episodes] == [
        (task, state, float(task == "left" and state % 2 == 1))
        for state in range(4)
        for task in ("left", "right")
    ]
    assert [e.steps for e in suite.episodes] == [3 if e.score else 6 for e in suite.episodes]
    assert [(t.task, t.instruction, tuple(t.success)) for t in suite.tasks] == [
        ("left", "turn on the left lamp", (2, 4)),
        ("right", "turn on the right lamp", (0, 4)),
    ]
    assert suite.success is not None
    assert tuple(suite.success) == (2, 8)
    assert not suite.is_partial
    # The first ones of those that failed.
    assert [Path(v).name for v in suite.videos] == ["0000-front.mp4", "0001-front.mp4"]
    assert all((run.folder / video).is_file() for video in suite.videos)
    (file,) = run.folder.glob("evaluate/0000/data-*/trajectories-r*.h5")
    assert not any("images" in name for r in RecordFileReader([file]) for name in r.steps)
    save_result(run.folder, result)
    assert EvaluationResult.load(run.folder) == result
    page = (run.folder / "report" / "evaluation.html").read_text()
    assert f'src="../{suite.videos[0]}"' in page
    assert "turn on the right lamp" in page
    assert "right, initial state 0, score 0 (front)" in page
    assert result.model_digest in page
    assert suite.protocol_digest in page
    show_result(result)
    shown = capsys.readouterr().out
    assert "25.0" in shown
    assert "7.1 to 59.1" in shown
    assert "partial" not in shown


def test_worst_episodes_have_videos_wherever_they_are(lamp_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra 'video' is not installed")
    words = ["task.id=left", "evaluate.samples=4", "task.max_parallel_envs=1"]
    _, result = evaluated(lamp_policy, tmp_path, *words, "evaluate.videos=3")
    names = [Path(video).name for video in result.suites["lamps"].videos]
    # Two failed, and of those that succeeded there is the first.
    assert names == ["0000-front.mp4", "0001-front.mp4", "0002-front.mp4"]


def test_chains_have_a_mean_length_and_shares(
    lamp_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task.score_by_success=false", "task.id=left", "task.kwargs={chain: true}"]
    words += ["evaluate.samples=4", "evaluate.videos=0"]
    _, result = evaluated(lamp_policy, tmp_path, *words)
    suite = result.suites["lamps"]
    assert [episode.score for episode in suite.episodes] == [0, 1, 2, 3]
    assert suite.average.mean == 1.5
    assert [tuple(share) for share in suite.chain_success] == [(n, 4) for n in (3, 2, 1, 0, 0)]
    assert suite.success is None
    assert suite.is_partial
    show_result(result)
    shown = capsys.readouterr().out
    assert "average length 1.50" in shown
    assert "lamps: partial, 4 of 8 episodes" in shown


def test_evaluations_are_compared_by_episode(
    lamp_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("one", "two"):
        run, result = evaluated(lamp_policy, tmp_path, "evaluate.videos=0", f"run.name={name}")
        save_result(run.folder, result)
        folders.append(run.folder)
    comparison = show_comparison(*folders)["lamps"]
    assert comparison.difference.mean == 0
    assert "+0.0 points" in capsys.readouterr().out
    words = ["evaluate.videos=0", "run.name=part", "evaluate.samples=4"]
    run, result = evaluated(lamp_policy, tmp_path, *words)
    save_result(run.folder, result)
    with pytest.raises(ConfigError, match=r"lamps: .*not comparable.* differ in episodes"):
        show_comparison(folders[0], run.folder)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (r"task.images.agentview=[128, 128]", r"task\.images\.agentview: \[128, 128\], and the"),
        ("task.kwargs.rest=0", r"task\.kwargs\.rest: 0, and the protocol of libero_spatial has 10"),
        ("task.kwargs.steps=600", r"task\.kwargs\.steps: 600, .* has 220"),
        ("task.kwargs.benchmark_images=false", r"task\.kwargs\.benchmark_images: False"),
        ("task.ignore_terminations=true", r"task\.ignore_terminations: True, .* has None"),
        ("task.id=libero_spatial/0", r"task\.id: libero_spatial/0, .* has libero_spatial;"),
        ("evaluate.horizon=100", r"evaluate\.horizon: 100, .* has 220"),
        ("evaluate.temperature=1", r"evaluate\.temperature: 1, .* has 0\.0001"),
        ("evaluate.samples=20", r"evaluate\.samples: 20, .* has 500; --episodes N runs only a"),
    ],
)
def test_a_changed_protocol_is_refused(policy: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_suite(policy, SUITE, [word])


def test_what_changes_no_result_may_be_set(policy: Path) -> None:
    words = ["task.num_processes=1", "task.max_parallel_envs=5", "task.kwargs.assets=/assets"]
    words += ["~task.images.robot0_eye_in_hand", "evaluate.videos=0", "engine.device=cpu"]
    _, values = compose_suite(policy, SUITE, words, episodes=20)
    assert values["task"]["max_parallel_envs"] == 5
    assert list(values["task"]["images"]) == ["agentview"]
    assert values["evaluate"]["samples"] == 20


def test_the_tasks_of_a_suite_have_equally_many_episodes(policy: Path) -> None:
    message = r"--episodes 25: libero_spatial has 10 tasks, .* set a multiple of 10"
    with pytest.raises(ConfigError, match=message):
        compose_suite(policy, SUITE, [], episodes=25)


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("calvin_abc_d", r"task\.kwargs\.folder: is not set, and calvin_abc_d needs it; give a cl"),
        ("maniskill_ood", r"task\.kwargs\.module: is not set, .*PutOnPlateInScene25"),
    ],
)
def test_files_that_no_package_has_are_named(policy: Path, suite: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_robot_evaluation(policy, suite, [])


def test_policies_without_a_folder_are_refused(tmp_path: Path) -> None:
    words = [
        "experiment=cartpole_ppo",
        "iterations=0",
        "evaluate.samples=1",
        f"run.root={tmp_path}",
    ]
    run_experiment(compose_words([*words, "run.name=cart", "log.trackers=[]"]))
    with pytest.raises(ConfigError, match=r"cart: model\.name is mlp, and suites are for"):
        compose_suite(tmp_path / "cart", SUITE, [])


def test_a_run_is_evaluated_with_the_options_of_its_policy(
    lamp_policy: Path, tmp_path: Path
) -> None:
    words = ["evaluate.videos=0", "model.camera_map={front: front}", "model.denoising_steps=3"]
    run, _ = evaluated(lamp_policy, tmp_path, *words)
    _, values = compose_suite(run.folder, SUITE, ["model.value_level=action"])
    model = values["model"]
    assert model["name"] == "smolvla"
    assert model["camera_map"] == {"front": "front"}
    assert model["denoising_steps"] == 3
    assert model["value_level"] == "action"
    assert Path(model["path"]).parent.parent.parent == run.folder


def test_options_of_robot_tasks_need_such_a_suite(policy: Path) -> None:
    for option in (["--check"], ["--episodes", "20"]):
        done = CliRunner().invoke(app, ["evaluate", str(policy), "--data", "x.jsonl", *option])
        assert str(done.exception).startswith(option[0])
    suites = ["--suite", SUITE, "--suite", "gsm8k=x.jsonl"]
    done = CliRunner().invoke(app, ["evaluate", str(policy), *suites])
    assert "which is evaluated alone" in str(done.exception)


@pytest.mark.parametrize("suite", SUITES)
def test_each_suite_is_a_valid_task(policy: Path, suite: str) -> None:
    protocol = read_robot_suite(suite)
    assert protocol is not None
    task = protocol["task"]
    sets = get_requirements(task["simulator"]).task_sets
    num_tasks = len(sets.get(task["id"], (task["id"],)))
    assert protocol["evaluate"]["samples"] % num_tasks == 0
    if suite in SUITE_STEPS:
        assert task["kwargs"]["steps"] == SUITE_STEPS[suite] == protocol["evaluate"]["horizon"]
        assert protocol["evaluate"]["samples"] == 50 * num_tasks
    if suite == "libero_130":
        assert len(TASK_SETS["libero_130"]) == 130 == len(np.unique(TASK_SETS["libero_130"]))
