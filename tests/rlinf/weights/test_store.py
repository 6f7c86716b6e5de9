"""Versions come back to the bit or not at all, from wherever a reader starts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf.artifacts import MANIFEST, Manifest, read_manifest, verify
from rlinf.errors import ArtifactError, TransferError
from rlinf.weights.store import DELTA, FULL, State, WeightStore
from tests.rlinf.weights.states import same


def history(count: int) -> list[dict[str, Tensor]]:
    """States of a run in which a step changes few weights; ``head`` is tied to ``embed``."""
    torch.manual_seed(0)
    embed, bias = torch.randn(4000), torch.randn(7, dtype=torch.float64)
    out = []
    for _ in range(count):
        embed = torch.where(torch.rand(4000) < 0.02, embed * 1.01, embed)
        bias = bias + 1
        out.append({"embed": embed, "head": embed, "bias": bias})
    return out


def published(
    root: Path, count: int, **options: int
) -> tuple[WeightStore, list[dict[str, Tensor]]]:
    store, states = WeightStore(root, **{"full_every": 4, **options}), history(count)
    for version, state in enumerate(states):
        store.publish(version, state)
    return store, states


def file_of(root: Path, version: int, name: str) -> Path:
    (path,) = (root / f"{version:06d}").glob(f"data-*/{name}")
    return path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_every_version_comes_back_to_the_bit(tmp_path: Path) -> None:
    store, states = published(tmp_path, 10)
    assert store.versions() == list(range(10))
    for version, state in enumerate(states):
        got = WeightStore(tmp_path).load(version)
        assert got.version == version
        assert same(got.tensors, state)
        assert got.tensors["head"] is got.tensors["embed"]


def test_versions_between_full_ones_hold_only_what_changed(tmp_path: Path) -> None:
    published(tmp_path, 5)
    held = {v: read_manifest(tmp_path / f"{v:06d}") for v in range(5)}
    names = {v: set(manifest.files) for v, manifest in held.items() if manifest}
    assert names == {0: {FULL}, 1: {DELTA}, 2: {DELTA}, 3: {DELTA}, 4: {DELTA, FULL}}
    assert (
        file_of(tmp_path, 1, DELTA).stat().st_size < file_of(tmp_path, 0, FULL).stat().st_size / 8
    )


def test_float32_is_published_in_the_wanted_type(tmp_path: Path) -> None:
    states = history(3)
    store = WeightStore(tmp_path, dtype=torch.bfloat16)
    for version, state in enumerate(states):
        store.publish(version, state)
        got = WeightStore(tmp_path).load(version).tensors
        narrow = state["embed"].to(torch.bfloat16)
        assert same(got, {"embed": narrow, "head": narrow, "bias": state["bias"]})


def test_one_who_follows_reads_deltas_alone(tmp_path: Path) -> None:
    store, states = published(tmp_path, 3)
    held = store.load(2)
    for version, state in enumerate(history(6)[3:], start=3):
        store.publish(version, state)
        states.append(state)
    for version in (0, 4):
        file_of(tmp_path, version, FULL).unlink()
    got = WeightStore(tmp_path).load(5, held)
    assert same(got.tensors, states[5])


def test_a_late_joiner_starts_at_the_nearest_full_version(tmp_path: Path) -> None:
    _, states = published(tmp_path, 7)
    for version in range(4):
        shutil.rmtree(tmp_path / f"{version:06d}")
    file_of(tmp_path, 4, DELTA).unlink()
    assert same(WeightStore(tmp_path).load(6).tensors, states[6])


def test_one_who_missed_versions_catches_up(tmp_path: Path) -> None:
    store, states = published(tmp_path, 11)
    early = store.load(1)
    assert same(WeightStore(tmp_path).load(10, early).tensors, states[10])


def test_an_empty_store_has_nothing_to_serve(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "none")
    with pytest.raises(ArtifactError, match="there are none"):
        store.load(0)


def test_held_weights_of_another_history_are_not_built_upon(tmp_path: Path) -> None:
    store, states = published(tmp_path, 4)
    right = store.load(2)
    wrong = State(2, right.kept | {"bias": right.kept["bias"] + 1}, right.ties)
    assert same(store.load(3, wrong).tensors, states[3])


def test_a_delta_is_refused_on_another_base_than_its_own(tmp_path: Path) -> None:
    store, _ = published(tmp_path, 4)
    held = store.load(1)
    path = tmp_path / "000003" / MANIFEST
    manifest = read_manifest(path.parent)
    assert manifest is not None
    inputs = {"1": manifest.inputs["2"]}
    path.write_text(replace(manifest, inputs=inputs).to_json())
    with pytest.raises(ArtifactError, match="does not start from version"):
        store.load(3, held)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_delta_is_not_served(tmp_path: Path, damage: str) -> None:
    store, states = published(tmp_path, 7)
    path = file_of(tmp_path, 5, DELTA)
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    for version in (5, 6):
        with pytest.raises(ArtifactError) as caught:
            store.load(version)
        assert caught.value.manifest == tmp_path / "000005" / MANIFEST
    assert same(store.load(4).tensors, states[4])


def test_after_a_damaged_delta_the_next_full_version_is_served(tmp_path: Path) -> None:
    store, states = published(tmp_path, 10)
    held = store.load(4)
    flip(file_of(tmp_path, 6, DELTA))
    assert same(store.load(9, held).tensors, states[9])


def test_a_damaged_full_version_is_rebuilt_from_the_one_before(tmp_path: Path) -> None:
    store, states = published(tmp_path, 7)
    flip(file_of(tmp_path, 4, FULL))
    assert same(store.load(6).tensors, states[6])


def test_weights_that_do_not_match_the_manifest_are_not_served(tmp_path: Path) -> None:
    """A delta that is whole, but leads elsewhere."""
    store, _ = published(tmp_path, 2)
    path = tmp_path / "000001" / MANIFEST
    manifest = read_manifest(path.parent)
    assert manifest is not None
    path.write_text(replace(manifest, key="0" * 32).to_json())
    with pytest.raises(ArtifactError, match="other weights than published"):
        store.load(1)


def test_what_was_not_committed_is_no_version(tmp_path: Path) -> None:
    store, states = published(tmp_path, 3)
    (tmp_path / "000002" / MANIFEST).unlink()
    assert store.versions() == [0, 1]
    WeightStore(tmp_path).publish(2, states[2])
    assert len(list((tmp_path / "000002").glob("data-*"))) == 1
    assert same(store.load(2).tensors, states[2])


def test_a_version_that_does_not_follow_the_newest_is_a_full_one(tmp_path: Path) -> None:
    _, states = published(tmp_path, 3)
    store = WeightStore(tmp_path, full_every=100)
    held = store.load(2)
    assert set(store.publish(7, states[0]).files) == {FULL}
    assert set(store.publish(8, states[1]).files) == {DELTA}
    for reader in (held, None):
        assert same(store.load(8, reader).tensors, states[1])
    with pytest.raises(ArtifactError, match="there are 0 to 8"):
        store.load(5)


def test_versions_do_not_change(tmp_path: Path) -> None:
    store, states = published(tmp_path, 3)
    with pytest.raises(TransferError, match="do not change"):
        store.publish(2, states[0])
    again = WeightStore(tmp_path).publish(2, states[2])
    assert again == read_manifest(tmp_path / "000002")


def test_a_publisher_that_was_restarted_goes_on_with_deltas(tmp_path: Path) -> None:
    _, states = published(tmp_path, 3)
    manifest = WeightStore(tmp_path, full_every=100).publish(3, states[0])
    assert set(manifest.files) == {DELTA}
    assert same(WeightStore(tmp_path).load(3).tensors, states[0])


def test_a_publisher_whose_base_is_damaged_publishes_a_full_version(tmp_path: Path) -> None:
    _, states = published(tmp_path, 3)
    flip(file_of(tmp_path, 2, DELTA))
    WeightStore(tmp_path, full_every=100).publish(3, states[0])
    assert same(WeightStore(tmp_path).load(3).tensors, states[0])


def test_one_who_follows_opens_no_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has thousands of versions; a look at each would take a shared filesystem seconds."""
    store, _ = published(tmp_path, 12)
    held, opened = store.load(10), []

    def counted(folder: Path) -> Manifest | None:
        opened.append(int(folder.name))
        return read_manifest(folder)

    monkeypatch.setattr("rlinf.weights.store.read_manifest", counted)
    store.load(11, held)
    assert opened == [11, 10]
    opened.clear()
    store.load(11)
    assert opened == [11, 10, 9, 8]


PUBLISH = """
import sys
from pathlib import Path
from rlinf.weights.store import WeightStore
from tests.rlinf.weights.test_store import history
store = WeightStore(Path(sys.argv[1]), full_every=3, keep=1)
for version, state in enumerate(history(80)):
    store.publish(version, state)
"""


def test_a_reader_beside_a_publisher_that_removes_versions_is_never_wrong(tmp_path: Path) -> None:
    states, store = history(80), WeightStore(tmp_path)
    seen: list[int] = []
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISH, str(tmp_path)])
    held: State | None = None
    while not seen or seen[-1] < 79:
        ended = publisher.poll() is not None
        # Every other look is that of a late joiner.
        newest = max(store.versions(), default=-1)
        if newest > (seen[-1] if seen else -1):
            with contextlib.suppress(ArtifactError):  # gone while it was read
                held = store.load(newest, held if len(seen) % 2 else None)
                assert same(held.tensors, states[newest])
                seen.append(newest)
        assert not ended or seen[-1] == 79
    assert publisher.wait() == 0
    assert len(seen) > 3


@pytest.mark.parametrize("version", [1, 4])
def test_a_version_that_goes_while_it_is_read_is_an_error_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Between the check and the reading of a file, of a delta (1) and of a full state (4)."""
    store, _ = published(tmp_path, 5)
    held = store.load(0) if version == 1 else None

    def then_remove(folder: Path, manifest: Manifest, *, checksums: bool) -> None:
        verify(folder, manifest, checksums=checksums)
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder)

    monkeypatch.setattr("rlinf.weights.store.verify", then_remove)
    with pytest.raises(ArtifactError, match="removed by the retention policy"):
        store.load(version, held)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_retention_keeps_the_newest_and_what_leads_to_them(tmp_path: Path, keep: int) -> None:
    store, states = published(tmp_path, 19, keep=keep)
    kept = store.versions()
    assert kept[-keep:] == list(range(19 - keep, 19))
    assert len(kept) < keep + 4, "nothing more than needed"
    assert {path.name for path in tmp_path.iterdir()} == {f"{v:06d}" for v in kept}
    for version in kept:
        assert same(WeightStore(tmp_path).load(version).tensors, states[version])


def test_retention_of_more_than_there_is_removes_nothing(tmp_path: Path) -> None:
    store, _ = published(tmp_path, 3, full_every=1)
    for keep in (3, 4, 5):
        store.prune(keep)
        assert store.versions() == [0, 1, 2]
    store.prune(2)
    assert store.versions() == [1, 2]


def test_retention_does_not_rely_on_a_damaged_full_version(tmp_path: Path) -> None:
    store, states = published(tmp_path, 7)
    flip(file_of(tmp_path, 4, FULL))
    store.prune(1)
    assert store.versions() == list(range(7))
    assert same(WeightStore(tmp_path).load(6).tensors, states[6])
