"""Several servers are asked as one: spread, updated together, and each replaced by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record
from rlinf.engines import server as servers
from rlinf.engines.base import RolloutHooks
from rlinf.engines.server_process import ServerError, ServerUnavailable
from rlinf.models.causal_lm import CausalLM
from tests.contracts.test_engine import TOKENS, Rows, Tried, assert_alike
from tests.rlinf.engines.small_server import SmallConfig, SmallEngine

HORIZON = 40
LONG = {"horizon": HORIZON, "min_tokens": HORIZON}


def started(folder: Path, **config: Any) -> Tried:
    """As ``tests.contracts.test_engine.new``, of servers that come up within seconds."""
    folder.mkdir(exist_ok=True)
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, folder)
    engine = SmallEngine(SmallConfig(**{"step_s": 0.005, **config}), CausalLM, TOKENS)
    engine.log_folder = folder.parent / "logs"
    engine.load(folder, 3)
    return Tried(engine, "tokens", folder, CausalLM.load(folder, TOKENS))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    tried = started(
        tmp_path_factory.mktemp("replicas") / "policy", replicas=2, max_load_imbalance=4
    )
    yield tried
    tried.engine.close()


@pytest.fixture
def tried(kept: Tried) -> Tried:
    """Two servers with their first weights."""
    engine: Any = kept.engine
    kept.policy = CausalLM.load(kept.folder, TOKENS)
    engine.load(kept.folder, 3)
    assert len(engine.processes) == 2
    return kept


def test_processes_of_a_server_are_told_to_meet_on_the_loopback_device(tried: Tried) -> None:
    engine: Any = tried.engine
    for process in engine.processes:
        values = psutil.Process(process.pid).environ()
        assert (values["GLOO_SOCKET_IFNAME"], values["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def read(tried: Tried) -> list[list[list[int]]]:
    """Of each server the prompts that it was asked to read so far."""
    engine: Any = tried.engine
    return [process.get("/read") for process in engine.processes]


def grouped(tried: Tried, groups: int, size: int, **info: Any) -> Record:
    """Samples of some groups, those of a group with one prompt."""
    request = tried.request(range(groups * size), **info)
    random = np.random.default_rng(0)
    prompts = random.integers(2, 14, (groups, 9)).repeat(size, axis=0)
    lengths = np.full(groups * size, 9)
    return Record(
        request.identity,
        {**request.steps, "prompt": prompts, "prompt_length": lengths},
        info=request.info,
    )


def assert_of_policy(tried: Tried, request: Record, got: Rows) -> None:
    pairs = [tried.actions_and_logprobs(got[number]) for number in request.steps["sample"].tolist()]
    expected_logprobs = tried.logprobs_of(request, [steps for steps, _ in pairs], 1.0)
    for (_, logprobs), expected in zip(pairs, expected_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_groups_are_spread_and_stay_together(tried: Tried) -> None:
    before = [len(prompts) for prompts in read(tried)]
    got = tried.answers(grouped(tried, 4, 4, **LONG))
    assert len(got) == 16
    new = [prompts[n:] for prompts, n in zip(read(tried), before, strict=True)]
    assert [len(prompts) for prompts in new] == [8, 8]
    first, second = ({tuple(prompt) for prompt in prompts} for prompts in new)
    assert not first & second
    assert len(first) == len(second) == 2


def test_a_group_that_is_too_large_for_one_is_shared(tried: Tried) -> None:
    before = [len(prompts) for prompts in read(tried)]
    tried.answers(grouped(tried, 1, 12, **LONG))
    counts = [len(prompts) - n for prompts, n in zip(read(tried), before, strict=True)]
    assert sum(counts) == 12
    assert min(counts) >= 4, "by max_load_imbalance=4 it is above the other by 5 at most"


def test_the_same_samples_come_whoever_made_them(tried: Tried, tmp_path: Path) -> None:
    request = tried.request(range(12))
    got = tried.answers(request)
    assert_of_policy(tried, request, got)
    alone = started(tmp_path / "alone")
    try:
        assert_alike(alone.answers(request), got, tried)
    finally:
        alone.engine.close()


def test_newer_weights_come_to_all(tried: Tried) -> None:
    request = grouped(tried, 6, 2, **LONG)
    before = tried.answers(request)
    state = {n: t * 1.25 for n, t in tried.policy.module.state_dict().items()}
    tried.engine.load_state(state.items(), 4)
    tried.policy.module.load_state_dict(state)
    counts = [len(prompts) for prompts in read(tried)]
    got = tried.answers(request)
    assert all(len(p) > n for p, n in zip(read(tried), counts, strict=True)), "both were asked"
    assert_of_policy(tried, request, got)
    for number in got:
        assert not np.array_equal(got[number]["logprobs"], before[number]["logprobs"])


def test_newer_weights_come_to_all_while_samples_are_under_way(
    tried: Tried, tmp_path: Path
) -> None:
    folder, requests = tmp_path / "newer", list[int]()
    folder.mkdir()
    tried.policy.save(folder, {n: t * 1.25 for n, t in tried.policy.module.state_dict().items()})

    def newer() -> tuple[Path, int] | None:
        requests.append(1)
        return (folder, 5) if len(requests) == 5 else None

    request = grouped(tried, 4, 2, **LONG)
    channel, rows = LocalChannel(), Rows()
    channel.put(request)
    channel.close()
    hooks = RolloutHooks(newer_weights=newer)
    for reply in tried.engine.generate(channel, seed=7, stage="rollout", hooks=hooks):
        for i, number in enumerate(reply.steps["sample"].tolist()):
            rows[number] = {name: column[i] for name, column in reply.steps.items()}
    assert len(rows) == 8
    for version, source in ((3, tried.folder), (5, folder)):
        tried.policy = CausalLM.load(source, TOKENS)
        expected_logprobs = tried.logprobs_of(request, [rows[n]["tokens"] for n in range(8)], 1.0)
        for n, expected in enumerate(expected_logprobs):
            mine = rows[n]["version"] == version
            assert mine.any()
            np.testing.assert_allclose(rows[n]["logprobs"][mine], expected[mine], atol=1e-5)


@pytest.mark.parametrize("victims", [1, 2])
def test_what_the_dead_took_with_them_is_asked_again(tried: Tried, victims: int) -> None:
    """Of the other one, which goes on meanwhile; where none is left, of one that is started."""
    engine: Any = tried.engine
    request = grouped(tried, 4, 2, **LONG)
    whole = tried.answers(request)
    pids, requests = [process.pid for process in engine.processes], list[int]()
    living = engine.processes[-1]
    before = len(living.get("/read"))

    def gives_up(left: int, of: int) -> bool:
        requests.append(left)
        if len(requests) == 5:
            for pid in pids[:victims]:
                os.killpg(pid, 9)
        return False

    got = tried.answers(request, hooks=RolloutHooks(should_abort=gives_up))
    assert_alike(got, whole, tried)
    if victims == 1:
        assert len(living.get("/read")) - before == 8, "its own four and the other's, none twice"
    engine.load(tried.folder, 3)
    after = [process.pid for process in engine.processes]
    assert len(after) == 2
    assert [a != b for a, b in zip(after, pids, strict=True)] == [True, victims == 2]
    assert_alike(tried.answers(request), whole, tried)


def test_one_that_does_not_come_up_again_is_done_without(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until weights come next, which all must have."""
    engine: Any = tried.engine
    request = grouped(tried, 4, 2, **LONG)
    whole = tried.answers(request)
    with monkeypatch.context() as patched:
        # This interpreter runs nothing.
        patched.setattr(servers, "resolve_interpreter", lambda name, key: "/bin/false")
        os.killpg(engine.processes[0].pid, 9)
        assert_alike(tried.answers(request), whole, tried)
        engine._servers.wait_ready()
        assert len(engine.processes) == 1
        assert "server 0 of 2 did not restart" in caplog.text
        with pytest.raises(ServerError, match="exit code 1 before it was ready"):
            engine.load(tried.folder, 3)
    engine.load(tried.folder, 3)
    assert_alike(tried.answers(request), whole, tried)


def test_one_that_hangs_is_replaced_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf.engines.server_process.LIVENESS_INTERVAL_S", 0.2)
    tried = started(tmp_path / "policy", heartbeat_timeout_s=2.0)
    engine: Any = tried.engine
    try:
        request = grouped(tried, 2, 2, **LONG)
        whole, requests = tried.answers(request), list[int]()
        first = engine.processes[0].pid

        def gives_up(left: int, of: int) -> bool:
            requests.append(left)
            if len(requests) == 2:
                os.killpg(first, signal.SIGSTOP)
            return False

        began = time.monotonic()
        got = tried.answers(request, hooks=RolloutHooks(should_abort=gives_up))
        assert time.monotonic() - began < 120
        assert len(requests) > 1, "samples were under way"
        assert engine.processes[0].pid != first
        assert_alike(got, whole, tried)
    finally:
        engine.close()


def test_one_that_is_only_slow_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf.engines.server_process.LIVENESS_INTERVAL_S", 0.2)
    tried = started(tmp_path / "policy", heartbeat_timeout_s=8.0, step_s=1.0)
    engine: Any = tried.engine
    try:
        first = engine.processes[0].pid
        assert len(tried.answers(tried.request([0], horizon=10, min_tokens=10))) == 1
        assert [process.pid for process in engine.processes] == [first]
    finally:
        engine.close()


def test_servers_that_sleep_hold_nothing_and_wake_with_their_weights(tmp_path: Path) -> None:
    """These on a CPU too: they free the weights, and cannot compute without them."""
    tried = started(tmp_path / "policy", replicas=2, sleeps=True)
    engine: Any = tried.engine
    request = grouped(tried, 4, 2, **LONG)
    try:
        whole = tried.answers(request)
        size = engine.group_sizes()["server"].on_device
        weights = {t.data_ptr(): t.nbytes for t in tried.policy.module.state_dict().values()}
        assert size == sum(weights.values()) + engine.kv_cache_bytes()
        assert engine.offload("server", 1) == size
        assert engine.group_sizes()["server"] == (0, size, 0)
        assert engine.offload("server", 1) == 0
        settings = {"tokens": [2, 3], "most": 1, "least": 0, "seed": 0, "temperature": 1.0}
        for process in engine.processes:
            with pytest.raises(ServerUnavailable):  # it has nothing to compute with
                process.post("/generate", {**settings, "stops": []})
        engine.load(tried.folder, 3)
        assert_alike(tried.answers(request), whole, tried)
        engine.offload("server", 1)
        os.killpg(engine.processes[0].pid, 9)
        engine.onload(["server"], copy_data=True)
        assert engine.group_sizes()["server"] == (size, 0, 0)
        assert_alike(tried.answers(request), whole, tried)
        engine.offload("server", 1)
        engine.onload(["server"], copy_data=False)
        engine.load_state(tried.policy.module.state_dict().items(), 4)
        got = tried.answers(request)
        assert_of_policy(tried, request, got)
    finally:
        engine.close()
    assert engine.group_sizes() == {}


def test_all_end_at_once_when_it_closes(tmp_path: Path) -> None:
    """One that is being started too."""
    tried = started(tmp_path / "policy", replicas=2)
    engine: Any = tried.engine
    os.killpg(engine.processes[0].pid, 9)
    tried.answers(grouped(tried, 4, 2, horizon=3))
    folder = str(engine._folder)  # where their sockets are
    own = [c for c in psutil.Process().children(recursive=True) if folder in _command(c)]
    assert len(own) >= 2
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 2
    assert engine.processes == []
    assert not any(child.is_running() for child in own)
    assert sorted(path.name[-6:] for path in engine.log_folder.iterdir()) == ["-0.log", "-1.log"]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
