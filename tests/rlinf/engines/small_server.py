"""A server of its own for tests: it decodes with the policy's network, plainly, within seconds.

    python -m tests.rlinf.engines.small_server SOCKET MODEL STEP_S

Each token takes at least ``STEP_S`` seconds, so that samples are under way for a while.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import torch

from rlinf import package_paths
from rlinf.engines.resumable import GeneratedSegment, SegmentRequest
from rlinf.engines.server import ServerConfig, ServerEngine
from rlinf.engines.server_process import ServerProcess
from rlinf.models.causal_lm import CausalLM, CausalLMConfig


class SmallConfig(ServerConfig):
    server_python: str = sys.executable
    step_s: float = 0.0
    sleeps: bool = False


class SmallEngine(ServerEngine):
    """Stop tokens and strings, temperature and seeds; no cuts."""

    Config = SmallConfig
    server_module = "tests.rlinf.engines.small_server"
    server_packages = ("torch",)

    def server_args(self, model: Path, context_length: int, socket: Path) -> list[str]:
        return [str(socket), str(model), str(self._config.step_s)]

    def server_environment(self, socket: Path) -> Mapping[str, str]:
        return {"PYTHONPATH": str(package_paths.ROOT)}

    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        settings = {"most": request.max_tokens, "least": request.min_tokens, "seed": request.seed}
        sampling = {
            "temperature": request.sampling.temperature,
            "stops": sorted(self.stop_token_ids),
        }
        return "/generate", {"tokens": request.context_tokens, **settings, **sampling}

    def parse_response(self, values: Any) -> GeneratedSegment:
        return GeneratedSegment(values["tokens"], values["logprobs"], values["end"])

    def abort_requests(self, process: ServerProcess) -> None:
        process.post("/abort", check_heartbeat=True)

    @property
    def can_sleep(self) -> bool:
        return self._config.sleeps

    def sleep(self, process: ServerProcess) -> None:
        process.post("/sleep")

    def wake(self, process: ServerProcess) -> None:
        process.post("/wake")

    def update_weights(self, process: ServerProcess, folder: Path, version: int) -> None:
        process.post("/update", {"folder": str(folder)})


class Model:
    """What the server decodes with."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.step_s, self.lock = step_s, threading.Lock()
        self.aborted = 0
        self.read: list[list[int]] = []
        """Of each request what it asked to be read."""
        self.load(folder)

    def load(self, folder: Path) -> None:
        self.module = CausalLM.load(folder, CausalLMConfig()).module.eval()

    @torch.no_grad()
    def sleep(self) -> None:
        """Free the weights; computing with them fails then."""
        for parameter in self.module.parameters():
            parameter.data = torch.empty(0)

    @torch.inference_mode()
    def generate(self, requested: dict[str, Any]) -> dict[str, Any]:
        random, aborted = torch.Generator().manual_seed(requested["seed"]), self.aborted
        self.read.append(requested["tokens"])
        made, logprobs, end = list[int](), list[float](), "length"
        while len(made) < requested["most"]:
            if self.aborted != aborted:
                end = "abort"
                break
            with self.lock:
                tokens = torch.tensor([[*requested["tokens"], *made]])
                logits = self.module(input_ids=tokens).logits[0, -1].float()
            time.sleep(self.step_s)
            outputs = (logits / (requested["temperature"] or 1.0)).log_softmax(-1)
            drawn = outputs.clone()
            if len(made) < requested["least"]:
                drawn[requested["stops"]] = -torch.inf
            if requested["temperature"]:
                drawn -= torch.empty_like(outputs).exponential_(generator=random).log()
            made.append(int(drawn.argmax()))
            logprobs.append(float(outputs[made[-1]]))
            if made[-1] in requested["stops"]:
                end = "stop"
                break
        return {"tokens": made, "logprobs": logprobs, "end": end}


def serve(socket: str, folder: str, step_s: str) -> None:
    torch.set_num_threads(1)
    model = Model(Path(folder), float(step_s))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(model.read)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if self.path == "/generate":
                self._send(model.generate(body))
                return
            if self.path == "/update":
                model.load(Path(body["folder"]))
            elif self.path == "/sleep":
                model.sleep()
            elif self.path == "/abort":
                model.aborted += 1
            self._send(None)

        def _send(self, values: Any) -> None:
            data = json.dumps(values).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def address_string(self) -> str:
            return "local"

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True
        request_queue_size = 128

    Server(socket, Handler).serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
