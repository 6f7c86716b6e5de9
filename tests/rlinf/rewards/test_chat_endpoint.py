"""An endpoint is asked again where that helps, within its budget, and its key stays secret."""

from __future__ import annotations

import email.utils
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_STREAM
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlinf.config import validate
from rlinf.errors import ConfigError
from rlinf.rewards.chat_endpoint import (
    BYTES_PER_TOKEN,
    OVER_BUDGET,
    REFUSED,
    UNANSWERED,
    ChatEndpoint,
    ChatEndpointConfig,
    ChatReply,
    RequestBudget,
    parse_retry_after,
    read_api_key,
)
from tests.rlinf.rewards.chat_server import ChatServer, Reply, chat_server

QUESTION = [{"role": "user", "content": "is it?"}]
SENT = len(json.dumps({"model": "tiny", "messages": QUESTION, "temperature": 0.0}))
SENT //= BYTES_PER_TOKEN
"""Tokens of that request, as far as its length tells."""
SECRET = "sk-of-nobody-0123456789"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def endpoint(server: ChatServer, **config: Any) -> ChatEndpoint:
    made = ChatEndpointConfig(**{"base_url": server.url, "initial_backoff_s": 0.01, **config})
    return ChatEndpoint(made, RequestBudget(made))


def ask(server: ChatServer, **config: Any) -> ChatReply:
    return endpoint(server, **config).complete("tiny", QUESTION, temperature=0.0)


def test_a_request_has_model_messages_and_settings(server: ChatServer) -> None:
    assert ask(server) == ChatReply("Score: 1", "", 1, 10)
    assert server.requests == [{"model": "tiny", "messages": QUESTION, "temperature": 0.0}]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_pass_is_tried_again(server: ChatServer, status: int) -> None:
    server.queue.extend([Reply(status=status), Reply(status=status)])
    assert ask(server) == ChatReply("Score: 1", "", 3, 10)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 3}}]}', b"\xff"],
)
def test_an_answer_of_another_form_is_none(server: ChatServer, body: bytes) -> None:
    server.queue.extend([Reply(body=body)] * 2)
    # Both were billed: what is known of them is the length of what was sent.
    assert ask(server, max_retries=1) == ChatReply(None, UNANSWERED, 2, 2 * SENT)
    server.queue.extend([Reply(body=body)])
    assert ask(server, max_retries=1).text == "Score: 1"


def test_a_server_that_is_not_there_is_no_answer(server: ChatServer) -> None:
    config = ChatEndpointConfig(
        base_url="http://127.0.0.1:9/v1", max_retries=2, initial_backoff_s=0.01
    )
    got = ChatEndpoint(config, RequestBudget(config)).complete("tiny", QUESTION)
    assert got == ChatReply(None, UNANSWERED, 3, 0)


@pytest.mark.parametrize("slow", [Reply(wait_s=1.5), Reply(drip_s=0.2)], ids=["late", "drips"])
def test_a_slow_answer_is_waited_for_only_so_long(server: ChatServer, slow: Reply) -> None:
    """Also where some byte comes again and again, which keeps a socket's own limit from passing."""
    server.queue.append(slow)
    began = time.monotonic()
    assert ask(server, timeout_s=0.5, max_retries=0) == ChatReply(None, UNANSWERED, 1, SENT)
    assert time.monotonic() - began < 1.4


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = urlsplit(server.url).port
    with socket.socket() as full:
        full.bind(("127.0.0.2", port))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]  # more than it lets in: further ones wait
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        found = socket.getaddrinfo("127.0.0.1", port, type=SOCK_STREAM)
        silent = (*found[0][:4], full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [silent, *found])
        config = {"base_url": f"http://a-name:{port}/v1", "allow_http": True}
        got = ask(server, **config, timeout_s=2.0, max_retries=0)
        assert got == ChatReply("Score: 1", "", 1, 10)
        for one in waiting:
            one.close()


def test_it_waits_as_long_as_the_server_asks(server: ChatServer) -> None:
    server.queue.append(Reply(status=429, headers={"Retry-After": "1"}))
    assert ask(server).text == "Score: 1"
    assert server.times[1] - server.times[0] >= 1.0


def test_who_is_to_wait_too_long_gives_up(server: ChatServer) -> None:
    server.queue.append(Reply(status=503, headers={"Retry-After": "3600"}))
    assert ask(server, max_backoff_s=5.0) == ChatReply(None, UNANSWERED, 1, 0)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after(None) is None
    assert parse_retry_after(" 7 ") == 7
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert parse_retry_after(date) == pytest.approx(30, abs=2)
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert parse_retry_after("soon") is None
    assert parse_retry_after("-3") is None


def test_a_refused_request_is_not_tried_again(server: ChatServer) -> None:
    server.queue.append(Reply(status=400, body=b"too long"))
    assert ask(server) == ChatReply(None, REFUSED, 1, 0)


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_who_is_refused_as_such_is_told_what_the_server_said(
    server: ChatServer, status: int
) -> None:
    server.queue.append(Reply(status=status, body=b"no such model"))
    with pytest.raises(ConfigError, match=f"reward.endpoint.*status {status}: no such model"):
        ask(server)
    assert len(server.requests) == 1


def test_a_budget_of_requests_counts_every_try(server: ChatServer) -> None:
    server.queue.extend([Reply(status=500)] * 2)
    request = endpoint(server, max_requests=4)
    got = [request.complete("tiny", QUESTION) for _ in range(3)]
    assert [(a.text, a.failure, a.num_requests) for a in got] == [
        ("Score: 1", "", 3),
        ("Score: 1", "", 1),
        (None, OVER_BUDGET, 0),
    ]
    assert len(server.requests) == 4


def test_a_budget_of_tokens_ends_requests(server: ChatServer) -> None:
    request = endpoint(server, max_total_tokens=15)
    assert [request.complete("tiny", QUESTION).failure for _ in range(3)] == ["", "", OVER_BUDGET]
    unknown = b'{"choices": [{"message": {"content": "Score: 1"}}]}'
    server.queue.append(Reply(body=unknown))
    assert ask(server).num_tokens > 5, "estimated where the server does not say"


def test_a_key_is_sent_and_never_shown(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    refusal = Reply(status=400, body=f"wrong key {SECRET}".encode())
    server.queue.append(refusal)
    caplog.set_level(logging.DEBUG)
    assert ask(server, api_key_env="JUDGE_KEY").failure == REFUSED
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert "wrong key (key)" in caplog.text
    server.queue.append(Reply(status=401, body=refusal.body))
    with pytest.raises(ConfigError) as error:
        ask(server, api_key_env="JUDGE_KEY")
    assert SECRET not in f"{error.value}{caplog.text}{ChatEndpointConfig(base_url=server.url)}"


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    config = ChatEndpointConfig(base_url="https://host/v1", api_key_file=path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"api_key_file.*chmod 600"):
        read_api_key(config)
    path.chmod(0o600)
    assert read_api_key(config) == SECRET
    path.write_text("two\nlines")
    with pytest.raises(ConfigError, match="characters that no header may hold") as error:
        read_api_key(config)
    assert "two" not in str(error.value)
    path.unlink()
    with pytest.raises(ConfigError, match=r"api_key_file: cannot read"):
        read_api_key(config)


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"api_key_env: the environment has no NO_KEY"):
        read_api_key(ChatEndpointConfig(base_url="https://host/v1", api_key_env="NO_KEY"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"base_url": "http://host/v1"}, "unencrypted; use https"),
        ({"base_url": "http://127.0.0.1.host/v1"}, "unencrypted"),
        ({"base_url": "http://localhost.host/v1"}, "unencrypted"),
        ({"base_url": "https://key@host/v1"}, "more than scheme, host and path"),
        ({"base_url": "https://host/v1?key=3"}, "more than scheme, host and path"),
        ({"base_url": "host/v1"}, "no address"),
        ({"base_url": "ftp://host/v1"}, "no address"),
        ({"base_url": "https://host:port/v1"}, "no address"),
        ({"base_url": "https://ho st/v1"}, "no address"),
        ({"base_url": "https://h/v1", "api_key_env": "A", "api_key_file": "b"}, "give one"),
        ({"base_url": "https://h/v1", "max_retrys": 3}, "'max_retries'"),
    ],
)
def test_what_is_no_endpoint_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.endpoint.*{text}"):
        validate(ChatEndpointConfig, values, "reward.endpoint")


@pytest.mark.parametrize(
    "values",
    [
        {"base_url": "https://host:8000/v1"},
        {"base_url": "http://localhost:8000/v1"},
        {"base_url": "http://127.9.9.9/v1"},
        {"base_url": "http://[::1]:8000/v1"},
        {"base_url": "http://node17:8000/v1", "allow_http": True},
    ],
)
def test_encrypted_own_or_allowed_addresses_are_taken(values: dict[str, Any]) -> None:
    assert validate(ChatEndpointConfig, values, "reward.endpoint").base_url == values["base_url"]
