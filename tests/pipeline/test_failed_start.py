"""A start that fails before a stage is finished does not block the corrected command."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.experiment import drive, prepare_run, run_experiment
from pipeline.run import Run
from rlinf.errors import InputError, MismatchError
from stages.layout import CONFIG_FILE, PLAN_FILE, RUN_FILE
from tests.pipeline.helpers import contents
from tests.pipeline.test_orders import forget_code

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
SMALL = [
    "iterations=2",
    "rollout.batch_size=2",
    "rollout.horizon=8",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "evaluate.samples=2",
    "evaluate.horizon=4",
    "run.name=first",
]
POLICY = """
from rlinf.models.actor_critic import MLPPolicy

class Picky(MLPPolicy):
    @classmethod
    def create(cls, config, spec, seed, folder):
        if config.hidden != (8,):
            raise ValueError("cannot be loaded so")
        super().create(config, spec, seed, folder)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the user's modules."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return folder


def small(compose: Compose, *words: str) -> dict[str, Any]:
    return compose(*SMALL, *words, experiment="cartpole_ppo")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task.observation=5", "task.observation: 5 is not what CartPole-v1 has; set it to 4"),
        ("task.action={kind: discrete, size: 3}", "task.action: "),
        ("task.id=CartPoll-v1", "CartPoll"),
        ("reward.name=no_such_module:Mine", "reward.name: no module"),
        ("model.path=/nowhere", "model.path"),
    ],
)
def test_what_can_be_seen_before_is_refused_before_the_folder_is_made(
    compose: Compose, tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_experiment(small(compose, word))
    assert not (tmp_path / "first").exists()


def test_a_policy_that_cannot_be_made_does_not_block_the_corrected_command(
    compose: Compose, own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "picky.py").write_text(POLICY)
    words = ["model.name=picky:Picky", "cluster.max_retries=0"]
    with pytest.raises(Exception, match="cannot be loaded so"):
        run_experiment(
            small(compose, *words, "model.hidden=[4]", "optimizer.lr=0.5", "iterations=3")
        )
    run = tmp_path / "first"
    failed = json.loads((run / RUN_FILE).read_text())["id"]
    caplog.set_level(logging.WARNING, "rlinf")
    corrected = small(compose, *words, "model.hidden=[8]")
    prepare_run(corrected)
    (line,) = [r.getMessage() for r in caplog.records if "is replaced" in r.getMessage()]
    assert "nothing was finished there" in line
    assert "model.hidden: [4] -> [8]" in line
    run_experiment(corrected)
    run_experiment(small(compose, *words, "model.hidden=[8]", "run.name=fresh"))
    assert contents(run) == contents(tmp_path / "fresh")
    found, fresh = (Run.open(tmp_path / name).config for name in ("first", "fresh"))
    assert found.semantic_values() == fresh.semantic_values(), (
        "the schedule spans the new iterations too"
    )
    assert json.loads((run / RUN_FILE).read_text())["id"] != failed


def test_a_frozen_configuration_that_was_mended_by_hand_is_resumed(
    compose: Compose, own: Path, tmp_path: Path
) -> None:
    (own / "picky.py").write_text(POLICY)
    words = ["model.name=picky:Picky", "cluster.max_retries=0", "model.hidden=[4]"]
    with pytest.raises(Exception, match="cannot be loaded so"):
        run_experiment(small(compose, *words))
    path = tmp_path / "first" / CONFIG_FILE
    values = yaml.safe_load(path.read_text())
    values["model"]["hidden"] = [8]
    path.write_text(yaml.safe_dump(values))
    drive(Run.open(tmp_path / "first"))
    drive(Run.open(tmp_path / "first"))
    assert "it/0001/sync" in contents(tmp_path / "first")


def test_the_plan_of_a_failed_start_is_not_that_of_the_corrected_command(
    compose: Compose, tmp_path: Path
) -> None:
    path = tmp_path / "first" / PLAN_FILE
    prepare_run(small(compose))
    usual = path.read_text()
    prepare_run({**small(compose), "plan": {"defaults": {"cpus": 1, "mem_mb": 900}}})
    assert yaml.safe_load(path.read_text())["defaults"]["mem_mb"] == 900
    prepare_run(small(compose))
    assert path.read_text() == usual
    assert Run.open(path.parent).config.plan is None
    own = "# by hand\ndefaults: {cpus: 1, mem_mb: 1500}\n"
    path.write_text(own)
    prepare_run(small(compose))
    assert path.read_text() == own, "nobody named another"


def test_a_start_that_was_killed_lends_its_identity_to_no_other(
    compose: Compose, tmp_path: Path
) -> None:
    """It had written ``run.json``, but no configuration."""
    prepare_run(small(compose, "seed=1"))
    prepare_run(small(compose, "seed=2", "run.name=fresh"))
    (tmp_path / "first" / CONFIG_FILE).unlink()
    prepare_run(small(compose, "seed=2"))
    found, fresh = (
        json.loads((tmp_path / name / RUN_FILE).read_text()) for name in ("first", "fresh")
    )
    assert found["id"] == found["config_digest"] == fresh["id"]


def test_a_damaged_configuration_of_a_failed_start_is_replaced(
    compose: Compose, tmp_path: Path
) -> None:
    run = prepare_run(small(compose, "optimizer.lr=0.5"))
    (run.folder / CONFIG_FILE).write_bytes(b"\xff")
    assert prepare_run(small(compose)).config.optimizer.lr == pytest.approx(1e-3)


def test_a_later_stage_that_fails_does_not_block_what_it_needs(
    compose: Compose, own: Path, tmp_path: Path
) -> None:
    """SFT and a rollout are finished, and do not depend on what is corrected."""
    forget_code()
    text = "from rlinf.rewards.task_rewards import EnvironmentReward\n"
    text += "class Mine(EnvironmentReward):\n    def compute(self, trajectories, scores):\n"
    text += "        if self.config.scale != 1: raise ValueError('no such scale')\n"
    text += "        return super().compute(trajectories, scores)\n"
    (own / "reward_of_orders.py").write_text(text)
    words = ["reward.name=reward_of_orders:Mine", "cluster.max_retries=0"]
    with pytest.raises(Exception, match="no such scale"):
        run_experiment(small(compose, *words, "reward.scale=2.0"))
    before = contents(tmp_path / "first")
    assert before
    run_experiment(small(compose, *words, "reward.scale=1.0"))
    after = contents(tmp_path / "first")
    assert {name: after[name] for name in before} == before
    with pytest.raises(MismatchError, match=r"reward\.scale: 1\.0 -> 2\.0"):
        run_experiment(small(compose, *words, "reward.scale=2.0"))
    forget_code()
