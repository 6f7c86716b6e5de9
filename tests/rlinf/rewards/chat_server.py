"""A small HTTP server with the interface of a chat model, which answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is answered to one request."""

    text: str | None = "Score: 1"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """In place of a well-formed answer."""
    wait_s: float = 0.0
    """Before it begins."""
    drip_s: float = 0.0
    """Between two bytes of the body."""


@dataclass
class ChatServer:
    """What it answers and what it was requests."""

    url: str = ""
    answer: Callable[[str], Reply] = lambda question: Reply()
    """To the last message of a request, unless a reply is in ``queue``."""
    queue: deque[Reply] = field(default_factory=deque)
    """Replies to the next requests."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    """Requests that were ever waiting for their answer at once."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Up for as long as the context, at a port of the loopback device."""
    state = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.requests.append(body)
                state.headers.append(dict(self.headers))
                state.times.append(time.monotonic())
                state.under_way += 1
                state.most = max(state.most, state.under_way)
                queued = state.queue.popleft() if state.queue else None
            if self.path != "/v1/chat/completions":
                reply = Reply(status=404, body=b"no such route")
            else:
                reply = queued or state.answer(body["messages"][-1]["content"])
            time.sleep(reply.wait_s)
            # Before it is answered: a client that has its answer may send its next request sooner
            # than this thread runs again.
            with state.lock:
                state.under_way -= 1
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            message = {"role": "assistant", "content": reply.text}
            values = {"choices": [{"message": message}], "usage": {"total_tokens": 10}}
            data = json.dumps(values).encode() if reply.body is None else reply.body
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                for part in [bytes([b]) for b in data] if reply.drip_s else [data]:
                    self.wfile.write(part)
                    self.wfile.flush()
                    time.sleep(reply.drip_s)
            except OSError:
                pass  # the client has gone, as some tests want

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
