"""Plain functions are rewards, also in the forms of TRL and verl; errors name the sample."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from pipeline.validate_config import load_components
from rlinf.artifacts import read_manifest
from rlinf.config import RunConfig, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.chat_problems import read_problems
from rlinf.errors import ConfigError, InputError, UserCodeError
from rlinf.rewards.base import RewardResources
from rlinf.rewards.function import FunctionReward, FunctionRewardConfig
from tests.rlinf.rewards import own_functions

OWN = own_functions.__name__


def trajectories() -> list[Trajectory]:
    texts, levels = ["12", "7 ", "abc"], [1.0, 2.0, 4.0]
    return [
        Trajectory(
            identity=RecordId(0, i),
            actions=np.arange(len(text)),
            prompt_text="What?",
            text=text,
            answer="12" if i == 0 else "7",
            stop_reason="stop",
            group=0,
            extra={"level": level},
        )
        for i, (text, level) in enumerate(zip(texts, levels, strict=True))
    ]


def totals(*names: str, **options: Any) -> list[float | None]:
    functions = [f"{OWN}:{name}" for name in names]
    config = validate(FunctionRewardConfig, {"function": functions, **options}, "reward")
    results = FunctionReward(config, RewardResources()).compute_results(trajectories(), [])
    return [float(np.sum(result.reward)) if result.valid else None for result in results]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("exact", {}, [1, 1, 0]),
        ("by_level", {}, [None, 1, 0.75]),
        ("trl_length", {}, [2, 2, 3]),
        ("trl_chat", {"conversational": True}, [1, 0, 0]),
        ("compute_score", {}, [1, 0, 0]),
    ],
)
def test_the_parameters_say_how_a_function_is_called(
    name: str, options: dict[str, Any], expected: list[float | None]
) -> None:
    assert totals(name, **options) == expected


def test_a_function_of_verl_gets_the_nested_fields_of_its_rows(tmp_path: Path) -> None:
    """A file in verl's layout, from its rows to the arguments of the function."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    file = tmp_path / "verl.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    fields = ("data_source", "extra_info")
    problems = read_problems(file, "prompt", "reward_model.ground_truth", "task.train", fields)
    samples = [
        replace(item, text="1", answer=problem.answer, extra=dict(problem.info))
        for item, problem in zip(trajectories(), problems, strict=True)
    ]
    config = validate(FunctionRewardConfig, {"function": f"{OWN}:compute_indexed_score"}, "reward")
    results = FunctionReward(config, RewardResources()).compute(samples, [])
    assert [result.reward for result in results] == [0, 2, 2]


def test_several_functions_are_summed_with_their_weights() -> None:
    assert totals("exact", "trl_length") == [3, 3, 3]
    assert totals("exact", "trl_length", weights=[10, -1]) == [8, 8, -3]
    assert totals("exact", "by_level", weights=[1, 4]) == [1, 5, 3], "None takes no part in the sum"
    with pytest.raises(ConfigError, match="1 weights for 2 functions"):
        totals("exact", "by_level", weights=[1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_more", "needs 'levels'; available: answer, .*, level, .*task.info_fields"),
        ("text_reward", "text_reward returned str 'good' for sample 0; .* a finite number"),
        ("nan_reward", "nan_reward returned float nan for sample 0"),
        ("one_too_few", "one_too_few returned 2 values for 3 completions"),
    ],
)
def test_a_wrong_result_names_function_and_sample(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        totals(name)


def test_several_reference_answers_are_a_list() -> None:
    pairs = zip(trajectories(), ["4", "four", "five"], strict=True)
    several = [replace(item, text=text, answer="4\n<or>\nfour") for item, text in pairs]
    config = validate(FunctionRewardConfig, {"function": f"{OWN}:any_of"}, "reward")
    results = FunctionReward(config, RewardResources()).compute(several, [])
    assert [result.reward for result in results] == [1, 1, 0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact", "'exact' names no function; expected MODULE:FUNCTION"),
        (f"{OWN}:exakt", "has no 'exakt'; did you mean 'exact'"),
        (f"{OWN}:NOT_A_FUNCTION", "is of type int, not a function"),
        (f"{OWN}:positional", "parameters without a name"),
        (f"{OWN}:Scorer", "Scorer is a class; name a function"),
        (f"{OWN}:waiting", "waiting is async"),
        ("rlinf.rewards.task_rewards:ScoreReward", "set reward.name=rlinf.rewards"),
    ],
)
def test_what_is_no_function_is_refused_before_the_run(
    compose: Callable[..., dict[str, Any]], function: str, message: str
) -> None:
    values = compose("reward=function", f"reward.function={function}")
    run = load_components(validate(RunConfig, values))
    with pytest.raises(ConfigError, match=f"reward.function: .*{message}"):
        FunctionReward.check(run.options["reward"], run)


@pytest.mark.usefixtures("undrawn")
def test_a_run_learns_from_a_function_and_an_error_in_it_ends_the_run_once(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "length_reward.py").write_text(
        "def short(completion, answer, **row):\n    return 1 / (1 + len(completion))\n\n\n"
        "def broken(completion, **row):\n    return row['levle']\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "length_reward", raising=False)
    words = ["iterations=1", "reward=function"]
    run_experiment(compose(*words, "reward.function=length_reward:short"))
    manifest = read_manifest(tmp_path / "tiny/it/0000/reward")
    assert manifest is not None
    assert 0 < manifest.metrics["mean"] <= 1
    assert not math.isnan(manifest.metrics["std"])
    values = compose(*words, "reward.function=length_reward:broken", "run.name=broken")
    with pytest.raises(UserCodeError) as error:
        run_experiment(values)
    text = str(error.value)
    assert "length_reward.py" in text.splitlines()[2]
    assert text.count("Traceback") <= 1
    assert "KeyError: 'levle'" in text
    assert "a trajectory has the fields" in text


@pytest.mark.usefixtures("undrawn")
def test_an_edited_function_is_another_result(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.identity import CodeSnapshot

    (tmp_path / "edited_reward.py").write_text("def one(completion):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    values = compose("reward=function", "reward.function=[edited_reward:one]")
    snapshot = CodeSnapshot.current(validate(RunConfig, values), "reward", "rollout")
    assert "edited_reward" in snapshot.stages["reward"]
    assert "edited_reward" not in snapshot.stages["rollout"]
