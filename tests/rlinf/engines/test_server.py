"""Engines that are a server: beyond the contract, what becomes of the process and its weights."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlinf import package_paths
from rlinf.config import select_semantic
from rlinf.engines import engines
from rlinf.engines.base import RolloutHooks
from rlinf.engines.engine_plugins.server_launcher import shared_memory
from rlinf.engines.server_process import ServerError
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM
from tests.contracts.test_engine import TOKENS, Tried, assert_alike
from tests.rlinf.engines.test_external import LONG, engine_of, tried

__all__ = ["tried"]

NAMES = ["sglang", "vllm"]


@pytest.fixture(scope="module", params=NAMES)
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    yield from engine_of(request.param, tmp_path_factory.mktemp("server"))


@pytest.mark.slow
def test_what_a_server_took_with_it_is_asked_again(tried: Tried) -> None:
    """Killed while samples are under way: all of them come, and the same as without that."""
    request = tried.request(range(6), **LONG)
    whole, requests = tried.answers(request), list[int]()
    engine: Any = tried.engine
    first = engine.processes[0].pid

    def gives_up(left: int, of: int) -> bool:
        requests.append(left)
        if len(requests) == 8:
            os.killpg(first, 9)
        return False

    got = tried.answers(request, hooks=RolloutHooks(should_abort=gives_up))
    assert engine.processes[0].pid != first
    for number, row in whole.items():
        np.testing.assert_array_equal(got[number]["tokens"], row["tokens"])
        np.testing.assert_allclose(got[number]["logprobs"], row["logprobs"], atol=1e-5)


@pytest.mark.slow
def test_one_that_slept_answers_as_before(tried: Tried) -> None:
    """By the calls that free memory on a GPU; on a CPU the servers take them and free nothing."""
    engine: Any = tried.engine
    if engine.device.type == "cpu":
        assert engine.group_sizes() == {}
    request = tried.request(range(6))
    before = tried.answers(request)
    (process,) = engine.processes
    engine.sleep(process)
    engine.wake(process)
    engine.update_weights(process, tried.folder, 3)
    assert_alike(tried.answers(request), before, tried)
    assert [one.pid for one in engine.processes] == [process.pid]


@pytest.mark.slow
def test_no_other_node_reaches_it(tried: Tried) -> None:
    """What its processes open for each other is at the loopback device, the rest at files."""
    engine: Any = tried.engine
    pid = engine.processes[0].pid
    group = [process for process in psutil.process_iter() if _group(process.pid) == pid]
    assert len(group) > 1
    heard = [
        connection.laddr.ip
        for process in group
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(heard) <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_one_that_waits_leaves_the_processor_to_others(tried: Tried) -> None:
    engine: Any = tried.engine
    tried.answers(tried.request(range(2)))
    group = [one for one in psutil.process_iter() if _group(one.pid) == engine.processes[0].pid]

    def spent() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in group)

    time.sleep(1)
    before = spent()
    time.sleep(4)
    assert spent() - before < 0.4, "seconds of processor time in four"


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
        cwd=package_paths.ROOT,
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
    engine.log_folder = tmp_path / "logs"
    with pytest.raises(ServerError, match=r"(?s)exit code 1.*logs/.*No module named"):
        engine.load(folder, 1)
    engine.close()
    assert list(engine.log_folder.glob("*.log")), "its log stays"


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_is_not_there_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose: Any
) -> None:
    from pipeline.validate_config import validate_config
    from rlinf.config import RunConfig

    monkeypatch.setenv("RLINF_ENVS", str(tmp_path))
    monkeypatch.delenv("RLINF_INTERPRETERS", raising=False)  # interpreters with CPU shims
    config = RunConfig.model_validate(compose(f"engine={name}"))
    with pytest.raises(ConfigError, match=f"engine.server_python.*make env NAME={name}"):
        validate_config(config)


def test_where_a_server_runs_changes_no_result() -> None:
    here, there = ({"engine": {"name": "vllm", "server_python": path}} for path in ("/a", "/b"))
    assert select_semantic(here) == select_semantic(there) == {"engine": {"name": "vllm"}}
