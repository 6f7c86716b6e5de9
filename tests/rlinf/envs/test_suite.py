"""A suite asks every set by its own protocol, and each process gets a share of every set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.validate_config import load_components
from rlinf.channels.channel import LocalChannel
from rlinf.config import EvaluateSection, RunConfig, validate
from rlinf.data.record import Record, RecordId
from rlinf.envs.base import RolloutRequest
from rlinf.envs.suite import EvaluationSuite, NoTask
from rlinf.errors import ConfigError, DataError
from tests.rlinf.envs.test_jsonl import Words
from tests.rlinf.envs.test_multiple_choice import ROWS, write

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")


def config(folder: Path, **changes: Any) -> EvaluateSection:
    sums = [{"question": f"{i} + {i} ?", "answer": str(2 * i)} for i in range(3)]
    numbers: dict[str, Any] = {
        "task": {"name": "jsonl", "test": write(folder / "sums.jsonl", sums)},
        "horizon": 7,
    }
    choices = {
        "task": {"name": "multiple_choice", "test": write(folder / "mc.jsonl", ROWS)},
        "max_problems": 6,
        "samples_per_problem": 2,
        "horizon": 20,
        "temperature": 0.6,
        "sampling": {"top_p": 0.95},
    }
    return EvaluateSection.model_validate({"sets": {"sums": {**numbers, **changes}, "mc": choices}})


def replies(requests: list[Record], texts: dict[int, str]) -> list[Record]:
    """Answer the requests of a suite, each token a character."""
    answers = []
    for request in requests:
        for sample in request.steps["sample"].tolist():
            tokens = np.array([[ord(c) for c in texts[sample]]], np.int64)
            steps = {
                "sample": np.array([sample]),
                "tokens": tokens,
                "length": np.array([tokens.shape[1]]),
                "logprobs": np.zeros(tokens.shape, np.float32),
                "stopped": np.array([1]),
            }
            answers.append(Record(RecordId(0, sample), steps, info={"version": 0}))
    return answers


def test_each_set_is_asked_by_its_protocol_and_graded_by_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = EvaluationSuite(config(tmp_path), Words())
    monkeypatch.setattr(
        type(suite.chat_format), "decode", lambda _, tokens: "".join(map(chr, tokens.tolist()))
    )
    count = len(suite.attempts)
    assert count == 3 + 6 * 2
    request = RolloutRequest(0, 0, "test", range(count), count, 1, 99, 1.0)
    texts = {}
    for sample, attempt in enumerate(suite.attempts):
        prompt = suite.prompts(RolloutRequest(0, 0, "test", [sample], count, 1, 99, 1.0))[0]
        wrong = attempt.set_name == "mc" and attempt.number
        texts[sample] = "Answer: Z" if wrong else f"Answer: {prompt.answer}"
    observations = LocalChannel()
    requests: list[Record] = []

    class Engine:
        """The actions of an engine that has received all requests."""

        def __iter__(self) -> Any:
            requests.extend(observations)
            return iter(replies(requests, texts))

    trajectories = list(suite.simulate(request, observations, Engine()))  # type: ignore[arg-type]
    assert [dict(record.info) for record in requests] == [
        {"horizon": 20, "temperature": 0.6, "top_p": 0.95},
        {"horizon": 7, "temperature": 0.0},
    ]
    truncated = replace(trajectories[0], stop_reason="length")
    assert suite.score([truncated], Counter()) == [0.0], "even if the answer is right"
    counts = Counter[str]()
    scores = suite.score(trajectories, counts)
    by_set: dict[str, list[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        by_set.setdefault(str(trajectory.task), []).append(score)
    assert sorted(by_set["sums"]) == [1.0] * 3
    assert sorted(by_set["mc"]) == [0.0] * 6 + [1.0] * 6
    assert counts["mc/parse_failures"] == 0
    answers = {t.identity.sample: suite.evaluation_info(t)["final_answer"] for t in trajectories}
    silent = suite.evaluation_info(replace(trajectories[0], text="nothing", task="mc"))
    assert silent == {"final_answer": ""}
    assert all(answers[s] == "Z" for s, text in texts.items() if text == "Answer: Z")
    suite.close()


def test_every_process_gets_a_share_of_every_set(tmp_path: Path) -> None:
    attempts = EvaluationSuite(config(tmp_path), Words()).attempts
    for shard in range(3):
        part = Counter(attempt.set_name for attempt in attempts[shard * 5 : shard * 5 + 5])
        assert part == {"sums": 1, "mc": 4}
    assert len(set(attempts)) == len(attempts)


def test_problems_that_are_too_long_are_not_left_out_silently(tmp_path: Path) -> None:
    task = {"name": "jsonl", "test": str(tmp_path / "sums.jsonl"), "max_prompt_length": 4}
    rows = [{"question": "1 + 1", "answer": "2"}, {"question": "1 + 1 + 1", "answer": "3"}]
    write(tmp_path / "sums.jsonl", rows)
    sets = {"sums": {"task": task, "horizon": 7}}
    with pytest.raises(DataError, match=r"evaluate.sets.sums: the prompts of 1 of 2 problems"):
        EvaluationSuite(EvaluateSection.model_validate({"sets": sets}), Words())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "arithmetic"}, "evaluate.sets.sums.task.name: 'arithmetic' has no fixed set"),
        ({"name": "jsonk"}, "evaluate.sets.sums.task.name: unknown task 'jsonk'; did you mean"),
        ({"name": "jsonl"}, "evaluate.sets.sums.task.test"),
        ({"name": "jsonl", "test": "x", "horizont": 1}, "evaluate.sets.sums.task.horizont"),
    ],
)
def test_a_set_that_is_none_is_refused_by_key(
    tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluationSuite.model_spec(config(tmp_path, task=task))


def test_greedy_samples_of_a_problem_would_all_be_equal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature 0 makes all samples of a problem equal"):
        config(tmp_path, samples_per_problem=2)


@pytest.mark.parametrize("word", ["iterations=1", "sft.max_steps=1", "iterations=0"])
def test_a_run_without_a_task_only_evaluates_sets(compose: Callable[..., Any], word: str) -> None:
    values = compose("task=none", "iterations=0", "sft.max_steps=0", word)
    with pytest.raises(ConfigError, match=r"task.name: 'none' has no problems, so it is only for"):
        NoTask.check(NoTask.Config(), load_components(validate(RunConfig, values)))


def test_a_run_without_a_task_has_no_prompts() -> None:
    assert NoTask(None, None).prompts(RolloutRequest(0, 0, "train", [], 0, 1, 1, 1.0)) == []
