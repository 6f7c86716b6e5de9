"""Comparing runs and starting drivers as processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import compose, run_experiment
from pipeline.run_state import ARCHIVE
from rlinf import package_paths
from rlinf.artifacts import Manifest, read_manifest
from rlinf.channels.record_files import RecordFileReader
from rlinf.data.record import Record
from rlinf.hydra_config import force_add


def contents(run: Path) -> dict[str, str]:
    """Content digest of every committed stage of a run, but for what was set aside."""
    return {
        str(path.relative_to(run).parent): json.loads(path.read_text())["content"]
        for path in sorted(run.rglob("manifest.json"))
        if ARCHIVE not in path.parts
    }


def moves(run: Path) -> Counter[str]:
    """How often stages of iterations after the first, and evaluations, moved what they keep."""
    names: Counter[str] = Counter()
    for pattern in ("it/000[1-9]/*/manifest.json", "evaluate/000[1-9]/manifest.json"):
        for path in run.glob(pattern):
            names.update(span["name"] for span in json.loads(path.read_text())["timing"]["spans"])
    return Counter({name: names[name] for name in ("offload", "onload")})


def budget_gib(run: Path, models: float) -> float:
    """As large as so many copies of the weights of a run."""
    weights = next((run / "sft").glob("data-*/weights/model.safetensors"))
    return models * weights.stat().st_size / (1 << 30)


@contextmanager
def no_report() -> Iterator[None]:
    """Runs in this process end without a report: drawing it takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.commands.experiment.write_report", lambda run: run / "report")
        yield


def run_here(words: list[str]) -> None:
    """The run of a command line, in this process and without a report."""
    with no_report():
        run_experiment(compose([force_add(word) for word in words]))


def language_model(folder: Path, **options: Any) -> Path:
    """Write a language model of two small layers, whose tokenizer knows the printable characters
    of ASCII; returns the folder."""
    from rlinf.models.causal_lm import CausalLM, CausalLMConfig

    folder.mkdir(parents=True)
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
    config = CausalLMConfig.model_validate({"architecture": "llama", **sizes, **options})
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    CausalLM.create(config, {"alphabet": alphabet}, 0, folder)
    return folder


def problem_file(path: Path, count: int = 12, start: int = 0) -> Path:
    """Write a file of problems with answers; returns the file."""
    rows = [
        {
            "question": f"Tom has {i} apples and buys {i}. How many?",
            "answer": f"{i}+{i}\n#### {2 * i}",
        }
        for i in range(start, start + count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def start_driver(
    words: list[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``python -m rlinf.launch`` as a process of its own."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "rlinf.launch", *words],
            cwd=package_paths.ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )


def killed_until_it_ends(
    words: list[str],
    log: Path,
    chance: random.Random,
    *,
    seconds: tuple[float, float],
    attempts: int,
    last_s: float,
    env: Mapping[str, str] | None = None,
) -> None:
    """A driver is killed at times between two ``seconds``, and begun again, until the run ends.

    Later attempts get longer, so that it ends on a slow machine too; the last has ``last_s`` more.
    """
    for attempt in range(attempts):
        driver = start_driver(words, log, env)
        deadline = time.monotonic() + chance.uniform(*seconds) * 1.3**attempt
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if driver.poll() is not None:
            break
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert driver.wait(timeout=last_s) == 0, log.read_text()
    assert attempt > 0, "the driver was killed at least once"


def until(there: Callable[[], Any], driver: subprocess.Popen[bytes], log: Path) -> Any:
    """Waits for something to be true while a driver goes on; returns it."""
    deadline = time.monotonic() + 120
    while not (found := there()):
        assert driver.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found


def same_samples(run: Path, reference: Path, iterations: Iterable[int]) -> None:
    """The same samples, each once, and the same metrics, but for the last bits.

    Another make-up of the engine's batches sums the same products in another order.
    """
    for iteration in iterations:
        ours, theirs = (_trajectories(folder, iteration) for folder in (run, reference))
        assert [r.identity for r in ours] == [r.identity for r in theirs]
        assert ours, f"iteration {iteration} is kept"
        assert len({r.identity.key for r in ours}) == len(ours)
        assert [r.info["text"] for r in ours] == [r.info["text"] for r in theirs]
    for one, other in zip(_metrics(run), _metrics(reference), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def _trajectories(run: Path, iteration: int) -> list[Record]:
    folder = run / "it" / f"{iteration:04d}" / "rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(RecordFileReader((folder / manifest.data).glob("trajectories-r*.h5")))


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def output(run: Path, *place: str) -> tuple[Manifest, Path]:
    """What a stage of a run committed, and where its files are."""
    folder = run.joinpath(*place)
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest, folder / manifest.data
