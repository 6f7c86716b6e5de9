"""A run that trains is evaluated on several sets, each by its protocol; the score is their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import prepare_run, run_experiment
from pipeline.metrics import stage_manifest
from pipeline.run import read_problem_sets
from pipeline.validate_config import load_components
from rlinf.channels.record_files import RecordFileReader
from rlinf.config import RunConfig, validate
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from stages.factory import required_context
from stages.identity import CodeSnapshot
from tests.rlinf.envs.test_multiple_choice import ROWS, write

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def values(compose: Compose, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Compose a short run on a file of problems that is evaluated on two other files."""
    model = tmp_path / "model"
    model.mkdir()
    config = CausalLMConfig(
        architecture="llama", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64
    )
    CausalLM.create(config, {"alphabet": "".join(map(chr, range(32, 127))) + "\n"}, 0, model)
    sums = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    train = write(tmp_path / "train.jsonl", sums)
    held_out = write(tmp_path / "held_out.jsonl", sums[5:])
    choices = write(tmp_path / "choices.jsonl", ROWS[:4])

    def make(*words: str) -> dict[str, Any]:
        return compose(
            f"model.path={model}",
            f"task.train={train}",
            f"task.test={train}",
            "task.allow_train_test_overlap=true",
            "task.prompt_template='{prompt}'",
            "run.name=sets",
            "iterations=1",
            "rollout.batch_size=2",
            "rollout.group_size=2",
            "rollout.horizon=4",
            "evaluate.every=1",
            f"evaluate.sets.sums={{task: {{name: jsonl, test: {held_out}}}, horizon: 5}}",
            f"evaluate.sets.choices={{task: {{name: multiple_choice, test: {choices}}}, "
            "samples_per_problem: 2, horizon: 9, temperature: 1.0}",
            *words,
            experiment="jsonl_grpo",
        )

    return make


@pytest.mark.usefixtures("undrawn")
def test_every_version_is_scored_on_every_set(
    values: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run_experiment(values())
    for version in (0, 1):
        manifest = stage_manifest(tmp_path / "sets", "evaluate", version)
        assert manifest is not None
        files = (tmp_path / "sets/evaluate" / f"{version:04d}" / manifest.data).glob("*.h5")
        samples = [Trajectory.from_record(record) for record in RecordFileReader(files)]
        assert sorted(str(sample.task) for sample in samples) == ["choices"] * 8 + ["sums"] * 3
        assert {len(s) <= (5 if s.task == "sums" else 9) for s in samples} == {True}
        sets = [manifest.metrics["score/sums"], manifest.metrics["score/choices"]]
        assert manifest.metrics["score"] == pytest.approx(sum(sets) / 2)
    train, test = read_problem_sets(tmp_path / "sets")
    assert (train.key, train.num_problems, train.num_too_long, train.share) == (
        "task.train",
        8,
        0,
        1,
    )
    assert (test.key, test.share, test.longest_prompt) == ("task.test", None, len("7+7="))


def test_files_and_the_context_of_the_sets_belong_to_the_run(
    values: Callable[..., dict[str, Any]],
) -> None:
    config = validate(RunConfig, values())
    snapshot = CodeSnapshot.current(config, "evaluate", "rollout")
    assert "file:evaluate.sets.sums.task.test" in snapshot.stages["evaluate"]
    assert "file:evaluate.sets.sums.task.test" not in snapshot.stages["rollout"]
    longer = validate(RunConfig, values("evaluate.sets.sums.task.max_prompt_length=3000"))
    assert required_context(config) == 1024 + 9
    assert required_context(longer) == 3000 + 5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "evaluate.sets.sums.task.name=arithmetic",
            "evaluate.sets.sums.task.name: 'arithmetic' has",
        ),
        ("evaluate.sets.sums.horizn=3", "evaluate.sets.sums.horizn"),
        ("evaluate.sets.sums.horizon=100000", r"evaluate.sets.sums.horizon: .* positions"),
        ("evaluate.sets.sums.task.test=none.jsonl", r"evaluate.sets.sums: .*no file none.jsonl"),
    ],
)
def test_a_wrong_set_is_refused_by_key(
    values: Callable[..., dict[str, Any]], word: str, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        prepare_run(values(word))


def test_sets_need_a_language_model_from_a_folder(compose: Compose, tmp_path: Path) -> None:
    choices = write(tmp_path / "choices.jsonl", ROWS[:4])
    word = f"evaluate.sets.a={{task: {{name: multiple_choice, test: {choices}}}, horizon: 4}}"
    values = compose(word, experiment="cartpole_ppo")
    assert load_components(validate(RunConfig, values)).config.evaluate.sets
    with pytest.raises(ConfigError, match=r"evaluate.sets: only a language model"):
        prepare_run(values)
