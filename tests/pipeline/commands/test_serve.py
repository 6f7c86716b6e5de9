"""``rlinf serve`` answers requests with the right key until it gets a signal."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from pipeline.commands.results import resolve_weights
from pipeline.commands.serve import (
    KEY_VARIABLE,
    Address,
    key_from_environment,
    serve_model,
    serving_config,
)
from pipeline.validate_config import check_served_model
from rlinf import package_paths
from rlinf.errors import ConfigError, InputError

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")


@contextmanager
def served(
    model: Path, home: Path, *words: str, key: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process of the command, and the lines that it prints when it is ready."""
    environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(home)} | ({KEY_VARIABLE: key} if key else {})
    call = [sys.executable, "-m", "rlinf", "serve", str(model), "--port", "0", *words]
    process = subprocess.Popen(
        call, cwd=package_paths.ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    stream = process.stdout
    threading.Thread(target=lambda: [lines.put(line) for line in stream], daemon=True).start()
    try:
        shown: list[str] = []
        while not any("Ctrl-C" in line for line in shown):
            shown.append(lines.get(timeout=120))
        yield process, shown
    finally:
        process.kill()
        process.wait()


def url_of(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("serving "))
    return line.rpartition(" at ")[2].strip()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_served_to_who_has_the_key_until_a_signal(
    tiny_run: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    with served(tiny_run, tmp_path, "--version", "2", "--name", "mine") as (process, lines):
        text = "".join(lines)
        found = re.search(r"OPENAI_API_KEY=\$\(cat (\S+)\)", text)
        assert found is not None, text
        key_file = Path(found[1])
        assert key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text()
        assert len(key) >= 32
        assert key not in text
        assert key not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert "serving mine (weights version 2) at http://127.0.0.1:" in text
        settings = {"json": {"model": "mine", "prompt": "1+1=", "max_tokens": 3}, "timeout": 60}
        with httpx2.Client(base_url=url_of(lines), trust_env=False) as client:
            refused = client.post("/completions", **settings)  # type: ignore[arg-type]
            assert refused.status_code == 401
            headers = {"Authorization": f"Bearer {key}"}
            body = client.post("/completions", headers=headers, **settings).json()  # type: ignore[arg-type]
            assert body["system_fingerprint"] == "weights-2"
        process.send_signal(ending)
        assert process.wait(60) == 0
    assert not key_file.exists()


def test_a_key_of_the_environment_is_used_and_not_written(tiny_run: Path, tmp_path: Path) -> None:
    key = "0123456789abcdef-mine"
    with served(tiny_run, tmp_path, "engine.max_num_seqs=2", key=key) as (_, lines):
        assert f"OPENAI_API_KEY=${KEY_VARIABLE}" in "".join(lines)
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=url_of(lines), headers=headers, trust_env=False) as client:
            assert client.get("/models").json()["data"][0]["id"] == "tiny"
    assert not list(tmp_path.rglob("*.key"))


def test_weights_of_a_run_are_found(tiny_run: Path, tmp_path: Path) -> None:
    assert resolve_weights(tmp_path, None) == (tmp_path, 0)
    assert resolve_weights(tiny_run, 0)[0] != resolve_weights(tiny_run, 2)[0]
    assert resolve_weights(tiny_run, 2)[1] == 2
    with pytest.raises(InputError, match=r"no version 9 of the weights on disk; available: \[0"):
        resolve_weights(tiny_run, 9)
    with pytest.raises(InputError, match="is no run directory"):
        resolve_weights(tmp_path, 1)
    with pytest.raises(InputError, match="no such folder"):
        resolve_weights(tmp_path / "none", None)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.temperature=0.5", "rollout.temperature=0.5: an endpoint depends only on"),
        ("engine=direct", "engine.name: 'direct' is not for language models"),
        ("engine.python=vllm", "engine.python: rlinf serve runs the engine in its own process"),
        ("engine.max_num_seqs=0", "engine.max_num_seqs"),
        ("engine.max_num_seq=2", "engine.max_num_seq: unknown key; did you mean 'max_num_seqs'"),
    ],
)
def test_an_override_that_cannot_be_obeyed_is_an_error(
    tiny_run: Path, word: str, message: str
) -> None:
    folder, _ = resolve_weights(tiny_run, 2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_served_model(serving_config(folder, [word]))


@pytest.mark.parametrize("key", ["", "short", "with spaces in the key", "umlaut-ä-0123456789"])
def test_a_key_that_no_header_can_have_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        key_from_environment()


def test_a_port_in_use_is_an_error(tiny_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .*choose another port"):
            serve_model(tiny_run, [], address=Address(port=port))
