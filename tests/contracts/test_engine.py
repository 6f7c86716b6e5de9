"""What every engine keeps to, whatever it runs on: an engine of the registry passes this.

An engine is tried with a policy that offers what it needs: one whose steps are tokens, or one whose
steps are actions.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from scipy import stats

from rlinf.channels.channel import ChannelFailed, LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import DeviceMemoryManager
from rlinf.engines import engines
from rlinf.engines.base import (
    ACTION_REPLY_COLUMNS,
    NO_HOOKS,
    TOKEN_REPLY_COLUMNS,
    Engine,
    RolloutHooks,
    check_columns,
)
from rlinf.engines.external import ExternalEngine
from rlinf.engines.server import ServerEngine
from rlinf.errors import DataError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from rlinf.registry import LANGUAGE_MODEL
from tests.environments import need_environment

TOKENS = CausalLMConfig(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=64)
"""Heads of 64: the only ones that vLLM takes on every CPU."""
ACTIONS = MLPConfig(hidden=(8,), initial_log_std=-0.5)
EOS = 1
Rows = dict[int, dict[str, np.ndarray]]


def part(name: str) -> tuple[Any, dict[str, Any]]:
    """The class of a case's engine and how it is configured: ``NAME*2`` is two servers."""
    name, _, replicas = name.partition("*")
    settings = {"replicas": int(replicas), "kv_cache_gib": 0.25} if replicas else {}
    return engines.get(name), settings


def speaks(name: str) -> bool:
    return LANGUAGE_MODEL in part(name)[0].requires


def served(name: str) -> bool:
    """Whether an engine is a server: minutes, so that only a smoke of it is in the usual suite."""
    return issubclass(part(name)[0], ServerEngine)


def stays(name: str) -> bool:
    """Whether one is kept from one test to the next, as it is slow to start."""
    return issubclass(part(name)[0], ExternalEngine)


def case(name: str, kind: str) -> Any:
    """Those without their packages in this environment wait for one that has them
    (:mod:`tests.contracts.test_environments`)."""
    cls = part(name)[0]
    packages = cls.required_packages(cls.Config())
    there = all(importlib.util.find_spec(package) for package in packages)
    marks = [pytest.mark.skipif(not there, reason=f"{packages} are not in this environment")]
    if served(name):
        marks.append(pytest.mark.slow)
    return pytest.param((name, kind), marks=marks, id=f"{name}-{kind}")


NAMES = [*engines.names(), *(f"{name}*2" for name in engines.names() if served(name))]
CASES = [
    case(name, kind)
    for name in NAMES
    for kind in (["tokens"] if speaks(name) else ["discrete", "box"])
]
TALKS = [one for one in CASES if one.values[0][1] == "tokens"]
SERVERS: dict[str, Engine] = {}
"""By name: what is slow to start stays up from one test to the next, and is given other weights."""


@dataclass
class Tried:
    """An engine, the policy it serves, and how it is asked."""

    engine: Engine
    kind: str
    folder: Path
    policy: Any

    def request(self, samples: Any = range(6), same: bool = False, **info: Any) -> Record:
        """Of some samples; a sample's prompt, or observation, follows from its number."""
        numbers = np.array(list(samples), dtype=np.int64)
        shown = np.zeros_like(numbers) if same else numbers
        steps = {"sample": numbers}
        if self.kind == "tokens":
            given = [
                np.random.default_rng(n // 2).integers(2, 14, 3 + n // 2 % 4)
                for n in shown.tolist()
            ]
            steps["prompt_length"] = np.array([len(g) for g in given], dtype=np.int64)
            steps["prompt"] = np.array([np.pad(g, (0, 9 - len(g))) for g in given])
            return Record(RecordId(0, 0), steps, info={"horizon": 12, "temperature": 1.0, **info})
        rows = [np.random.default_rng(n).normal(size=4) for n in shown.tolist()]
        steps["observation"] = np.array(rows, dtype=np.float32)
        usual = {"time": 0, "horizon": 5, "temperature": 1.0}
        return Record(RecordId(0, 0), steps, info={**usual, **info})

    def answers(self, *requests: Record, seed: int = 7, hooks: RolloutHooks = NO_HOOKS) -> Rows:
        """Replies to requests that are there from the beginning, by sample."""
        channel = LocalChannel()
        for request in requests:
            channel.put(request)
        channel.close()
        return self.read(channel, seed, hooks)

    def read(self, channel: LocalChannel, seed: int = 7, hooks: RolloutHooks = NO_HOOKS) -> Rows:
        found: Rows = {}
        for reply in self.engine.generate(channel, seed=seed, stage="rollout", hooks=hooks):
            check_columns(
                reply, TOKEN_REPLY_COLUMNS if self.kind == "tokens" else ACTION_REPLY_COLUMNS
            )
            assert reply.info["version"] == self.engine.version
            for i, number in enumerate(reply.steps["sample"].tolist()):
                assert number not in found
                found[number] = {name: column[i] for name, column in reply.steps.items()}
        return found

    def actions_and_logprobs(self, row: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The steps of a sample and their log-probs as the engine gave them."""
        if self.kind == "tokens":
            length = int(row["length"])
            return row["tokens"][:length], row["logprobs"][:length]
        return row["action"][None], row["logprob"][None]

    def logprobs_of(
        self, request: Record, actions: list[np.ndarray], temperature: float
    ) -> list[Any]:
        """Log-probs of steps under the policy as it is trained, for each row of a request."""
        records = []
        for i, steps in enumerate(actions):
            if self.kind == "tokens":
                prompt = request.steps["prompt"][i, : request.steps["prompt_length"][i]]
                inputs = {"prompt": prompt}
            else:
                inputs = {"observations": request.steps["observation"][[i]]}
            records.append(Trajectory(identity=RecordId(0, i), actions=steps, **inputs))
        with torch.no_grad():
            batch = self.policy.collate(records)
            logprobs = self.policy.evaluate(batch, temperature).logprobs.numpy()
        return [row[: len(steps)] for row, steps in zip(logprobs, actions, strict=True)]


def new(case: tuple[str, str], folder: Path) -> Tried:
    """An engine of the registry with weights whose preferences are seen."""
    name, kind = case
    first, folder = folder / "first", folder / "served"
    first.mkdir()
    folder.mkdir()
    policy: Any
    if kind == "tokens":
        CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, first)
        policy, config = CausalLM, TOKENS
    else:
        size = {"discrete": 3, "box": 2}[kind]
        spec = {"observation": 4, "action": {"kind": kind, "size": size}}
        MLPPolicy.create(ACTIONS, spec, 0, first)
        policy, config = MLPPolicy, ACTIONS
    loaded = policy.load(first, config)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4 if kind == "tokens" else 10)
    loaded.save(folder, dict(loaded.module.state_dict()))
    engine = SERVERS.get(name)
    if engine is None:
        cls, settings = part(name)
        if served(name):
            need_environment(cls.Config().server_python)
        engine = cls(cls.Config(**settings), policy, config)
        assert engine.version == -1
        if stays(name):
            SERVERS[name] = engine
    engine.load(folder, 3)
    assert engine.version == 3
    return Tried(engine, kind, folder, policy.load(folder, config))


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """They end with the tests of this file."""
    yield
    while SERVERS:
        SERVERS.popitem()[1].close()


@pytest.fixture(params=CASES)
def tried(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tried]:
    made = new(request.param, tmp_path)
    yield made
    if not stays(request.param[0]):
        made.engine.close()


@pytest.fixture(params=TALKS)
def talker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tried]:
    made = new(request.param, tmp_path)
    yield made
    if not stays(request.param[0]):
        made.engine.close()


def assert_alike(got: Rows, expected: Rows, tried: Tried) -> None:
    """The same draws, and log-probs but for rounding."""
    assert got.keys() == expected.keys()
    for number, row in got.items():
        (steps, logprobs), (same, theirs) = (
            tried.actions_and_logprobs(row),
            tried.actions_and_logprobs(expected[number]),
        )
        np.testing.assert_allclose(steps, same, atol=0 if tried.kind != "box" else 1e-5)
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_policy(tried: Tried, temperature: float) -> None:
    request = tried.request(range(12), temperature=temperature)
    got = tried.answers(request)
    pairs = [tried.actions_and_logprobs(got[number]) for number in range(12)]
    expected_logprobs = tried.logprobs_of(request, [steps for steps, _ in pairs], temperature)
    for (_, logprobs), expected in zip(pairs, expected_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    "cuts", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"min_tokens": 12, "temperature": 0.7}]
)
def test_what_cannot_be_drawn_does_not_change_log_probs(
    talker: Tried, cuts: dict[str, float]
) -> None:
    request = talker.request(range(12), **cuts)
    got = talker.answers(request)
    pairs = [talker.actions_and_logprobs(got[number]) for number in range(12)]
    expected_logprobs = talker.logprobs_of(
        request, [s for s, _ in pairs], cuts.get("temperature", 1.0)
    )
    for (_, logprobs), expected in zip(pairs, expected_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_given_texts_are_scored_as_generated_ones_or_refused(talker: Tried) -> None:
    """Texts of several lengths at once, with the most likely tokens of each position."""
    request = talker.request(range(6))
    got = talker.answers(request)
    pairs = [talker.actions_and_logprobs(got[number]) for number in range(6)]
    lengths = request.steps["prompt_length"].tolist()
    prompts = [row[:n] for row, n in zip(request.steps["prompt"], lengths, strict=True)]
    texts = [np.concatenate([p, steps]) for p, (steps, _) in zip(prompts, pairs, strict=True)]
    if type(talker.engine).score_tokens is Engine.score_tokens:
        with pytest.raises(DataError, match="does not compute log-probabilities of given texts"):
            talker.engine.score_tokens(texts, 1.0, 3)
        return
    scores = talker.engine.score_tokens([*texts, texts[0][:1]], 1.0, 3)
    assert [score.top_tokens.shape for score in scores] == [(len(t) - 1, 3) for t in texts] + [
        (0, 3)
    ]
    for score, text, length, (_, logprobs) in zip(scores, texts, lengths, pairs, strict=False):
        np.testing.assert_allclose(score.logprobs[length - 1 :], logprobs, atol=1e-5)
        assert (np.diff(score.top_logprobs) <= 0).all()
        is_top = score.top_tokens == text[1:, None]
        np.testing.assert_allclose(
            score.top_logprobs[is_top], score.logprobs[is_top.any(1)], atol=1e-5
        )
        assert (score.logprobs <= score.top_logprobs[:, 0] + 1e-5).all()
    plain = talker.engine.score_tokens(texts[:1], 1.0, 0)[0]
    np.testing.assert_allclose(plain.logprobs, scores[0].logprobs, atol=1e-5)


SEEDS = (1, 2, 3)


def fits(counts: np.ndarray, shares: np.ndarray) -> float:
    """P-value of a chi-square test; what is expected fewer than five times is one class."""
    shares = shares.astype(np.float64)
    expected = shares / shares.sum() * counts.sum()
    rare = expected < 5
    assert not counts[expected == 0].any()
    pooled = [np.append(a[~rare], a[rare].sum()) for a in (counts, expected)]
    kept = pooled[1] > 0
    return float(stats.chisquare(pooled[0][kept], pooled[1][kept]).pvalue)


@pytest.mark.parametrize(
    ("temperature", "cuts"),
    [(1.0, {}), (0.6, {}), (1.0, {"top_k": 4}), (1.0, {"top_p": 0.8}), (1.5, {"min_p": 0.2})],
    ids=str,
)
def test_tokens_are_drawn_from_the_policys_distribution(
    talker: Tried, temperature: float, cuts: dict[str, float]
) -> None:
    """Of the first two tokens together."""
    size, count = 14, 1500
    one = talker.request([0], same=True)
    width = {name: column.repeat(size, axis=0) for name, column in one.steps.items()}
    row = Record(one.identity, width)
    first = np.concatenate(
        talker.logprobs_of(row, [np.array([a]) for a in range(size)], temperature)
    )
    second = [
        [
            pair[1]
            for pair in talker.logprobs_of(
                row, [np.array([a, b]) for b in range(size)], temperature
            )
        ]
        for a in range(size)
    ]
    after = np.array([cut(np.exp(line), cuts) for line in second])
    after[EOS] = np.eye(size)[0]  # the first one ended it
    shares = cut(np.exp(first), cuts)[:, None] * after
    values = []
    for seed in SEEDS:
        request = talker.request(
            range(count), same=True, horizon=2, temperature=temperature, **cuts
        )
        counts = np.zeros((size, size))
        for found in talker.answers(request, seed=seed).values():
            tokens, _ = talker.actions_and_logprobs(found)
            counts[tokens[0], tokens[1] if len(tokens) > 1 else 0] += 1
        values.append(fits(counts.ravel(), shares.ravel()))
    assert min(values) > 1e-3, values


def cut(shares: np.ndarray, cuts: dict[str, float]) -> np.ndarray:
    """What may be drawn of a distribution, in plain loops."""
    order = np.argsort(-shares)
    kept = shares.copy()
    kept[order[int(cuts.get("top_k", len(shares))) :]] = 0
    total = 0.0
    for token in order:
        if total >= cuts.get("top_p", 1.0) * 1.0 and cuts.get("top_p", 1.0) < 1:
            kept[token] = 0
        total += shares[token]
    kept[shares < cuts.get("min_p", 0.0) * shares.max()] = 0
    return kept / kept.sum()


@pytest.mark.parametrize("case", [one for one in CASES if one.values[0][1] == "discrete"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_choices_are_drawn_from_the_policys_distribution(
    case: tuple[str, str], temperature: float, tmp_path: Path
) -> None:
    tried = new(case, tmp_path)
    one = tried.request([0] * 3, same=True)
    shares = np.exp(
        np.concatenate(tried.logprobs_of(one, [np.array([a]) for a in range(3)], temperature))
    )
    request = tried.request(range(4000), same=True, temperature=temperature)
    for seed in SEEDS:
        chosen = [int(row["action"]) for row in tried.answers(request, seed=seed).values()]
        assert fits(np.bincount(chosen, minlength=3), shares) > 1e-3


@pytest.mark.parametrize("case", [one for one in CASES if one.values[0][1] == "box"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_vectors_are_drawn_from_the_policys_distribution(
    case: tuple[str, str], temperature: float, tmp_path: Path
) -> None:
    """Twice the distance of a Gaussian's log-density from its peak is chi-square distributed."""
    tried = new(case, tmp_path)
    mode = tried.answers(tried.request([0], same=True, temperature=0.0))[0]["action"]
    (peak,) = tried.logprobs_of(tried.request([0]), [mode[None]], temperature)[0]
    request = tried.request(range(4000), same=True, temperature=temperature)
    for seed in SEEDS:
        rows = tried.answers(request, seed=seed).values()
        distances = 2 * (peak - np.array([row["logprob"] for row in rows]))
        assert stats.kstest(distances, stats.chi2(len(mode)).cdf).pvalue > 1e-3
        signs = np.array([row["action"] for row in rows]) > mode
        assert fits(np.bincount(signs @ [1, 2], minlength=4), np.ones(4)) > 1e-3


def test_temperature_zero_takes_what_is_most_likely(tried: Tried) -> None:
    request = tried.request(range(6), temperature=0.0)
    greedy = tried.answers(request)
    assert_alike(tried.answers(request, seed=8), greedy, tried)
    steps = [tried.actions_and_logprobs(greedy[number])[0][:1] for number in range(6)]
    best = np.concatenate(tried.logprobs_of(request, steps, 0.0))
    for seed in SEEDS:
        others = tried.answers(tried.request(range(6)), seed=seed)
        drawn = [tried.actions_and_logprobs(others[number])[0][:1] for number in range(6)]
        assert (np.concatenate(tried.logprobs_of(request, drawn, 0.0)) <= best + 1e-6).all()


def test_a_sample_does_not_depend_on_its_neighbours(tried: Tried) -> None:
    whole = tried.answers(tried.request(range(10)))
    for chosen in ([7, 2, 4], [5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]):
        got = tried.answers(tried.request(chosen))
        assert_alike(got, {number: whole[number] for number in chosen}, tried)


def test_a_sample_does_not_depend_on_the_requests_around_it(tried: Tried) -> None:
    whole = tried.answers(tried.request(range(10)))
    parts = [tried.request(numbers) for numbers in ([3, 1], [9, 0, 5], [2, 4, 6, 7, 8])]
    assert_alike(tried.answers(*parts), whole, tried)
    assert_alike(tried.answers(*reversed(parts)), whole, tried)


def test_seeds_stages_iterations_and_samples_differ(tried: Tried) -> None:
    def drawn(**changes: Any) -> bytes:
        request = tried.request([changes.pop("sample", 0)], same=True, **changes.pop("info", {}))
        channel = LocalChannel()
        channel.put(
            Record(RecordId(changes.pop("iteration", 0), 0), request.steps, info=request.info)
        )
        channel.close()
        address = {"seed": 7, "stage": "rollout", **changes}
        (reply,) = tried.engine.generate(channel, **address)
        column = "tokens" if tried.kind == "tokens" else "logprob"
        return reply.steps[column].tobytes()

    if tried.kind == "discrete":
        pytest.skip("one of three choices tells nothing")
    draws = [drawn(), drawn(sample=1), drawn(iteration=1), drawn(seed=8), drawn(stage="evaluate")]
    if tried.kind == "tokens":
        draws += [drawn(info={"seed": 9})]
        assert drawn(info={"seed": 8}) == draws[3]
    assert len(set(draws)) == len(draws)
    assert drawn() == draws[0]


def test_turns_of_a_sample_are_drawn_anew(talker: Tried) -> None:
    def turn(number: int) -> Rows:
        request = talker.request(range(4))
        return talker.answers(
            Record(
                request.identity, {**request.steps, "turn": np.full(4, number)}, info=request.info
            )
        )

    assert_alike(turn(0), talker.answers(talker.request(range(4))), talker)
    assert any(
        not np.array_equal(
            talker.actions_and_logprobs(turn(1)[n])[0], talker.actions_and_logprobs(turn(0)[n])[0]
        )
        for n in range(4)
    )


def test_samples_end_at_a_stop_token_or_the_horizon(talker: Tried) -> None:
    got = talker.answers(talker.request(range(60), horizon=20))
    stopped = [talker.actions_and_logprobs(row)[0] for row in got.values() if row["stopped"]]
    cut_off = [talker.actions_and_logprobs(row)[0] for row in got.values() if not row["stopped"]]
    assert stopped
    assert cut_off
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens in stopped)
    assert all(len(tokens) == 20 and EOS not in tokens for tokens in cut_off)


def test_no_sample_ends_before_its_least_tokens(talker: Tried) -> None:
    plain = talker.answers(talker.request(range(60), horizon=20))
    got = talker.answers(talker.request(range(60), horizon=20, min_tokens=6))
    assert any(row["length"] <= 6 for row in plain.values())
    assert all(row["length"] > 6 for row in got.values())
    assert any(row["stopped"] for row in got.values())


def test_a_stop_string_ends_a_sample_wherever_its_tokens_divide_it(talker: Tried) -> None:
    """Every token is one character here, or none, so that strings of two lie across two tokens."""
    tokenizer = HFFolder(talker.folder).tokenizer
    plain = talker.answers(talker.request(range(40)))
    texts = {
        n: tokenizer.decode(talker.actions_and_logprobs(row)[0], skip_special_tokens=True)
        for n, row in plain.items()
    }
    found: dict[str, int] = {}
    for text in texts.values():
        for i in range(2, len(text) - 2):
            found[text[i : i + 2]] = found.get(text[i : i + 2], 0) + 1
    stop = max(found, key=lambda pair: found[pair])
    got = talker.answers(talker.request(range(40), stop=json.dumps([stop, "never+never"])))
    ended = 0
    for number, row in got.items():
        tokens, _ = talker.actions_and_logprobs(row)
        whole, _ = talker.actions_and_logprobs(plain[number])
        np.testing.assert_array_equal(tokens, whole[: len(tokens)])
        read = [tokenizer.decode(whole[:k], skip_special_tokens=True) for k in range(len(whole))]
        at = next((k for k, text in enumerate(read) if stop in text), len(whole))
        done = stop in tokenizer.decode(whole, skip_special_tokens=True)
        assert len(tokens) == at
        assert row["stopped"] == (done or plain[number]["stopped"])
        ended += at < len(whole)
    assert ended


def test_requests_that_arrive_late_join(tried: Tried) -> None:
    """One comes while the first is under way, and is done before what was there before it."""
    channel, steps = LocalChannel(), 0
    first = tried.request(range(8), horizon=60)
    late = tried.request([20, 21], horizon=3)

    def newer() -> None:
        nonlocal steps
        steps += 1
        if steps == (2 if tried.kind == "tokens" else 1):
            channel.put(late)
            channel.close()

    channel.put(first)
    got = tried.read(channel, hooks=RolloutHooks(newer_weights=newer))
    alone = tried.answers(first) | tried.answers(late)
    assert_alike(got, alone, tried)
    if tried.kind == "tokens":
        order = list(got)
        longest = max(range(8), key=lambda number: got[number]["length"])
        assert got[longest]["length"] > 6, "the test has something to wait for"
        assert max(order.index(20), order.index(21)) < order.index(longest)


def test_settings_hold_for_their_own_request_alone(talker: Tried) -> None:
    requests = [
        talker.request(range(5), temperature=0.0, horizon=9),
        talker.request(range(5, 10), temperature=0.5, top_k=2, seed=11),
        talker.request(range(10, 15), min_tokens=5, stop=json.dumps(["1"]), horizon=30),
    ]
    alone: Rows = {}
    for request in requests:
        alone |= talker.answers(request)
    assert_alike(talker.answers(*requests), alone, talker)


def test_samples_that_are_given_up_come_as_far_as_they_are(talker: Tried) -> None:
    # A server decodes while it is not asked: it is asked to stop at once, and of many tokens.
    served = isinstance(talker.engine, ServerEngine)
    length, looks = (450, 1) if served else (100, 4)
    request = talker.request(range(10), horizon=length, min_tokens=length)
    whole = talker.answers(request)
    requests = list[tuple[int, int]]()

    def gives_up(left: int, of: int) -> bool:
        requests.append((left, of))
        return len(requests) == looks

    got = talker.answers(request, hooks=RolloutHooks(should_abort=gives_up))
    assert got.keys() == whole.keys()
    given_up = [number for number, row in got.items() if row.get("unfinished")]
    assert requests[looks - 1] == (10, 10)
    assert given_up if served else len(given_up) == 10
    assert {of for _, of in requests} == {10}
    for number, row in got.items():
        tokens, logprobs = talker.actions_and_logprobs(row)
        assert (len(tokens) < length) == (number in given_up)
        assert served or len(tokens) == 4
        same, theirs = talker.actions_and_logprobs(whole[number])
        np.testing.assert_array_equal(tokens, same[: len(tokens)])
        np.testing.assert_allclose(logprobs, theirs[: len(tokens)], atol=1e-5)


def test_what_a_hook_raises_ends_it(tried: Tried) -> None:
    def newer() -> None:
        raise KeyError("asked to stop")

    with pytest.raises(KeyError, match="asked to stop"):
        tried.answers(tried.request(), hooks=RolloutHooks(newer_weights=newer))
    assert len(tried.answers(tried.request())) == 6, "it is fit to go on"


def test_a_channel_that_closes_empty_is_answered_with_nothing(tried: Tried) -> None:
    assert tried.answers() == {}


class Broken(LocalChannel):
    """A channel whose other end failed."""

    def get(self) -> Record:
        raise ChannelFailed("the environment failed")

    def __len__(self) -> int:
        return 1


def test_a_channel_that_fails_is_no_end_of_requests(tried: Tried) -> None:
    with pytest.raises(ChannelFailed, match="the environment failed"):
        tried.read(Broken())


@pytest.mark.parametrize("column", ["sample", "prompt", "prompt_length"])
def test_a_request_without_a_column_is_refused(talker: Tried, column: str) -> None:
    request = talker.request()
    steps = {name: values for name, values in request.steps.items() if name != column}
    with pytest.raises(DataError, match=column):
        talker.answers(Record(request.identity, steps, info=request.info))
    wrong = {**request.steps, column: request.steps[column].astype(np.float32)}
    with pytest.raises(DataError, match=f"{column}.*float32"):
        talker.answers(Record(request.identity, wrong, info=request.info))


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"horizon": 0}]
)
def test_impossible_settings_are_refused(talker: Tried, settings: dict[str, float]) -> None:
    with pytest.raises(DataError, match="impossible sampling"):
        talker.answers(talker.request(**settings))


def test_weights_are_taken_one_at_a_time_and_served(tried: Tried, tmp_path: Path) -> None:
    before, seen = tried.answers(tried.request()), list[weakref.ref]()
    state = tried.policy.module.state_dict()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            assert sum(ref() is not None for ref in seen) <= 1, "earlier ones were let go"
            changed = tensor * 1.25 if tensor.is_floating_point() else tensor.clone()
            seen.append(weakref.ref(changed))
            yield name, changed
            del changed

    tried.engine.load_state(tensors(), 4)
    assert tried.engine.version == 4
    got = tried.answers(tried.request())
    with torch.no_grad():
        for tensor in {t.data_ptr(): t for t in tried.policy.module.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.mul_(1.25)
    pairs = [tried.actions_and_logprobs(got[number]) for number in range(6)]
    expected_logprobs = tried.logprobs_of(tried.request(), [steps for steps, _ in pairs], 1.0)
    for (_, logprobs), expected in zip(pairs, expected_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert any(
        not np.array_equal(
            tried.actions_and_logprobs(got[n])[1], tried.actions_and_logprobs(before[n])[1]
        )
        for n in range(6)
    )


def test_what_left_the_device_comes_back_as_it_was(tried: Tried) -> None:
    before, whole = tried.answers(tried.request()), tried.engine.group_sizes()
    assert not any(size.on_host for size in whole.values())
    residency = DeviceMemoryManager(tried.engine.device, sys.maxsize)
    residency.acquire(tried.engine)
    residency.offload_all()
    for group, size in tried.engine.group_sizes().items():
        assert (size.on_device, size.on_host) == (0, whole[group].on_device)
    residency.acquire(tried.engine)
    assert tried.engine.group_sizes() == whole
    assert_alike(tried.answers(tried.request()), before, tried)


def test_weights_may_be_replaced_while_they_are_away(tried: Tried) -> None:
    before = tried.answers(tried.request())
    residency = DeviceMemoryManager(tried.engine.device, sys.maxsize)
    residency.acquire(tried.engine)
    residency.offload_all()
    residency.acquire(tried.engine, copy_data=False)
    tried.engine.load_state(tried.policy.module.state_dict().items(), 3)
    assert_alike(tried.answers(tried.request()), before, tried)


def children() -> set[psutil.Process]:
    """Of this process, and theirs."""
    return set(psutil.Process().children(recursive=True))


def own_processes(engine: Engine) -> set[psutil.Process]:
    """Those of an engine's servers; other engines have none."""
    servers = engine.processes if isinstance(engine, ServerEngine) else ()
    roots = [psutil.Process(server.pid) for server in servers]
    return {one for root in roots for one in (root, *root.children(recursive=True))}


def test_close_frees_its_memory_and_processes_and_it_can_be_loaded_again(
    tried: Tried,
) -> None:
    before = tried.answers(tried.request())
    tensors = [t for ts in getattr(tried.engine, "resident", dict)().values() for t in ts]
    storages = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    processes, own = children(), own_processes(tried.engine)
    assert processes >= own
    assert bool(own) == isinstance(tried.engine, ServerEngine)
    tried.engine.close()
    tried.engine.close()
    gc.collect()
    assert tried.engine.version == -1
    assert tried.engine.group_sizes() == {}
    assert not any(ref() is not None for ref in storages)
    assert children() <= processes - own
    tried.engine.load(tried.folder, 3)
    assert_alike(tried.answers(tried.request()), before, tried)


def test_an_engine_that_was_never_loaded_holds_nothing_and_can_be_closed(tried: Tried) -> None:
    cls = type(tried.engine)
    config = TOKENS if tried.kind == "tokens" else ACTIONS
    fresh = cls(cls.Config(), type(tried.policy), config)
    assert fresh.group_sizes() == {}
    fresh.close()


def test_weights_come_in_memory_after_some_that_came_on_the_way(tried: Tried) -> None:
    """As in a pool: a rollout takes newer weights from files, the next stage gets them handed."""
    values = iter([(tried.folder, 4)])
    requests = LocalChannel()
    requests.put(tried.request())
    requests.close()
    hooks = RolloutHooks(newer_weights=lambda: next(values, None))
    assert list(tried.engine.generate(requests, seed=7, stage="rollout", hooks=hooks))
    assert tried.engine.version == 4
    state = {name: tensor.clone() for name, tensor in tried.policy.module.state_dict().items()}
    tried.engine.load_state(state.items(), 5)
    assert tried.engine.version == 5
    assert len(tried.answers(tried.request())) == 6
