"""Engines that are a server: beyond the contract, what becomes of the process and its weights."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlinf import tree
from rlinf.config import semantic
from rlinf.data.record import Record
from rlinf.engines import engines
from rlinf.engines.base import Hooks
from rlinf.engines.inside.start import shared_memory
from rlinf.engines.process import ServerError
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLM
from tests.contracts.test_engine import SERVERS, TOKENS, Rows, Tried, assert_alike, new

NAMES = ["sglang", "vllm"]
LENGTH = 450
"""Tokens: so many that a server is not through with them before it is interrupted."""
LONG = {"horizon": LENGTH, "min_tokens": LENGTH}


@pytest.fixture(scope="module", params=NAMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine and its policy; up from one test to the next."""
    tried = new((request.param, "tokens"), tmp_path_factory.mktemp("server"))
    yield tried
    SERVERS.pop(request.param).close()


@pytest.fixture
def tried(server: Tried) -> Tried:
    """The same with its first weights."""
    server.policy = CausalLM.load(server.folder, TOKENS)
    if server.engine.version != 3:
        server.engine.load(server.folder, 3)
    return server


def assert_of_policy(tried: Tried, request: Record, got: Rows) -> None:
    pairs = [tried.taken(got[number]) for number in request.steps["sample"].tolist()]
    judged = tried.judged(request, [steps for steps, _ in pairs], request.info["temperature"])
    for (_, logprobs), expected in zip(pairs, judged, strict=True):
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


@pytest.mark.slow
def test_newer_weights_come_while_samples_are_under_way(tried: Tried, tmp_path: Path) -> None:
    """Tokens before and after have the log-probabilities of their own weights."""
    folder, asked = tmp_path / "newer", list[int]()
    folder.mkdir()
    tried.policy.save(folder, scaled(tried, 1.25))

    def newer() -> tuple[Path, int] | None:
        asked.append(1)
        return (folder, 5) if len(asked) == 8 else None

    request = tried.request(range(6), **LONG)
    rows = tried_read(tried, request, Hooks(newer=newer))
    for version, source in ((3, tried.folder), (5, folder)):
        tried.policy = CausalLM.load(source, TOKENS)
        steps = [rows[n]["tokens"] for n in range(6)]
        for n, expected in enumerate(tried.judged(request, steps, 1.0)):
            mine = rows[n]["version"] == version
            assert 0 < mine.sum() < LENGTH
            np.testing.assert_allclose(rows[n]["logprobs"][mine], expected[mine], atol=1e-5)
    assert all((np.diff(row["version"]) >= 0).all() for row in rows.values())


def tried_read(tried: Tried, request: Record, hooks: Hooks) -> Rows:
    """As :meth:`Tried.answers`, of an engine whose version changes meanwhile."""
    from rlinf.channels.local import LocalChannel

    channel, found = LocalChannel(), Rows()
    channel.put(request)
    channel.close()
    for reply in tried.engine.generate(channel, seed=7, stage="rollout", hooks=hooks):
        for i, number in enumerate(reply.steps["sample"].tolist()):
            found[number] = {name: column[i] for name, column in reply.steps.items()}
    return found


@pytest.mark.slow
def test_a_sample_that_was_given_up_is_gone_on_with(tried: Tried) -> None:
    asked = list[int]()

    def gives_up(left: int, of: int) -> bool:
        asked.append(left)
        return len(asked) == 8

    request = tried.request(range(4), **LONG)
    part = tried.answers(request, hooks=Hooks(newer=lambda: None, gives_up=gives_up))
    assert all(row["unfinished"] and 0 < row["length"] < LENGTH for row in part.values())
    order = [part[number] for number in range(4)]
    begun = {
        "begun_length": np.array([row["length"] for row in order]),
        "begun_tokens": np.stack([row["tokens"] for row in order]),
        "begun_logprobs": np.stack([row["logprobs"] for row in order]),
        "begun_version": np.stack([row["version"] for row in order]),
    }
    again = Record(request.identity, {**request.steps, **begun}, info=request.info)
    got = tried_read(tried, again, Hooks())
    for number, row in got.items():
        count = part[number]["length"]
        np.testing.assert_array_equal(row["tokens"][:count], part[number]["tokens"][:count])
        assert row["length"] == LENGTH
    assert_of_policy(tried, request, got)


@pytest.mark.slow
def test_a_stop_string_is_found_across_the_place_where_a_sample_was_cut_off(tried: Tried) -> None:
    request = tried.request([0], **{**LONG, "min_tokens": 0, "stop": '["12"]'})
    digits = {d: tried.engine._tokenizer.convert_tokens_to_ids(d) for d in "12"}
    begun = {
        "begun_length": np.array([1]),
        "begun_tokens": np.array([[digits["1"]]]),
        "begun_logprobs": np.zeros((1, 1), np.float32),
        "begun_version": np.array([[2]]),
    }
    for seed in range(60):
        info = {**request.info, "seed": seed}
        asked = Record(request.identity, {**request.steps, **begun}, info=info)
        got = tried_read(tried, asked, Hooks(newer=lambda: None))[0]
        if got["tokens"][1] == digits["2"]:
            assert (got["length"], got["stopped"]) == (2, True)
            return
    pytest.fail("no seed drew the other half")


@pytest.mark.slow
def test_what_a_server_took_with_it_is_asked_again(tried: Tried) -> None:
    """Killed while samples are under way: all of them come, and the same as without that."""
    request = tried.request(range(6), **LONG)
    whole, asked = tried.answers(request), list[int]()
    engine: Any = tried.engine
    first = engine.processes[0].pid

    def gives_up(left: int, of: int) -> bool:
        asked.append(left)
        if len(asked) == 8:
            os.killpg(first, 9)
        return False

    got = tried.answers(request, hooks=Hooks(gives_up=gives_up))
    assert engine.processes[0].pid != first
    for number, row in whole.items():
        np.testing.assert_array_equal(got[number]["tokens"], row["tokens"])
        np.testing.assert_allclose(got[number]["logprobs"], row["logprobs"], atol=1e-5)


@pytest.mark.slow
def test_one_that_slept_answers_as_before(tried: Tried) -> None:
    """By the calls that free memory on a GPU; on a CPU the servers take them and free nothing."""
    engine: Any = tried.engine
    if engine.device.type == "cpu":
        assert engine.size() == {}
    request = tried.request(range(6))
    before = tried.answers(request)
    (process,) = engine.processes
    engine.sleep(process)
    engine.wake(process)
    engine.update(process, tried.folder, 3)
    assert_alike(tried.answers(request), before, tried)
    assert [one.pid for one in engine.processes] == [process.pid]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_ends_with_the_process_that_started_it(name: str, tmp_path: Path) -> None:
    """Whose death runs none of its code; nothing stays in memory."""
    program = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from tests.contracts.test_engine import new
        tried = new(({name!r}, "tokens"), Path(sys.argv[1]))
        print(tried.engine.processes[0].pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=tree.ROOT,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        group = [process for process in psutil.process_iter() if _group(process.pid) == pid]
        assert len(group) > 1, "it has processes of its own"
        memory = shared_memory(pid)
        parent.kill()
    psutil.wait_procs(group, timeout=20)
    assert not any(process.is_running() for process in group)
    assert not [path for path in memory if path.exists()]


def _group(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return -1


@pytest.mark.parametrize("name", NAMES)
def test_one_that_does_not_come_up_says_so_with_the_end_of_its_log(
    name: str, tmp_path: Path
) -> None:
    """This interpreter has no such package."""
    cls = engines.get(name)
    folder = tmp_path / "policy"
    folder.mkdir()
    CausalLM.create(TOKENS, {"alphabet": "0123456789+="}, 0, folder)
    engine = cls(cls.Config(server_python=sys.executable), CausalLM, TOKENS)
    engine.logs = tmp_path / "logs"
    with pytest.raises(ServerError, match=r"(?s)exit code 1.*logs/.*No module named"):
        engine.load(folder, 1)
    engine.close()
    assert list(engine.logs.glob("*.log")), "its log stays"


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_is_not_there_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose: Any
) -> None:
    from pipeline.check import check
    from rlinf.config import RunConfig

    monkeypatch.setenv("RLINF_ENVS", str(tmp_path))
    config = RunConfig.model_validate(compose(f"engine={name}"))
    with pytest.raises(ConfigError, match=f"engine.server_python.*make env NAME={name}"):
        check(config)


def test_where_a_server_runs_changes_no_result() -> None:
    here, there = ({"engine": {"name": "vllm", "server_python": path}} for path in ("/a", "/b"))
    assert semantic(here) == semantic(there) == {"engine": {"name": "vllm"}}


@pytest.mark.slow
def test_a_request_longer_than_its_context_is_refused(tried: Tried) -> None:
    with pytest.raises(DataError, match="do not fit into 512"):
        tried.answers(tried.request(range(2), horizon=5000))
    began = time.monotonic()
    assert len(tried.answers(tried.request())) == 6, "it is fit to go on"
    assert time.monotonic() - began < 10
