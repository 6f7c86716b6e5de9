"""A chat model behind an OpenAI-compatible HTTP endpoint (``POST /chat/completions``).

Failed requests are retried within a budget, if a retry may help. Retries wait for a random time
below a limit that doubles each time ("full jitter": M. Brooker, Exponential Backoff And Jitter, AWS
Architecture Blog, 2015), and at least as long as the server's ``Retry-After`` says.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import logging
import os
import random
import secrets
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx2
from pydantic import Field, model_validator

from rlinf.config import Section
from rlinf.errors import ConfigError, DataError
from rlinf.progress import PROGRESS
from rlinf.verified_io import is_owner_only

MIN_BLOCKS = 1000
"""Minimum number of blocks of a budget. A budget of fewer requests has blocks of one request."""


class RequestBlocks:
    """The blocks of requests that processes reserve from the budget of a run before sending them.

    A block is a file whose text is the number of reserved requests, and whose name is the next free
    number. It is created with ``link``, which fails if another process was first, also on NFS. So
    all processes together never reserve more than the budget. Unsent requests of a block are lost
    when its process ends, so a block is no larger than its process needs.

    An object belongs to one process and is not thread-safe.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: folder of the blocks of all processes, earlier ones included; None: this is the
                only process.
        """
        self._folder = folder
        self._next = self._reserved = 0
        """Index of the next block, and number of requests reserved in all blocks before it."""

    def reserve(self, budget: int, num_needed: int) -> int:
        """Reserve a block of a budget.

        Args:
            budget: number of requests in the budget.
            num_needed: requests that this process needs, the maximum size of the block; below 1 it
                counts as 1.

        Returns:
            The size of the block; 0: the budget is used up.

        Raises:
            DataError: a file in the folder is not a block.
        """
        while True:
            self._refresh()
            size = min(budget - self._reserved, max(1, min(budget // MIN_BLOCKS, num_needed)))
            if size <= 0:
                return 0
            if self._folder is None or self._create_block(self._folder / str(self._next), size):
                self._reserved, self._next = self._reserved + size, self._next + 1
                return size

    def _refresh(self) -> None:
        """Read the blocks that other processes have reserved."""
        while self._folder is not None and (path := self._folder / str(self._next)).exists():
            try:
                size = int(path.read_text())
            except ValueError:
                raise DataError(
                    f"{path} does not contain the number of reserved requests; write it there"
                ) from None
            self._reserved, self._next = self._reserved + size, self._next + 1

    @staticmethod
    def _create_block(path: Path, size: int) -> bool:
        """Create a block. Return False if a block of this number exists."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}.{secrets.token_hex(8)}")
        with temporary.open("w") as file:
            file.write(str(size))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True


log = logging.getLogger(__name__)
# httpx2 would log every request.
logging.getLogger("httpx2").setLevel(logging.WARNING)

ENDPOINT_KEY = "reward.endpoint"
ROUTE = "/chat/completions"
MAX_RESPONSE_BYTES = 8 << 20
"""Maximum size of a response. A longer one is an error."""
RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
"""Status codes below 500 after which the same request may succeed. All codes from 500 on are
retried."""
BAD_REQUEST_STATUS = frozenset({400, 413, 422})
"""Status codes that reject this request only, not every request."""
CONNECT_SHARE = 0.9
"""Share of a request's time limit after which connecting fails."""
BYTES_PER_TOKEN = 4
"""Estimate that is used if a server does not report the number of tokens."""
UNANSWERED, REFUSED, OVER_BUDGET = "unanswered", "refused", "over_budget"
"""Values of :attr:`ChatReply.failure`."""


class ChatEndpointConfig(Section):
    """Settings of the connection to a chat model. None of them changes the request itself."""

    base_url: str
    """URL before ``/chat/completions``, such as ``https://host/v1``."""
    api_key_env: str | None = None
    """Environment variable that contains the API key."""
    api_key_file: Path | None = None
    """File that contains the API key, readable only by its owner. Without either setting, no key is
    sent."""
    allow_http: bool = False
    """Send texts and key unencrypted to other machines, if the URL says ``http``."""
    max_concurrency: int = Field(default=16, gt=0)
    """Maximum number of concurrent requests of each process of the stage."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one request, from connecting to the last byte."""
    max_retries: int = Field(default=5, ge=0)
    """Maximum number of retries of a request."""
    initial_backoff_s: float = Field(default=0.5, gt=0)
    """Maximum wait before the first retry; it doubles with each further one."""
    max_backoff_s: float = Field(default=60.0, gt=0)
    """Upper limit of all waits. If the server demands a longer wait, the request fails."""
    max_requests: int | None = Field(default=None, gt=0)
    """Budget of a run over all its processes: number of requests, retries included."""
    max_total_tokens: int | None = Field(default=None, gt=0)
    """Budget of a run in tokens of requests and answers. Requests in flight may exceed it."""

    @model_validator(mode="after")
    def _check_url_and_key(self) -> ChatEndpointConfig:
        parts = _split_url(self.base_url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "base_url has more than scheme, host and path; a key belongs in api_key_env or "
                "api_key_file, because URLs appear in logs and files"
            )
        if parts.scheme == "http" and not (self.allow_http or _is_loopback(parts.hostname or "")):
            raise ValueError(
                f"base_url {self.base_url} would send texts and key unencrypted; use https, or set "
                "allow_http=true where the network is trusted"
            )
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_env and api_key_file are both given; give one")
        return self


@dataclass(frozen=True)
class ChatReply:
    """Result of a request, or the reason why there is none."""

    text: str | None
    """Text of the answer; None: there is no answer."""
    failure: str = ""
    """Reason why there is no answer: no retry helped, the server rejected this request, or the
    budget is used up. Empty: there is an answer."""
    num_requests: int = 0
    """Number of requests that were sent."""
    num_tokens: int = 0
    """Number of tokens of the requests and the answer."""


def read_api_key(config: ChatEndpointConfig) -> str | None:
    """Return the API key of an endpoint; None if none is configured.

    Raises:
        ConfigError: the variable is not set, or the file is missing, empty or readable by others.
    """
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"{ENDPOINT_KEY}.api_key_env: the environment has no {config.api_key_env}; "
                "export it where the run is started"
            )
    elif config.api_key_file is not None:
        path = config.api_key_file.expanduser()
        try:
            with path.open("rb") as file:
                if not is_owner_only(file.fileno()):
                    raise ConfigError(
                        f"{ENDPOINT_KEY}.api_key_file: other users can read {path}; run chmod 600"
                    )
                key = file.read(1 << 16).decode(errors="replace").strip()
        except OSError as error:
            raise ConfigError(
                f"{ENDPOINT_KEY}.api_key_file: cannot read {path}: {error.strerror}"
            ) from None
        if not key:
            raise ConfigError(f"{ENDPOINT_KEY}.api_key_file: {path} is empty")
    if key is not None and not (key.isascii() and key.isprintable()):
        # The message does not show the key.
        raise ConfigError(f"{ENDPOINT_KEY}: the key holds characters that no header may hold")
    return key


class RequestBudget:
    """The budget of a run, and the usage that this process knows; thread-safe."""

    def __init__(self, config: ChatEndpointConfig, blocks: RequestBlocks | None = None) -> None:
        """
        Args:
            blocks: requests that all processes have reserved; None: there is only this process.
        """
        self._config, self._lock = config, threading.Lock()
        self._blocks = RequestBlocks(None) if blocks is None else blocks
        self._unsent = self._expected = 0
        """Unsent requests of the last reserved block, and requests that are still expected."""
        self.requests = self.tokens = 0
        """Requests sent and tokens used by all processes, as far as this one knows."""

    def expect_requests(self, requests: int) -> None:
        """Announce the number of requests that are about to be sent, without retries."""
        with self._lock:
            self._expected = requests

    def record_usage(self, requests: int, tokens: int) -> None:
        """Record the usage of all processes; a number below the known one is ignored."""
        with self._lock:
            self.requests, self.tokens = max(self.requests, requests), max(self.tokens, tokens)

    def acquire(self) -> bool:
        """Return whether another request may be sent, and count it if so.

        Raises:
            DataError: as :meth:`rlinf.rewards.chat_endpoint.RequestBlocks.reserve`.
        """
        max_requests, max_tokens = self._config.max_requests, self._config.max_total_tokens
        with self._lock:
            if max_tokens is not None and self.tokens >= max_tokens:
                return False
            if max_requests is not None:
                # Requests that were sent without ``max_requests`` are in no block.
                if self.requests >= max_requests:
                    return False
                self._unsent = self._unsent or self._blocks.reserve(max_requests, self._expected)
                if not self._unsent:
                    return False
                self._unsent, self._expected = self._unsent - 1, max(0, self._expected - 1)
            self.requests += 1
            return True

    def add_tokens(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


class ChatEndpoint:
    """Client of an endpoint; thread-safe."""

    def __init__(self, config: ChatEndpointConfig, budget: RequestBudget) -> None:
        """
        Raises:
            ConfigError: the configured key does not exist.
        """
        self._config, self._budget = config, budget
        self._key = read_api_key(config)
        self._tls = ssl.create_default_context()
        self._not_before = 0.0
        """Monotonic time before which the server forbids further requests (``Retry-After``)."""

    def complete(
        self, model: str, messages: Sequence[Mapping[str, str]], **extra_body: Any
    ) -> ChatReply:
        """Return the answer to a conversation.

        Args:
            messages: ``role`` and ``content``.
            extra_body: further fields of the request, such as ``temperature``.

        Raises:
            ConfigError: the endpoint rejects all requests: no such route, model or key.
        """
        config = self._config
        body = json.dumps({"model": model, "messages": list(map(dict, messages)), **extra_body})
        num_requests, num_tokens, last_error = 0, 0, ""
        for attempt in range(config.max_retries + 1):
            time.sleep(max(0.0, self._not_before - time.monotonic()))
            if not self._budget.acquire():
                return ChatReply(None, OVER_BUDGET, num_requests, num_tokens)
            num_requests += 1
            retry_after_s = None
            try:
                status, headers, data = asyncio.run(self._post(body))
                PROGRESS.mark()
                if status == 200:
                    text, used = _parse_response(data, body)
                    self._budget.add_tokens(used)
                    return ChatReply(text, "", num_requests, num_tokens + used)
                last_error = f"status {status}: {self._redacted(data)}"
                if status in BAD_REQUEST_STATUS:
                    log.warning("the judge refuses a request (%s)", last_error)
                    return ChatReply(None, REFUSED, num_requests, num_tokens)
                if status not in RETRYABLE_STATUS and status < 500:
                    raise ConfigError(
                        f"{ENDPOINT_KEY}: {config.base_url} refuses requests with {last_error}"
                    )
                retry_after_s = parse_retry_after(headers.get("retry-after"))
            except (OSError, httpx2.HTTPError, ValueError) as error:
                if not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    # The answer is lost, but the server may charge for it.
                    used = len(body) // BYTES_PER_TOKEN
                    self._budget.add_tokens(used)
                    num_tokens += used
                last_error = self._redacted(f"{type(error).__name__}: {error}".encode())
            if attempt == config.max_retries or (
                retry_after_s is not None and retry_after_s > config.max_backoff_s
            ):
                break
            # Results do not depend on the time of a request, so an unseeded random wait is safe.
            limit = min(config.max_backoff_s, config.initial_backoff_s * 2**attempt)
            if retry_after_s is not None:
                self._not_before = max(self._not_before, time.monotonic() + retry_after_s)
            time.sleep(max(retry_after_s or 0.0, random.uniform(0, limit)))
        log.warning(
            "the judge did not answer %d times, the last time with %s", num_requests, last_error
        )
        return ChatReply(None, UNANSWERED, num_requests, num_tokens)

    async def _post(self, body: str) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, the headers and the body of the response.

        Raises:
            TimeoutError: the time limit has passed, even if single bytes still arrive.
            httpx2.HTTPError, ValueError: there is no complete response, or it is too long.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        url, limit_s = self._config.base_url.rstrip("/") + ROUTE, self._config.timeout_s
        data = bytearray()
        # The client's own limits are for single reads. Only connecting has one, so that a request
        # that was never sent is recognised.
        timeout = httpx2.Timeout(None, connect=CONNECT_SHARE * limit_s)
        try:
            async with (
                asyncio.timeout(limit_s),
                httpx2.AsyncClient(verify=self._tls, timeout=timeout, trust_env=False) as client,
                client.stream("POST", url, content=body.encode(), headers=headers) as response,
            ):
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_RESPONSE_BYTES:
                        raise ValueError(f"an answer of more than {MAX_RESPONSE_BYTES >> 20} MiB")
                return response.status_code, response.headers, bytes(data)
        except TimeoutError:
            raise TimeoutError(f"no answer within {limit_s:g} s") from None

    def _redacted(self, data: bytes) -> str:
        """Return the beginning of a server's message on one line, without the key, which some
        servers repeat."""
        text = " ".join(data[:2000].decode(errors="replace").split())
        return (text if self._key is None else text.replace(self._key, "(key)"))[:300]


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header (RFC 9110, 10.2.3); None if it is invalid."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _parse_response(data: bytes, body: str) -> tuple[str, int]:
    """Return text and number of tokens of a response.

    Raises:
        ValueError: the response is malformed.
    """
    try:
        values = json.loads(data)
        text = values["choices"][0]["message"]["content"]
        used = (values.get("usage") or {}).get("total_tokens")
    except (LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("a malformed answer") from None
    # The content is null if the answer ended before its first token.
    text = "" if text is None else text
    if not isinstance(text, str):
        raise ValueError("an answer without text")
    if not isinstance(used, int) or isinstance(used, bool) or used < 0:
        used = (len(body) + len(text)) // BYTES_PER_TOKEN
    return text, used


def _split_url(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # from an invalid port
        is_valid = False
    if not is_valid or not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"base_url {url!r} is no address; expected something like https://host/v1")
    return parts


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
