"""SGLang as a server; see :mod:`rlinf.engines.server`.

What it takes to keep the contract is changed in its processes (``inside/rlinf_sglang.py``). On a
CPU two of its packages have stand-ins (``inside/sglang_cpu``): its kernels are published for GPUs
alone.
"""

from __future__ import annotations

import itertools
import os
import socket as sockets
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.legs import Ask, Leg
from rlinf.engines.process import ServerProcess
from rlinf.engines.server import INSIDE, ServerConfig, ServerEngine
from rlinf.errors import ConfigError

STARTED = ("rlinf.engines.inside.rlinf_sglang",)
"""Is part of the identity of what the engine makes (:mod:`stages.code`)."""
PARTS = ["kv_cache", "weights"]
"""Of its memory."""
STAND_INS = INSIDE / "sglang_cpu"
"""Of packages, on a CPU."""
MORE = 8
"""Tokens that SGLang keeps free at the end of what it says that it takes: a prompt may come to six
before it, a response is cut off two before it, and that would look like its end."""
VARIABLES = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by MORE, which no sample reaches
"""Of the environment of every process that imports SGLang."""


class CacheConfig(ExternalConfig):
    """What SGLang's server and SGLang in process have in common."""

    cache_tokens: int = 65536
    """Tokens whose keys and values are cached, in place of ``cache_gib``."""


class Cached(ExternalEngine):
    """An engine whose cache is so many tokens."""

    def cache_bytes(self) -> int:
        """Of keys and values on a GPU: 2 x layers x key-value heads that are there x size of a
        head, for each token."""
        settings = self._settings
        heads = settings.num_attention_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        shared = getattr(settings, "num_key_value_heads", None) or heads
        values = 2 * settings.num_hidden_layers * max(1, shared // self.world.layout.tp)
        width: int = getattr(torch, self._policy_config.dtype).itemsize
        return int(self._config.cache_tokens * values * size * width)

    def _known(self, model: Path) -> None:
        super()._known(model)
        asked, cached = self._config.context, self._config.cache_tokens - MORE
        if cached < (asked or 1):
            raise ConfigError(
                f"engine.cache_tokens: {self._config.cache_tokens} hold no sample of "
                f"{asked or 1} tokens and {MORE} more; raise it, or lower engine.context"
            )
        self._context = min(self._context, cached)


class SGLangConfig(CacheConfig, ServerConfig):
    """Decoding by an SGLang server."""

    server_python: str = "sglang"


class SGLangEngine(Cached, ServerEngine):
    """See the module."""

    Config = SGLangConfig
    module = "rlinf_sglang"
    package = "sglang"

    def command(self, model: Path, context: int, socket: Path) -> list[str]:
        with sockets.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # nothing listens there; others are chosen from it
        return [
            *arguments(self, model, context),
            *("--port", str(port), "--skip-server-warmup", "--log-level-http", "warning"),
            # Without it a scheduler that waits takes a core from whatever runs meanwhile.
            "--sleep-on-idle",
        ]

    def variables(self, socket: Path) -> Mapping[str, str]:
        # One of its own for each start: what a dead server left in it would be taken for answers.
        meeting = socket.with_name(f"meeting-{uuid.uuid4().hex}")
        always = {
            **VARIABLES,
            "RLINF_SOCKET": str(socket),
            # Else a store of torch listens, for anyone, at a port of all networks of the node.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}",
        }
        if self.device.type != "cpu":
            return always
        own = cpu_variables(self.world.layout.tp, self._config.threads)
        return {**always, **own, "PYTHONPATH": f"{INSIDE}:{STAND_INS}"}

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        body = {"input_ids": ask.tokens, "sampling_params": settings(ask, self.stops_of(ask))}
        return "/generate", {**body, "return_logprob": True}

    def answer(self, values: Any) -> Leg:
        about = values["meta_info"]
        logprobs = [entry[0] for entry in about["output_token_logprobs"]]
        return Leg(values["output_ids"], logprobs, about["finish_reason"]["type"])

    def stop(self, process: ServerProcess) -> None:
        process.post("/abort_request", {"abort_all": True}, watched=True)

    def sleep(self, process: ServerProcess) -> None:
        process.post("/release_memory_occupation", {"tags": PARTS})

    def wake(self, process: ServerProcess) -> None:
        process.post("/resume_memory_occupation", {"tags": PARTS})

    def update(self, process: ServerProcess, folder: Path, version: int) -> None:
        process.post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)},
        )


def arguments(engine: ExternalEngine, model: Path, context: int) -> list[str]:
    """Of SGLang's command line: what is decoded, and how.

    Args:
        model: the folder.
        context: most tokens of a prompt and its response together.
    """
    config, policy = engine._config, engine._policy_config
    on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    return [
        *("--model-path", str(model)),
        *("--dtype", policy.dtype, "--context-length", str(context + MORE)),
        *("--tp-size", str(engine.world.layout.tp)),
        *("--max-running-requests", str(config.max_rows)),
        *("--max-total-tokens", str(config.cache_tokens)),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *(["--enable-memory-saver"] if engine.sleeps else []),
        *(on_cpu if engine.device.type == "cpu" else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def settings(ask: Ask, stops: Collection[int]) -> dict[str, Any]:
    """How SGLang samples a leg.

    Args:
        stops: tokens that end a sample.
    """
    sampling = ask.sampling
    return {
        "max_new_tokens": ask.most,
        "min_new_tokens": ask.least,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "sampling_seed": ask.seed,
        # It looks for them before min_new_tokens as well: then they are looked for here alone.
        "stop": [] if ask.least else list(sampling.stop),
        "stop_token_ids": sorted(stops),
        "ignore_eos": not stops,
        "no_stop_trim": True,
    }


def cpu_variables(processes: int, threads: int) -> dict[str, str]:
    """Variables of the environment of SGLang's processes on a CPU."""
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": cores(processes, threads),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def cores(processes: int, threads: int) -> str:
    """Numbers of the cores that each of some processes computes on, as SGLang has them: without
    it there may be no more processes than nodes of memory."""
    free = itertools.cycle(sorted(os.sched_getaffinity(0)))
    each = (itertools.islice(free, threads) for _ in range(processes))
    return "|".join(",".join(map(str, sorted(set(own)))) for own in each)
