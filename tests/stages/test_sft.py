"""SFT stops at the configured step or score, however often it is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import SftSection
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from stages import sft
from stages.sft import fine_tune


class Task:
    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        seen = np.full((2, 1), step, np.float32)
        return [
            Trajectory(identity=RecordId(step, n), observations=seen, actions=seen)
            for n in range(count)
        ]


class Policy:
    tracks_observations = True

    def __init__(self) -> None:
        self.seen = list[float]()

    def prepare_demonstration(self, record: Trajectory, seed: int) -> Trajectory:
        return record

    def update_observation_stats(self, records: Sequence[Trajectory]) -> None:
        self.seen += [float(record.observations[0, 0]) for record in records]


class Trainer:
    """Counts its steps, which are its state."""

    def __init__(self) -> None:
        self.policy, self.steps = Policy(), 0

    def step(self, records: list[Trajectory], loss: Any, lr: float) -> dict[str, float]:
        assert self.policy.seen or self.steps, "it learns by the statistics that it goes on with"
        self.steps += 1
        return {"loss": 1.0}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "steps").write_text(str(self.steps))

    def load(self, folder: Path) -> None:
        self.steps = int((folder / "steps").read_text())


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = SftSection(
        max_steps=20, eval_every=2, target_score=0.4, batch_size=2, eval_generation=True
    )
    monkeypatch.setattr(sft, "get_environment", lambda *_: Task())
    monkeypatch.setattr(sft, "get_or_create_engine", lambda *_: object())
    monkeypatch.setattr(sft, "evaluate_weights", lambda ctx, trainer, *_: trainer.steps / 10)
    return SimpleNamespace(
        config=SimpleNamespace(seed=0, sft=settings),
        output_folder=tmp_path,
        key="key",
        world=ProcessGroupInfo(),
        report_progress=lambda *_: None,
    )


def test_one_that_had_reached_its_goal_is_not_trained_further(ctx: Any, tmp_path: Path) -> None:
    """The job may have died while it wrote the weights."""
    first, again = Trainer(), Trainer()
    curve: Any = fine_tune(ctx, first, tmp_path)  # type: ignore[arg-type]
    assert [row["score"] for row in curve] == [None, 0.2, None, 0.4]
    assert fine_tune(ctx, again, tmp_path) == curve  # type: ignore[arg-type]
    assert again.steps == first.steps == 4
    assert again.policy.seen == [], "statistics are part of what was loaded"


def test_a_step_that_overflowed_is_taken_again(ctx: Any, tmp_path: Path) -> None:
    """Of the same demonstrations, at the same rate."""
    requests = []

    class Overflows(Trainer):
        def step(self, records: list[Trajectory], loss: Any, lr: float) -> dict[str, float]:
            requests.append((records[0].identity.iteration, lr))
            if len(requests) in (1, 2, 4):
                return {"loss": 9.0, "skipped_steps": 1.0}
            return {**super().step(records, loss, lr), "skipped_steps": 0.0}

    trainer = Overflows()
    curve: Any = fine_tune(ctx, trainer, tmp_path)  # type: ignore[arg-type]
    assert trainer.steps == len(curve) == 4
    assert [row["loss"] for row in curve] == [1.0] * 4
    assert [step for step, _ in requests] == [0, 0, 0, 1, 1, 2, 3]
    rates = [rate for _, rate in requests]
    assert rates[0] == rates[1] == rates[2]
    assert rates[3] == rates[4]


def test_statistics_are_those_of_the_first_demonstrations(ctx: Any, tmp_path: Path) -> None:
    trainer = Trainer()
    fine_tune(ctx, trainer, tmp_path)  # type: ignore[arg-type]
    assert trainer.policy.seen == [step for step in range(20) for _ in range(2)]
