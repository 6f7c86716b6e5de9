"""A dialogue is one row of tokens, as the policy saw it; only its own count."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics as metrics
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.calculator import (
    ALPHABET,
    CalculatorConfig,
    CalculatorDialogue,
    CalculatorEnvironment,
)
from rlinf.envs.dialogue import (
    Dialogue,
    DialogueConfig,
    DialogueEnvironment,
    DialogueStep,
    ToolCall,
    ToolDialogue,
    ToolInputError,
    ToolLimits,
    convert_arguments,
)
from rlinf.errors import InputError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from rlinf.registry import import_user_attribute
from stages.rollout import local_rollout_iter
from tests.stages.test_reward import trajectories_of

Compose = Callable[..., dict[str, Any]]
CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
SAYS = {"role": "tool", "content": "12=34"}


class Talk(Dialogue):
    """Answers every message; says how the policy's messages came to it."""

    def __init__(self, start: int, fails: bool = False) -> None:
        self.start, self.fails, self.heard, self.closed = start, fails, list[str](), 0

    def init(self) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": f"{self.start}+1="}]

    async def step(self, message: str) -> DialogueStep:
        self.heard.append(message)
        await asyncio.sleep(0)
        if self.fails and len(self.heard) == 2:
            raise RuntimeError("the tool's server is gone")
        return [SAYS], float(len(self.heard)), False

    def close(self) -> None:
        self.closed += 1


class Talks(DialogueEnvironment):
    """Numbered dialogues; some fail."""

    failing: ClassVar[frozenset[int]] = frozenset()

    @classmethod
    def model_spec(cls, config: Any) -> dict[str, Any]:
        return {"alphabet": ALPHABET}

    def create_dialogue(self, split: str, random: np.random.Generator) -> Dialogue:
        self.begun = [*getattr(self, "begun", []), Talk(len(getattr(self, "begun", [])))]
        self.begun[-1].fails = self.begun[-1].start in self.failing
        return self.begun[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    CausalLM.create(CONFIG, {"alphabet": ALPHABET}, 0, folder)
    return folder


def talked(
    folder: Path, task: DialogueEnvironment, starts: range, horizon: int
) -> list[Trajectory]:
    engine = TransformersEngine(TransformersConfig(), CausalLM, CONFIG)
    engine.load(folder, 3)
    episodes = RolloutRequest(0, 1, "train", starts, 4, 2, horizon, 1.0)
    made = list(local_rollout_iter(task, engine, episodes, "rollout"))
    return sorted(made, key=lambda record: record.identity)


def test_only_what_the_policy_said_counts_and_has_its_log_probs(folder: Path) -> None:
    task = Talks(DialogueConfig(max_turns=3, max_turn_tokens=5), HFFolder(folder).tokenizer)
    made = talked(folder, task, range(3), 40)
    assert [record.identity.sample for record in made] == list(range(6))
    policy = CausalLM.load(folder, CONFIG)
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate(made), 1.0)
    for i, (record, talk) in enumerate(zip(made, task.begun, strict=True)):
        counts = loss_mask(record)
        got = outputs.logprobs[i, : len(record)].numpy()
        np.testing.assert_allclose(got[counts], record.logprobs[counts], atol=2e-5)
        text = task.tokenizer.decode(record.actions[~counts])
        assert text == SAYS["content"] * 2, "between three messages, none behind the last"
        own = task.tokenizer.decode(record.actions[counts], skip_special_tokens=True)
        assert own == "".join(talk.heard)
        ends = np.flatnonzero(np.diff(record.turns)) + 1
        assert record.turns.tolist() == sorted(record.turns)
        assert [part[0] for part in np.split(record.turns, ends)] == [0, 1, 2]
        assert all(part[0] for part in np.split(counts, ends)), "the policy speaks first"
        # On the last token of each message.
        assert record.rewards[counts].sum() == 1 + 2 + 3 == record.episode_return
        assert not record.rewards[~counts].any()
        assert counts[-1]
        assert record.stop_reason == "length"
        assert talk.closed == 1


def test_no_dialogue_is_longer_than_the_horizon(folder: Path) -> None:
    task = Talks(DialogueConfig(max_turns=9, max_turn_tokens=6), HFFolder(folder).tokenizer)
    for record in talked(folder, task, range(3), 20):
        assert len(record) <= 20
        assert record.stop_reason == "length"


def test_a_dialogue_that_fails_costs_itself_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tokenizer = DialogueConfig(max_turns=3, max_turn_tokens=5), HFFolder(folder).tokenizer
    whole = talked(folder, Talks(config, tokenizer), range(2), 40)
    monkeypatch.setattr(Talks, "failing", frozenset({1}))
    task = Talks(config, tokenizer)
    made = talked(folder, task, range(2), 40)
    assert [r.stop_reason for r in made] == ["length", "error", "length", "length"]
    assert not loss_mask(made[1]).any()
    for number in (0, 2, 3):
        np.testing.assert_array_equal(made[number].actions, whole[number].actions)
    np.testing.assert_array_equal(task.score(made, Counter()), [6.0, np.nan, 6.0, 6.0])
    assert [talk.closed for talk in task.begun] == [1] * 4


def test_dialogues_that_all_fail_are_left_to_the_stage_which_knows_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Talks, "failing", frozenset(range(9)))
    task = Talks(DialogueConfig(max_turns=3, max_turn_tokens=5), HFFolder(folder).tokenizer)
    made = talked(folder, task, range(2), 40)
    assert all(record.is_failed for record in made)
    assert all("server is gone" in str(record.error) for record in made)
    assert not any(record.failed_in_user_code for record in made)


def test_a_chat_template_puts_the_other_sides_words_between_those_of_the_policy(
    folder: Path,
) -> None:
    tokenizer = HFFolder(folder).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}e:"
    )
    task = Talks(DialogueConfig(max_turns=2, max_turn_tokens=4), tokenizer)
    end = tokenizer.eos_token
    for record in talked(folder, task, range(2), 60):
        tokens, counts = record.actions, loss_mask(record)
        assert tokenizer.decode(record.prompt).endswith(f"+1={end}e:")
        first, second = np.flatnonzero(np.diff(counts.astype(int)))
        text = tokenizer.decode(tokens[first + 1 : second + 1])
        # A message that the budget cut is ended for the policy.
        stopped = tokens[first] == tokenizer.eos_token_id
        assert text == ("" if stopped else end) + f":{SAYS['content']}{end}e:"


def half(n: int) -> int:
    """A tool that says what its policy did wrong."""
    if n % 2:
        raise ToolInputError("n must be even")
    return n // 2


class Tools(ToolDialogue):
    """Two tools, one of them asynchronous."""

    def __init__(self) -> None:
        self.together = asyncio.Barrier(2)
        self.tools = {"meet": self.meet, "half": half}

    async def meet(self) -> str:
        # Ends only where both calls of a message are under way at the same time.
        await asyncio.wait_for(self.together.wait(), 5)
        return "met"

    def init(self) -> list[dict[str, str]]:
        return []

    def score_answer(self, message: str) -> float:
        return float(message == "right")


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (call('{"name": "half", "arguments": {"n": 8}}'), ["4"]),
        (call('{"name": "meet"}') * 2, ["met", "met"]),
        (call('{"name": "hal"}'), ["error: no tool 'hal'; there are half, meet"]),
        (call('{"name": "half", "arguments": {"n": "x"}}'), ["error: n: Input should be a valid"]),
        (call('{"name": "half", "arguments": {"n": 7}}'), ["error: n must be even"]),
        (call('{"name": "half", "arguments": {"m": 1}}'), ["error: missing a required argument"]),
        (call('{"name": "half"}') + call('{"name": "hal"}'), ["error: missing", "error: no tool"]),
        (call('{"name": '), ["error: Expecting value"]),
        (call("[1]"), ["error: a call is an object"]),
        (call("[" * 100_000), ["error: the call is nested too deeply"]),
    ],
)
def test_calls_are_made_side_by_side_and_the_policys_errors_told(
    message: str, expected_message: list[str]
) -> None:
    async def go() -> tuple[DialogueStep, int]:
        tools = Tools()
        return await tools.step(message), tools.tool_errors

    (messages, reward, done), errors = asyncio.run(go())
    assert errors == sum(text.startswith("error") for text in expected_message)
    assert len(messages) == len(expected_message)
    for got, wanted in zip(messages, expected_message, strict=True):
        assert got["content"].startswith(wanted)
    assert (reward, done) == (0.0, False)


def add(a: int, b: int = 0, *, parts: list[float] | None = None) -> int:
    return a + b


def unknown_types(a: np.ndarray, b: NotThere = None) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Neither type is one that arguments can be compared with."""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"a": 1, "b": "x"}, "b: .*integer"),
        ({"a": None}, "a: .*integer"),
        ({"a": 1.5}, "a: .*integer"),
        ({"a": 1, "parts": [1, "x"]}, "parts: .*number"),
        ({"a": {"b": 1}}, "a: .*integer"),
        ({}, "missing.*'a'"),
        ({"a": 1, "c": 2}, "unexpected.*'c'"),
    ],
)
def test_arguments_of_another_type_are_the_policys_error(
    arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ToolInputError, match=error):
        convert_arguments(add, arguments)


def test_arguments_are_given_as_the_type_that_a_tool_names() -> None:
    assert convert_arguments(add, {"a": "3", "parts": [1, "2"]}) == {"a": 3, "parts": [1.0, 2.0]}
    assert convert_arguments(unknown_types, {"a": [1], "b": 2}) == {"a": [1], "b": 2}
    assert convert_arguments(max, {"a": 1}) == {"a": 1}


FAILURES: list[Callable[[], Exception]] = [
    lambda: ConnectionError("the index restarts"),
    lambda: KeyError("a bug"),
    lambda: ValueError("not said to be the policy's"),
]


class Unsteady(ToolDialogue):
    """A tool, asynchronous or not, that fails a number of times before it works."""

    limits = ToolLimits(timeout_s=0.05, retries=2, backoff_s=0.001)

    def __init__(self, failure: Callable[[], Exception] | None, times: int, *, asks: bool) -> None:
        self.failure, self.left = failure, times
        self.tools = {"look": self.look_later if asks else self.look}

    def look(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "found"
        if self.failure is None:
            time.sleep(0.2)
            return "late"
        raise self.failure()

    async def look_later(self) -> str:
        if self.failure is None and self.left > 0:
            self.left -= 1
            await asyncio.sleep(0.2)
        return self.look()

    def init(self) -> Sequence[dict[str, str]]:
        return []

    def score_answer(self, message: str) -> float:
        return 0.0


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("failure", [*FAILURES, None])
def test_an_outage_is_tried_again_and_never_told(
    failure: Callable[[], Exception] | None, asks: bool
) -> None:
    message = call('{"name": "look"}')
    passing = Unsteady(failure, 2, asks=asks)
    assert asyncio.run(passing.step(message)) == (
        [{"role": "tool", "content": "found"}],
        0.0,
        False,
    )
    assert (passing.tool_retries, passing.tool_errors) == (2, 0)
    lasting = Unsteady(failure, 9, asks=asks)
    with pytest.raises(TimeoutError if failure is None else type(failure())):
        asyncio.run(lasting.step(message))
    assert lasting.left == 6, "tried three times in all"


class Flaky(Unsteady):
    """Asks its tool after each message of the policy."""

    def parse_calls(self, message: str) -> Sequence[ToolCall]:
        return [ToolCall("look", {})]

    def init(self) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": "1+1="}]


class Flakies(Talks):
    """Dialogues whose tool fails a number of times, by the dialogue's own number."""

    times: ClassVar[dict[int, int]] = {}

    def create_dialogue(self, split: str, random: np.random.Generator) -> Dialogue:
        self.begun = [*getattr(self, "begun", []), None]
        times = self.times.get(len(self.begun) - 1, 0)
        return Flaky(lambda: OSError("down"), times, asks=False)


@settings(max_examples=8, deadline=None)
@given(failing=st.dictionaries(st.integers(0, 3), st.integers(1, 4)))
def test_what_is_trained_on_does_not_depend_on_an_outage(
    folder: Path, failing: dict[int, int]
) -> None:
    """What retries overcame leaves no trace in the steps; what they did not trains nothing."""
    config = DialogueConfig(max_turns=2, max_turn_tokens=4, tool_backoff_s=0.0)
    lost = {number for number, times in failing.items() if times > config.tool_retries}
    with pytest.MonkeyPatch.context() as patch:
        plain = talked(folder, Flakies(config, HFFolder(folder).tokenizer), range(2), 40)
        patch.setattr(Flakies, "times", failing)
        task = Flakies(config, HFFolder(folder).tokenizer)
        made = talked(folder, task, range(2), 40)
    scores = task.score(made, Counter())
    for number, (record, wanted) in enumerate(zip(made, plain, strict=True)):
        assert record.is_failed == np.isnan(scores[number]) == (number in lost)
        if number in lost:
            assert not loss_mask(record).any()
            assert not record.rewards.any()
            assert record.tool_retries == config.tool_retries
            continue
        assert record.tool_retries == failing.get(number, 0)
        assert {**record.scalars(), "tool_retries": 0} == wanted.scalars()
        for name, column in wanted.to_record().steps.items():
            # The engine's batch is smaller once dialogues are lost, which moves last bits.
            rtol = 1e-5 if lost and name == "logprobs" else 0
            np.testing.assert_allclose(record.to_record().steps[name], column, rtol=rtol)


def test_a_bug_of_a_tool_is_kept_as_the_users_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_user_attribute(__name__, "Flakies", "task.name")
    monkeypatch.setattr(Unsteady, "look", lambda self: {}["no such row"])
    task = Flakies(
        DialogueConfig(max_turns=2, max_turn_tokens=4, tool_retries=1, tool_backoff_s=0.0),
        HFFolder(folder).tokenizer,
    )
    for record in talked(folder, task, range(2), 40):
        assert record.failed_in_user_code == 1
        error = str(record.error)
        assert "raised KeyError: 'no such row'" in error
        assert error.count("Traceback") == 1


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "None; it must return"),
        ("yes", "'yes'; it must return"),
        (([], 1.0), r"\(\[\], 1.0\); it must return"),
        (("text", 1.0, True), "the messages 'text'; each must be"),
        (([{"role": "tool"}], 1.0, True), "the messages .*; each must be"),
        (([], "1.0", True), "the reward '1.0'; it must be one finite number"),
        (([], None, True), "the reward None; it must be one finite number"),
        (([], float("nan"), True), "the reward nan; it must be one finite number"),
    ],
)
def test_what_is_no_answer_of_a_dialogue_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, text: str
) -> None:
    monkeypatch.setattr(Talk, "step", lambda self, message: answer)
    task = Talks(DialogueConfig(max_turns=2, max_turn_tokens=3), HFFolder(folder).tokenizer)
    with pytest.raises(InputError, match=rf"task: Talk\.step returned {text}"):
        talked(folder, task, range(1), 20)


def waits(seconds: float) -> None:
    time.sleep(seconds)


class Slow(ToolDialogue):
    tools: ClassVar[dict[str, Callable[..., Any]]] = {"wait": waits}

    def init(self) -> Sequence[dict[str, str]]:
        return []

    def score_answer(self, message: str) -> float:
        return 0.0


def test_a_tool_waits_for_no_other_and_holds_nobody_up() -> None:
    """However many there are, and though one of them hangs."""

    async def all_of(count: int, seconds: float) -> None:
        arguments = f'{{"seconds": {seconds}}}'
        call = f'<tool_call>{{"name": "wait", "arguments": {arguments}}}</tool_call>'
        await asyncio.gather(*(Slow().step(call) for _ in range(count)))

    began = time.monotonic()
    asyncio.run(all_of(100, 0.3))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(all_of(1, 60.0), 0.2))
    assert time.monotonic() - began < 10


def test_a_message_without_a_call_is_judged() -> None:
    assert asyncio.run(Tools().step("right")) == ([], 1.0, True)


def test_the_calculator_is_asked_and_believed() -> None:
    dialogue = CalculatorDialogue("12*12")
    request = asyncio.run(dialogue.step("12*12?"))
    assert request == ([{"role": "tool", "content": "144"}], 0.0, False)
    assert asyncio.run(dialogue.step("144")) == ([], 1.0, True)
    refused, _, done = asyncio.run(dialogue.step("__import__?"))
    assert (refused[0]["content"], done) == ("error: no sum", False)


def test_demonstrations_show_a_call_and_do_not_teach_the_tools_words(folder: Path) -> None:
    task = CalculatorEnvironment(CalculatorConfig(), HFFolder(folder).tokenizer)
    for record in task.demonstrations(0, 0, 5):
        counts, end = loss_mask(record), task.tokenizer.eos_token
        question = task.tokenizer.decode(record.prompt)[:-1]
        value = str(eval(question))
        own = task.tokenizer.decode(record.actions[counts])
        assert own == f"{question}?{end}{value}{end}"
        assert task.tokenizer.decode(record.actions[~counts]) == value


@pytest.mark.parametrize("level", ["trajectory", "turn"])
@pytest.mark.usefixtures("undrawn")
def test_an_agent_is_trained_from_end_to_end(level: str, compose: Compose, tmp_path: Path) -> None:
    words = ["task.name=calculator", "task.digits=1", "sft.max_steps=60"]
    words += ["sft.batch_size=64", "sft.lr=1e-2", "sft.eval_every=60"]
    words += ["rollout.batch_size=8", "rollout.horizon=24", "algorithm.entropy_coeff=0"]
    values = compose(*words, "optimizer.lr=1e-3", f"algorithm.advantage_level={level}")
    if level == "turn":
        values["reward"] = {"name": "environment"}
    for section in ("operations", "least_significant_first", "rambling_fraction"):
        values["task"].pop(section, None)
    values["task"]["digits"] = 1
    run_experiment(values)
    rows = metrics(tmp_path / "tiny")
    made = trajectories_of(tmp_path / "tiny")
    assert any(not loss_mask(record).all() for record in made.values()), "the calculator was asked"
    assert any(record.num_turns == 2 for record in made.values())
    for row in rows:
        assert row["train/rollout_logprob_diff"] < 1e-3
        assert row["rollout/failed_ratio"] == row["rollout/tool_retries"] == 0
        assert row["rollout/tool_errors"] >= 0
    assert sum(row["reward/group_std"] > 0 for row in rows), rows
