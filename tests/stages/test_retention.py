"""The best weights by held-out score stay, whatever comes after and however late scores are."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.artifacts import Manifest, commit_output, content_digest, is_pruned, prune_output
from rlinf.config import CheckpointSection, EvaluateSection, RunConfig
from stages.flow import EVALUATE
from stages.layout import setup_stage_folder, stage_folder
from stages.retention import RetentionPolicy, best_versions, best_weights, is_checkpoint_saved


def config_of(**retention: Any) -> RunConfig:
    named = {"name": "any"}
    parts = ("task", "model", "algorithm", "reward", "engine", "trainer")
    sections = dict.fromkeys(parts, named)
    return RunConfig.model_validate(
        {
            **sections,
            "run": {"name": "r", "root": "/r"},
            "iterations": 99,
            "rollout": {"batch_size": 1, "horizon": 1},
            "evaluate": EvaluateSection(every=1).model_dump(),
            "checkpoint": CheckpointSection(**retention).model_dump(),
        }
    )


def make(out: Path, stage: str, iteration: int, text: str, **more: Any) -> str:
    """Commit an output; returns the digest of its content."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    metrics = {"mark": float(len(text)), **more.pop("metrics", {})}
    content = content_digest({}, metrics)
    about: dict[str, Any] = {"timing": {}, "host": "", "job": ""}
    commit_output(
        out,
        Manifest(
            stage, iteration, text, content, "data", {}, more.get("inputs", {}), metrics, **about
        ),
    )
    return content


class Made:
    """A run of which only weights and evaluations are made."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self.run, self.config = run, config
        self.contents = {0: make(setup_stage_folder(run, "sft"), "sft", 0, "w")}

    def publish(self, iteration: int) -> None:
        for old in RetentionPolicy(self.config, self.run, iteration).expired_outputs():
            prune_output(old)
        for stage in ("train", "sync"):
            out = stage_folder(self.run, stage, iteration)
            self.contents[iteration + 1] = make(out, stage, iteration, "x" * (iteration + 2))

    def evaluate(self, version: int, score: float) -> None:
        out = stage_folder(self.run, EVALUATE, version)
        inputs = {"weights": self.contents[version]}
        make(out, EVALUATE, version, "e", metrics={"score": score}, inputs=inputs)

    def on_disk(self, stage: str = "sync") -> set[int]:
        outs = self.run.glob(f"it/*/{stage}")
        return {int(out.parent.name) + 1 for out in outs if not is_pruned(out)}


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=14),
    st.integers(0, 2),
)
def test_the_best_weights_are_always_on_disk(steps: list[tuple[int, int]], best: int) -> None:
    """Scores come up to two iterations late, as they do in pools."""
    with tempfile.TemporaryDirectory() as folder:
        made = Made(Path(folder), config_of(keep_last=1, keep_best=best))
        scores: dict[int, float] = {}
        due = [(0, 0, 1.0)]
        for iteration, (score, late) in enumerate(steps):
            made.publish(iteration)
            due.append((iteration + late, iteration + 1, float(score)))
            for when, version, value in [entry for entry in due if entry[0] <= iteration]:
                made.evaluate(version, value)
                scores[version] = value
                due.remove((when, version, value))
            found = best_weights(made.config, made.run)
            expected = best_versions(scores, 1)[0]
            assert found is not None
            assert (found.version, found.score) == (expected, scores[expected])
            assert found.folder is not None or not best
            assert set(best_versions(scores, best)) - {0} <= made.on_disk()
        made.publish(len(steps))
        newest = {len(steps), len(steps) + 1}
        pending = {version for _, version, _ in due}
        assert made.on_disk() == newest | pending | set(best_versions(scores, best)) - {0}
        assert made.on_disk("train") == newest | pending, "of the best the weights alone stay"


def test_adapters_of_the_best_weights_stay_too(tmp_path: Path) -> None:
    plain = config_of(keep_last=1)
    trainer = type(plain.trainer).model_validate({"name": "any", "lora": {"rank": 4}})
    made = Made(tmp_path, plain.model_copy(update={"trainer": trainer}))
    for iteration in range(6):
        made.publish(iteration)
        made.evaluate(iteration + 1, float(iteration == 1))
    assert made.on_disk("train") == made.on_disk("sync") == {2, 5, 6}


@pytest.mark.parametrize(
    ("lora", "keep_best", "saved"),
    [
        ({"rank": 4}, 1, {2, 4, 5, 6, 8, 10, 99}),
        ({"rank": 4}, 0, {5, 10, 99}),
        (None, 1, {5, 10, 99}),
    ],
)
def test_with_adapters_each_evaluated_version_has_a_checkpoint(
    lora: Any, keep_best: int, saved: set[int]
) -> None:
    plain = config_of(save_every=5, keep_best=keep_best)
    trainer = type(plain.trainer).model_validate({"name": "any", "lora": lora})
    config = plain.model_copy(update={"trainer": trainer, "evaluate": EvaluateSection(every=2)})
    versions = [*range(1, 12), config.iterations]
    assert {v for v in versions if is_checkpoint_saved(config, v - 1)} == saved


def test_weights_that_were_the_best_long_ago_are_removed(tmp_path: Path) -> None:
    made = Made(tmp_path, config_of(keep_last=1))
    made.publish(0)
    made.evaluate(1, 1.0)
    for iteration in range(1, 70):
        made.publish(iteration)
        made.evaluate(iteration + 1, 0.5)
    assert 1 in made.on_disk()
    made.publish(70)
    made.evaluate(71, 2.0)
    made.publish(71)
    assert made.on_disk() == {71, 72}


def test_a_score_of_weights_that_were_replaced_does_not_count(tmp_path: Path) -> None:
    made = Made(tmp_path, config_of(keep_last=1))
    made.publish(0)
    made.evaluate(1, 9.0)
    made.publish(1)
    made.evaluate(2, 1.0)
    shutil.rmtree(stage_folder(tmp_path, "sync", 0))
    make(stage_folder(tmp_path, "sync", 0), "sync", 0, "other weights")
    found = best_weights(made.config, tmp_path)
    assert found is not None
    assert found.version == 2
    for iteration in (2, 3, 4):
        made.publish(iteration)
    assert 1 in made.on_disk(), "its evaluation is still to come"


@pytest.mark.parametrize("scores", [{}, {1: None}])
def test_without_scores_there_are_no_best_weights(
    tmp_path: Path, scores: dict[int, float | None]
) -> None:
    assert best_versions(scores, 3) == []
    assert best_weights(config_of(), tmp_path) is None


def test_of_equal_scores_the_earliest_is_the_best() -> None:
    assert best_versions({0: 0.1, 4: 0.5, 2: 0.5, 6: None}, 2) == [2, 4]
