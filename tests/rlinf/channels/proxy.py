"""A network that breaks on purpose."""

from __future__ import annotations

import socket
import threading


class Proxy:
    """Passes bytes between a client and the host, and cuts the connection every so often."""

    def __init__(self, target: tuple[str, int], cut_after: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._cut_after = target, cut_after
        self.cuts = 0
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection(self._target)
            for a, b in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        passed = 0
        try:
            while passed < self._cut_after and (data := source.recv(4096)):
                sink.sendall(data)
                passed += len(data)
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
