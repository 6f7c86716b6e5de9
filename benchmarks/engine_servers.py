"""Server engines: overhead of requests through this package, and time of weight updates in place.

The engine and a plain client alternately send the same requests to the same server. The client runs
in the environment of the server and uses aiohttp, as the load tests of both projects do. It opens
one connection per request and ignores the responses. A weight update in place is compared with a
restart of the server, which is the alternative.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.row import BenchmarkRow, median_row
from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId, Scalar
from rlinf.engines import engines
from rlinf.engines.resumable import ParsedRequest, ResumableSample
from rlinf.engines.token_sampling import SamplingParams
from rlinf.interpreters import resolve_interpreter
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig

COUNT, LENGTH, ROUNDS, STARTS = 128, 64, 7, 2
MODEL = CausalLMConfig(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512)
CLIENT = """
import aiohttp, asyncio, json, sys, time

async def main():
    requests = json.load(open(sys.argv[2]))
    # The server ends connections that wait while the engine has its turn.
    connector = aiohttp.UnixConnector(path=sys.argv[1], limit=len(requests), force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        async def ask(route, body):
            async with session.post("http://localhost" + route, json=body) as answer:
                await answer.json()
        await asyncio.gather(*[ask(*request) for request in requests[:8]])
        for line in sys.stdin:
            start = time.perf_counter()
            await asyncio.gather(*[ask(*request) for request in requests])
            print(time.perf_counter() - start, flush=True)

asyncio.run(main())
"""


def measure() -> list[BenchmarkRow]:
    """Measure the rows of both servers."""
    rows, ratios_by_engine = list[BenchmarkRow](), list[list[float]]()
    for name in ("vllm", "sglang"):
        with tempfile.TemporaryDirectory() as folder:
            ratios, update_ratios, start_s = measure_engine(name, Path(folder))
        rows += [
            median_row(f"{name}_adapter_ratio", ratios, "x", 1.05, "lower"),
            median_row(f"{name}_start_s", start_s, "s", None, "lower"),
        ]
        ratios_by_engine.append(update_ratios)
    slower = max(ratios_by_engine, key=statistics.median)
    return [*rows, median_row("engine_update_vs_restart", slower, "x", 0.1, "lower")]


def measure_engine(name: str, root: Path) -> tuple[list[float], list[float], list[float]]:
    """Measure one engine: ratios of client times, ratios of update times to the start time, and
    start times."""
    folder = root / "policy"
    folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, folder)
    cls = engines.get(name)
    engine = cls(cls.Config(), CausalLM, MODEL)
    engine.log_folder = root
    start_s, update_s = list[float](), list[float]()
    try:
        for _ in range(STARTS):
            engine.close()
            start_s.append(timed(lambda: engine.load(folder, 1)))
        state = dict(CausalLM.load(folder, MODEL).module.state_dict())
        ratios = client_ratios(engine, root)
        for _ in range(ROUNDS):
            update_s.append(timed(lambda: engine.load_state(state.items(), 1)))
    finally:
        engine.close()
    start = sum(start_s) / len(start_s)
    return ratios, [update / start for update in update_s], start_s


def client_ratios(engine: Any, folder: Path) -> list[float]:
    """Return ratios of the engine's time to the plain client's, measured alternately."""
    random = np.random.default_rng(0)
    steps = {
        "sample": np.arange(COUNT),
        "prompt": random.integers(2, 14, (COUNT, 16)),
        "prompt_length": np.full(COUNT, 16),
    }
    info: dict[str, Scalar] = {"horizon": LENGTH, "min_tokens": LENGTH, "temperature": 1.0}
    request = Record(RecordId(0, 0), steps, info=info)
    parsed = ParsedRequest(request, SamplingParams.from_info(info), 7)
    bodies = [
        engine.build_request(ResumableSample(parsed, i).next_request("rollout"))
        for i in range(COUNT)
    ]
    (folder / "bodies").write_text(json.dumps(bodies))
    python = resolve_interpreter(engine._config.server_python, "engine.server_python")
    command = [python, "-c", CLIENT, str(engine._shm_folder() / "http-0"), str(folder / "bodies")]
    ratios = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        answer(engine, request)
        for _ in range(ROUNDS):
            engine_s = timed(lambda: answer(engine, request))
            client.stdin.write("\n")
            client.stdin.flush()
            ratios.append(engine_s / float(client.stdout.readline()))
        client.stdin.close()
    return ratios


def answer(engine: Any, request: Record) -> None:
    channel = LocalChannel()
    channel.put(request)
    channel.close()
    replies = engine.generate(channel, seed=7, stage="rollout")
    assert sum(len(reply.steps["sample"]) for reply in replies) == COUNT


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
