"""Weights by way of the shared filesystem: small, and another way where that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf.artifacts import read_manifest
from rlinf.weights.store import DELTA, FULL
from stages.layout import VERSIONS
from stages.parts import WEIGHTS
from stages.worker.versions import Ready
from tests.stages.worker.test_weights import Worker, soon, state

Make = Callable[[str], Worker]


def publish(source: Worker, number: int, to: list[str]) -> str:
    out = f"it/{number:04d}/sync"
    source.publisher.want(out, dict.fromkeys(to, "delta"))
    source.publisher.publish(out, "data-a", number, {WEIGHTS: state(number)})
    return out


def test_who_follows_holds_each_version_and_who_comes_late_the_newest(
    worker: Make, tmp_path: Path
) -> None:
    source, first = worker("s"), worker("r0")
    for number in (3, 4, 5):
        out = publish(source, number, ["r0"])
        assert soon(lambda out=out, n=number: first.holds(n, out))
    files = [set((read_manifest(tmp_path / VERSIONS / f"{n:06d}") or 0).files) for n in (3, 4, 5)]
    assert files == [{FULL}, {DELTA}, {DELTA}]
    late = worker("r1")
    source.publisher.want(out, {"r1": "delta"})
    assert soon(lambda: late.holds(5, out))


def test_where_versions_cannot_be_written_weights_go_by_socket(
    worker: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / VERSIONS).write_text("in the way")
    source, there = worker("s"), worker("r0")
    out = publish(source, 3, ["r0"])
    assert soon(lambda: there.holds(3, out))
    assert "no version 3" in caplog.text


def test_a_version_of_another_trainer_is_not_taken_for_the_one_announced(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is cut off and taken for dead may still publish."""
    monkeypatch.setattr("stages.worker.versions.SEEN_S", (0.0, 0.05))
    source, there = worker("s"), worker("r0")
    publish(source, 3, [])
    digest = source.publisher.versions.publish(3, state(3))
    assert digest is not None
    taken: list[str] = []
    ready: Ready = lambda out, number, attempt, tensors: taken.append(attempt)  # noqa: E731
    there.publisher.versions.follow("sync", 3, "other", "0" * 32, ready)
    there.publisher.versions.follow("sync", 3, "this", digest, ready)
    assert soon(lambda: bool(taken))
    assert taken == ["this"]
    assert "not the one that was announced" in caplog.text


def test_what_was_announced_later_is_not_replaced_by_what_comes_late(
    worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.worker.versions.SEEN_S", (0.5,))
    source, again, there = worker("s"), worker("s2"), worker("r0")
    out = publish(source, 3, ["r0"])
    time.sleep(0.2)
    again.publisher.want(out, {"r0": "socket"})
    again.publisher.publish(out, "data-b", 3, {WEIGHTS: state(3)})
    assert soon(lambda: there.holds(3, out))
    time.sleep(1)
    assert there.board.output(out).attempt(lambda: True) == "data-b"


def test_a_damaged_version_is_not_served(
    worker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stages.worker.versions.SEEN_S", (0.0, 0.05))
    source, there = worker("s"), worker("r0")
    out = publish(source, 3, ["r0"])
    assert soon(lambda: there.holds(3, out))
    out = publish(source, 4, [])
    assert source.publisher.versions.publish(4, state(4)) is not None
    (delta,) = (tmp_path / VERSIONS / "000004").glob(f"data-*/{DELTA}")
    data = bytearray(delta.read_bytes())
    data[len(data) // 2] ^= 1
    delta.chmod(0o600)
    delta.write_bytes(bytes(data))
    source.publisher.want(out, {"r0": "delta"})
    assert soon(lambda: "waiting for its commit" in caplog.text)
    assert not there.holds(4, out)
