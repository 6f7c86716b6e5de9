"""Engines of other projects: beyond the contract, updates in flight and what was begun elsewhere.

Where the packages are in an environment of their own, they are run there
(:mod:`tests.contracts.test_environments`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.engines.base import RolloutHooks
from rlinf.engines.server import ServerEngine
from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from tests.contracts.test_engine import SERVERS, TOKENS, Rows, Tried, assert_alike, case, new

EXTERNAL = ["sglang", "sglang_in_process", "vllm", "vllm_in_process"]
LENGTH = 450
"""Tokens: so many that a server is not through with them before it is interrupted."""
LOOKS = [8 * 2**n for n in range(9)]
"""How often a hook is asked before it acts. An engine asks every few milliseconds, and when all
samples have a token and none has its last depends on the machine: the first of these that fits."""
LONG = {"horizon": LENGTH, "min_tokens": LENGTH}
SIZES = {"hidden", "layers", "heads", "kv_heads", "intermediate"}


def engine_of(name: str, folder: Path) -> Iterator[Tried]:
    """An engine and its policy; up from one test to the next."""
    yield new((name, "tokens"), folder)
    SERVERS.pop(name).close()


def skips(name: str) -> Any:
    """The name, for tests that are skipped where the packages are in another environment."""
    marks = [mark for mark in case(name, "tokens").marks if mark.name == "skipif"]
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module", params=map(skips, EXTERNAL))
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    yield from engine_of(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture
def tried(opened: Tried) -> Tried:
    """The same with its first weights."""
    opened.policy = CausalLM.load(opened.folder, TOKENS)
    if opened.engine.version != 3:
        opened.engine.load(opened.folder, 3)
    return opened


def assert_of_policy(tried: Tried, request: Record, got: Rows) -> None:
    pairs = [tried.actions_and_logprobs(got[number]) for number in request.steps["sample"].tolist()]
    expected_logprobs = tried.logprobs_of(
        request, [steps for steps, _ in pairs], request.info["temperature"]
    )
    for (_, logprobs), expected in zip(pairs, expected_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def scaled(tried: Tried, by: float) -> dict[str, torch.Tensor]:
    return {name: tensor * by for name, tensor in tried.policy.module.state_dict().items()}


def test_it_answers_under_the_weights_that_it_was_given_last(tried: Tried) -> None:
    request = tried.request(range(12), temperature=0.7, min_tokens=3)
    before = tried.answers(request)
    assert_of_policy(tried, request, before)
    assert_alike(tried.answers(request), before, tried)
    other = scaled(tried, 1.25)
    tried.engine.load_state(other.items(), 4)
    tried.policy.module.load_state_dict(other)
    got = tried.answers(request)
    assert tried.engine.version == 4
    assert_of_policy(tried, request, got)
    assert any(not np.array_equal(got[n]["logprobs"], before[n]["logprobs"]) for n in got)


def test_prompts_that_are_read_in_parts_change_no_draw(tried: Tried) -> None:
    """More tokens than a step takes: a prompt is cut, and its seed is its own still."""
    draw = np.random.default_rng(1)
    prompts = draw.integers(2, 14, (40, 300))
    steps = {
        "sample": np.arange(40, dtype=np.int64),
        "prompt_length": np.full(40, 300, dtype=np.int64),
        "prompt": prompts,
    }
    info = {"horizon": 6, "temperature": 1.0, "min_tokens": 2}
    request = Record(RecordId(0, 0), steps, info=info)
    got = tried.answers(request)
    assert_of_policy(tried, request, got)
    for number in (0, 17, 39):
        one = {name: column[[number]] for name, column in steps.items()}
        alone = tried.answers(Record(RecordId(0, 0), one, info=info))
        assert_alike(alone, {number: got[number]}, tried)


@pytest.mark.slow
def test_newer_weights_come_while_samples_are_under_way(tried: Tried, tmp_path: Path) -> None:
    """Tokens before and after have the log-probabilities of their own weights."""
    folder = tmp_path / "newer"
    folder.mkdir()
    tried.policy.save(folder, scaled(tried, 1.25))
    request, rows = tried.request(range(6), **LONG), Rows()
    for looks in LOOKS:
        polls = itertools.count(1)
        hooks = RolloutHooks(
            newer_weights=lambda: (folder, 5) if next(polls) == looks else None  # noqa: B023
        )
        tried.engine.load(tried.folder, 3)
        rows = tried_read(tried, request, hooks)
        if all(0 < (row["version"] == 3).sum() < LENGTH for row in rows.values()):
            break
    for version, source in ((3, tried.folder), (5, folder)):
        tried.policy = CausalLM.load(source, TOKENS)
        steps = [rows[n]["tokens"] for n in range(6)]
        for n, expected in enumerate(tried.logprobs_of(request, steps, 1.0)):
            mine = rows[n]["version"] == version
            assert 0 < mine.sum() < LENGTH
            # Of 450 tokens, under weights that make some of them unlikely.
            np.testing.assert_allclose(rows[n]["logprobs"][mine], expected[mine], 1e-5, 1e-5)
    assert all((np.diff(row["version"]) >= 0).all() for row in rows.values())


def tried_read(tried: Tried, request: Record, hooks: RolloutHooks) -> Rows:
    """As :meth:`Tried.answers`, of an engine whose version changes meanwhile."""
    channel, found = LocalChannel(), Rows()
    channel.put(request)
    channel.close()
    for reply in tried.engine.generate(channel, seed=7, stage="rollout", hooks=hooks):
        for i, number in enumerate(reply.steps["sample"].tolist()):
            found[number] = {name: column[i] for name, column in reply.steps.items()}
    return found


@pytest.mark.slow
def test_a_sample_that_was_given_up_is_gone_on_with(tried: Tried) -> None:
    request, part = tried.request(range(4), **LONG), Rows()
    for looks in LOOKS:
        polls = itertools.count(1)
        hooks = RolloutHooks(
            newer_weights=lambda: None,
            should_abort=lambda *_: next(polls) == looks,  # noqa: B023
        )
        part = tried.answers(request, hooks=hooks)
        if all(0 < row["length"] < LENGTH for row in part.values()):
            break
    assert all(row["unfinished"] and 0 < row["length"] < LENGTH for row in part.values())
    order = [part[number] for number in range(4)]
    begun = {
        "begun_length": np.array([row["length"] for row in order]),
        "begun_tokens": np.stack([row["tokens"] for row in order]),
        "begun_logprobs": np.stack([row["logprobs"] for row in order]),
        "begun_version": np.stack([row["version"] for row in order]),
    }
    again = Record(request.identity, {**request.steps, **begun}, info=request.info)
    got = tried_read(tried, again, RolloutHooks())
    for number, row in got.items():
        count = part[number]["length"]
        np.testing.assert_array_equal(row["tokens"][:count], part[number]["tokens"][:count])
        assert row["length"] == LENGTH
    assert_of_policy(tried, request, got)


@pytest.mark.slow
def test_a_stop_string_is_found_across_the_place_where_a_sample_was_cut_off(tried: Tried) -> None:
    request = tried.request([0], **{**LONG, "min_tokens": 0, "stop": '["12"]'})
    digits = {d: tried.engine.chat_format.tokenizer.convert_tokens_to_ids(d) for d in "12"}
    begun = {
        "begun_length": np.array([1]),
        "begun_tokens": np.array([[digits["1"]]]),
        "begun_logprobs": np.zeros((1, 1), np.float32),
        "begun_version": np.array([[2]]),
    }
    for seed in range(60):
        info = {**request.info, "seed": seed}
        resumed = Record(request.identity, {**request.steps, **begun}, info=info)
        got = tried_read(tried, resumed, RolloutHooks(newer_weights=lambda: None))[0]
        if got["tokens"][1] == digits["2"]:
            assert (got["length"], got["stopped"]) == (2, True)
            return
    pytest.fail("no seed drew the other half")


@pytest.mark.slow
def test_a_request_longer_than_its_context_is_refused(tried: Tried) -> None:
    with pytest.raises(DataError, match="do not fit into 512"):
        tried.answers(tried.request(range(2), horizon=5000))
    began = time.monotonic()
    assert len(tried.answers(tried.request())) == 6, "it is fit to go on"
    assert time.monotonic() - began < 10


def test_a_sample_may_fill_the_context(tried: Tried) -> None:
    """To its last token, also where it was given up just before."""
    request = tried.request([2])
    most = 512 - int(request.steps["prompt_length"][0])
    info = {**request.info, "horizon": most, "min_tokens": most}
    got = tried.answers(Record(request.identity, request.steps, info=info))[2]
    assert got["length"] == most
    begun = {
        "begun_length": np.array([most - 1]),
        "begun_tokens": got["tokens"][None],
        "begun_logprobs": got["logprobs"][None],
        "begun_version": np.full((1, most), 3),
    }
    again = Record(request.identity, {**request.steps, **begun}, info=info)
    assert tried_read(tried, again, RolloutHooks())[2]["length"] == most


@pytest.mark.slow
def test_samples_that_its_cache_cannot_hold_together_are_the_same(tried: Tried) -> None:
    """Some are taken out of it, and go on later."""
    own: Any = tried.engine
    request = tried.request(range(60), horizon=200, min_tokens=100)
    before = tried.answers(request)
    own.close()
    cls = type(own)
    tokens, each = 1200, 2 * TOKENS.layers * TOKENS.kv_heads * 64 * 4
    known = "max_total_tokens" in cls.Config.model_fields
    settings = {"max_total_tokens": tokens} if known else {"kv_cache_gib": tokens * each / 2**30}
    small = Tried(cls(cls.Config(**settings), CausalLM, TOKENS), "tokens", tried.folder, None)
    small.engine.load(tried.folder, 3)
    try:
        got = small.answers(request)
    finally:
        small.engine.close()
    own.load(tried.folder, 3)
    assert_alike(got, before, tried)


@pytest.mark.slow
def test_the_experts_that_answer_are_those_of_the_newest_weights(
    tried: Tried, tmp_path: Path
) -> None:
    """The network's own names of them are in no checkpoint, and an engine may pass over these."""
    config = CausalLMConfig(
        architecture="qwen3_moe", num_experts=4, **TOKENS.model_dump(include=SIZES)
    )
    first, folder = tmp_path / "first", tmp_path / "experts"
    first.mkdir()
    folder.mkdir()
    CausalLM.create(config, {"alphabet": "0123456789+="}, 0, first)
    tried.policy = CausalLM.load(first, config)
    with torch.no_grad():
        for parameter in tried.policy.module.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    tried.policy.save(folder, dict(tried.policy.module.state_dict()))
    request = tried.request(range(12))
    tried.engine.load(folder, 10)
    before = tried.answers(request)
    assert_of_policy(tried, request, before)
    other = {
        name: tensor * (1.5 if ".experts." in name else 1.0)
        for name, tensor in tried.policy.module.state_dict().items()
    }
    tried.engine.load_state(other.items(), 11)
    tried.policy.module.load_state_dict(other)
    got = tried.answers(request)
    assert_of_policy(tried, request, got)
    assert any(not np.array_equal(got[n]["logprobs"], before[n]["logprobs"]) for n in got)
    if isinstance(tried.engine, ServerEngine):
        # One that dies is started from what it was given.
        os.killpg(tried.engine.processes[0].pid, 9)
        assert_alike(tried.answers(request), got, tried)
