"""A network that breaks on purpose."""

from __future__ import annotations

import socket
import threading
import time


class Proxy:
    """Passes bytes between a client and the host, slowly, and cuts the connection every so often.

    ``passed`` counts the bytes of the client.
    """

    def __init__(
        self, target: tuple[str, int], cut_after: int = 1 << 40, bytes_per_s: float = float("inf")
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._cut_after = target, cut_after
        self._bytes_per_s = bytes_per_s
        self.cuts = self.passed = 0
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            try:
                outer = socket.create_connection(self._target)
            except OSError:
                inner.close()
                continue
            for ends in ((inner, outer, True), (outer, inner, False)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        passed = 0
        try:
            while passed < self._cut_after and (data := source.recv(4096)):
                sink.sendall(data)
                passed += len(data)
                self.passed += len(data) * counts
                time.sleep(len(data) / self._bytes_per_s)
        except OSError:
            pass
        self.cuts += passed >= self._cut_after
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()
