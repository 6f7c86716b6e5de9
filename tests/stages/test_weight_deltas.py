"""Weights that come by deltas are those that were published, however a reader comes to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.commands.experiment import compose
from rlinf.artifacts import (
    Manifest,
    commit_output,
    content_digest,
    describe_files,
    prune_output,
    read_manifest,
)
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from rlinf.errors import ArtifactError
from stages.context import StageContext, StageInput
from stages.factory import WEIGHTS, policy_class
from stages.layout import stage_folder
from stages.weight_deltas import DELTA_FILE, WeightDeltas
from tests.conftest import QUIET
from tests.rlinf.weights.states import same

SPEC = {"observation": 4, "action": {"kind": "discrete", "size": 2}}


class Maker:
    """Publishes versions of the weights of a small policy, as ``sync`` does."""

    def __init__(self, run: Path, dtype: torch.dtype | None = None) -> None:
        self.run, self.dtype = run, dtype
        words = ["experiment=cartpole_ppo", f"++run.root={run}", *QUIET]
        self.config = validate(RunConfig, compose(words))
        cls, options = policy_class(self.config)
        if not (run / "start").exists():
            (run / "start").mkdir(parents=True)
            cls.create(options, SPEC, 0, run / "start")
        self.policy = cls.load(run / "start", options)
        self.tensors: dict[str, Tensor] = self.policy.module.state_dict()
        self.deltas = WeightDeltas(dtype)

    def publish(self, iteration: int) -> dict[str, Tensor]:
        """Returns what readers are to get."""
        torch.manual_seed(iteration)
        self.tensors = {
            name: torch.where(torch.rand(was.shape) < 0.02, was * 1.5, was)
            for name, was in self.tensors.items()
        }
        ctx = self.context(iteration)
        (ctx.data_folder / WEIGHTS).mkdir(parents=True)
        self.policy.save(ctx.data_folder / WEIGHTS, self.tensors)
        self.deltas.write(ctx, self.tensors)
        files = describe_files(ctx.data_folder)
        content = content_digest(files, {})
        name = ctx.data_folder.name
        commit_output(
            ctx.output_folder,
            Manifest("sync", iteration, "", content, name, files, {}, {}, {}, "", ""),
        )
        return self.sent()

    def sent(self) -> dict[str, Tensor]:
        narrow = self.dtype or torch.float32
        return {n: t.to(narrow) if t.dtype == torch.float32 else t for n, t in self.tensors.items()}

    def context(self, iteration: int) -> StageContext:
        out = stage_folder(self.run, "sync", iteration)
        inputs = {WEIGHTS: StageInput(out)}
        return StageContext(
            self.config,
            "sync",
            iteration,
            self.run,
            out,
            out / "data-a",
            ProcessGroupInfo(),
            inputs,
        )


class Reader:
    """A worker that reads versions."""

    def __init__(self, maker: Maker) -> None:
        self._maker, self.deltas = maker, WeightDeltas(maker.dtype)
        self.by_delta = self.fell = False

    def read(self, iteration: int, maker: Maker | None = None) -> dict[str, Tensor]:
        ctx = (maker or self._maker).context(iteration)
        tensors = self.deltas.read(ctx, WEIGHTS)
        names = [span["name"] for span in ctx.spans]
        self.by_delta, self.fell = "delta" in names, ctx.inputs[WEIGHTS].used_disk_fallback
        assert self.by_delta != ("verify" in names), "one or the other is read"
        return tensors


@pytest.fixture(params=[None, torch.bfloat16])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    return Maker(tmp_path, request.param)


@pytest.fixture
def history(maker: Maker) -> list[dict[str, Tensor]]:
    """Four versions that were published."""
    return [maker.publish(iteration) for iteration in range(4)]


def delta_of(run: Path, iteration: int) -> Path:
    (path,) = stage_folder(run, "sync", iteration).glob(f"data-*/{DELTA_FILE}")
    return path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_who_follows_reads_small_files_and_gets_each_version_to_the_bit(
    maker: Maker, history: list[dict[str, Tensor]]
) -> None:
    reader, used = Reader(maker), []
    for iteration, expected in enumerate(history):
        assert same(reader.read(iteration), expected)
        used.append(reader.by_delta)
        assert not reader.fell
    assert used == [False, True, True, True]
    folder = stage_folder(maker.run, "sync", 3)
    whole = next(folder.glob("data-*/weights/*.safetensors")).stat().st_size
    assert delta_of(maker.run, 3).stat().st_size < whole / 2


def test_an_output_has_the_same_content_with_a_delta_and_without(
    maker: Maker, history: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    again = Maker(tmp_path / "again")
    for iteration in range(4):
        again.deltas = WeightDeltas()  # started again each time
        again.publish(iteration)
        one, other = (
            read_manifest(stage_folder(run, "sync", iteration)) for run in (maker.run, again.run)
        )
        assert one is not None
        assert other is not None
        assert (DELTA_FILE in one.files, DELTA_FILE in other.files) == (iteration > 0, False)
        assert one.content == other.content


def test_one_that_missed_versions_goes_on_from_its_own(
    maker: Maker, history: list[dict[str, Tensor]]
) -> None:
    reader = Reader(maker)
    reader.read(1)
    assert same(reader.read(3), history[3])
    assert reader.by_delta


@pytest.mark.parametrize("loss", ["flipped", "truncated", "gone", "pruned before"])
def test_without_a_delta_that_fits_the_folder_is_read_and_deltas_go_on_from_it(
    maker: Maker,
    history: list[dict[str, Tensor]],
    loss: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = Reader(maker)
    reader.read(0 if loss == "pruned before" else 1)
    path = delta_of(maker.run, 2)
    if loss == "flipped":
        flip(path)
    elif loss == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif loss == "gone":
        path.unlink()
    else:
        prune_output(stage_folder(maker.run, "sync", 1))
    assert same(reader.read(2), history[2])
    assert not reader.by_delta
    assert reader.fell, "it is counted"
    assert "as a whole" in caplog.text
    assert same(reader.read(3), history[3])
    assert reader.by_delta


def test_a_delta_is_not_applied_to_other_weights_than_it_starts_from(
    maker: Maker, history: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    other = Maker(tmp_path / "other", maker.dtype)
    other.tensors = {name: tensor + 1 for name, tensor in maker.tensors.items()}
    other.publish(1)
    reader = Reader(maker)
    reader.read(1, other)
    assert same(reader.read(2), history[2])
    assert not reader.by_delta
    assert reader.fell


def test_a_maker_that_is_started_again_writes_none_until_it_has_published(
    maker: Maker, history: list[dict[str, Tensor]]
) -> None:
    reader = Reader(maker)
    reader.read(3)
    again = Maker(maker.run, maker.dtype)
    again.tensors = maker.tensors
    used = []
    for iteration in (4, 5):
        expected = again.publish(iteration)
        assert same(reader.read(iteration), expected)
        used.append(reader.by_delta)
    assert used == [False, True]


def test_deltas_that_are_larger_than_the_whole_are_not_read(
    maker: Maker, history: list[dict[str, Tensor]]
) -> None:
    for iteration in range(4, 40):
        expected = maker.publish(iteration)
    reader = Reader(maker)
    reader.read(0)
    assert same(reader.read(39), expected)
    assert not reader.by_delta


def test_weights_that_are_damaged_are_an_error(
    maker: Maker, history: list[dict[str, Tensor]]
) -> None:
    (path,) = stage_folder(maker.run, "sync", 2).glob("data-*/weights/*.safetensors")
    flip(path)
    reader = Reader(maker)
    with pytest.raises(ArtifactError, match="altered"):
        reader.read(2)
    assert same(reader.read(3), history[3])
