"""Engines that are a server: what asking through this package costs, and new weights in place.

The same requests go to the same server twice, in turns: by the engine, and by a client of the
environment that the server runs in (aiohttp, with which both projects load their servers),
each request on a connection of its own and the answers thrown away. New weights in place are
compared with a server that is started again, which is what there is without.
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
from rlinf.engines.resumable import ResumableSample, SegmentedRequest
from rlinf.engines.token_sampling import SamplingParams
from rlinf.interpreters import resolve_interpreter
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig

COUNT, LENGTH, ROUNDS, STARTS = 128, 64, 7, 2
MODEL = CausalLMConfig(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512)
CLIENT = """
import aiohttp, asyncio, json, sys, time

async def main():
    asked = json.load(open(sys.argv[2]))
    # The server ends connections that wait while the engine has its turn.
    connector = aiohttp.UnixConnector(path=sys.argv[1], limit=len(asked), force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        async def ask(route, body):
            async with session.post("http://localhost" + route, json=body) as answer:
                await answer.json()
        await asyncio.gather(*[ask(*one) for one in asked[:8]])
        for line in sys.stdin:
            began = time.perf_counter()
            await asyncio.gather(*[ask(*one) for one in asked])
            print(time.perf_counter() - began, flush=True)

asyncio.run(main())
"""


def measure() -> list[BenchmarkRow]:
    """The rows of both."""
    rows, updates = list[BenchmarkRow](), list[list[float]]()
    for name in ("vllm", "sglang"):
        with tempfile.TemporaryDirectory() as folder:
            ratios, update, started = of(name, Path(folder))
        rows += [
            median_row(f"{name}_adapter_ratio", ratios, "x", 1.05, "lower"),
            median_row(f"{name}_start_s", started, "s", None, "lower"),
        ]
        updates.append(update)
    slower = max(updates, key=statistics.median)
    return [*rows, median_row("engine_update_vs_restart", slower, "x", 0.1, "lower")]


def of(name: str, place: Path) -> tuple[list[float], list[float], list[float]]:
    """Measure one engine: ratios of the clients, ratios of updates to a start, and its start
    time."""
    folder = place / "policy"
    folder.mkdir()
    CausalLM.create(MODEL, {"alphabet": "0123456789+="}, 0, folder)
    cls = engines.get(name)
    engine = cls(cls.Config(), CausalLM, MODEL)
    engine.log_folder = place
    started, updated = list[float](), list[float]()
    try:
        for _ in range(STARTS):
            engine.close()
            started.append(timed(lambda: engine.load(folder, 1)))
        state = dict(CausalLM.load(folder, MODEL).module.state_dict())
        ratios = turns(engine, place)
        for _ in range(ROUNDS):
            updated.append(timed(lambda: engine.load_state(state.items(), 1)))
    finally:
        engine.close()
    start = sum(started) / len(started)
    return ratios, [update / start for update in updated], started


def turns(engine: Any, place: Path) -> list[float]:
    """The engine's time over the other client's, in turns on the same requests."""
    random = np.random.default_rng(0)
    steps = {
        "sample": np.arange(COUNT),
        "prompt": random.integers(2, 14, (COUNT, 16)),
        "prompt_length": np.full(COUNT, 16),
    }
    info: dict[str, Scalar] = {"horizon": LENGTH, "min_tokens": LENGTH, "temperature": 1.0}
    request = Record(RecordId(0, 0), steps, info=info)
    segmented = SegmentedRequest(request, SamplingParams.from_info(info), 7)
    bodies = [
        engine.build_request(ResumableSample(segmented, i).next_request("rollout"))
        for i in range(COUNT)
    ]
    (place / "bodies").write_text(json.dumps(bodies))
    python = resolve_interpreter(engine._config.server_python, "engine.server_python")
    command = [python, "-c", CLIENT, str(engine._shm_folder() / "http-0"), str(place / "bodies")]
    ratios = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        answer(engine, request)
        for _ in range(ROUNDS):
            ours = timed(lambda: answer(engine, request))
            client.stdin.write("\n")
            client.stdin.flush()
            ratios.append(ours / float(client.stdout.readline()))
        client.stdin.close()
    return ratios


def answer(engine: Any, request: Record) -> None:
    channel = LocalChannel()
    channel.put(request)
    channel.close()
    replies = engine.generate(channel, seed=7, stage="rollout")
    assert sum(len(reply.steps["sample"]) for reply in replies) == COUNT


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
