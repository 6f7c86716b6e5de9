"""Runs, --keep, --redo, more or fewer iterations and edits of code, in every order.

After a redo a run equals a fresh run of its configuration, byte for byte. After a keep everything
that was there is unchanged, and further iterations are of the new configuration.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.commands.experiment import compose, drive
from pipeline.commands.results import weight_versions
from pipeline.executors import InProcessExecutor
from pipeline.graph import Graph, StageNode
from pipeline.resume import OnMismatch, create_run
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.config import RunConfig, validate
from rlinf.errors import InterruptedByUser, MismatchError
from stages import identity
from stages.layout import ACCEPTED_FILE, METRICS_FILE, stage_folder
from stages.runner import StageCall
from tests.pipeline.helpers import contents, no_report

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
WORDS = [
    "experiment=cartpole_ppo",
    "++log.trackers=[]",
    "++model.hidden=[4]",
    "++rollout.batch_size=2",
    "++rollout.horizon=8",
    "++algorithm.epochs=1",
    "++algorithm.minibatches=1",
    "++evaluate.every=1",
    "++evaluate.samples=2",
    "++evaluate.horizon=4",
    "++checkpoint.keep_last=1",
    "++checkpoint.keep_trajectories=1",
    "++reward.name=reward_of_orders:Mine",
    "++reward.scale=1.0",
]
REWARD = """
from rlinf.rewards.task_rewards import EnvironmentReward

class Mine(EnvironmentReward):
    def compute(self, trajectories, scores):
        return [{factor} * reward for reward in super().compute(trajectories, scores)]
"""


@dataclass(frozen=True)
class Setting:
    """What decides the results of a run in these tests."""

    seed: int = 0
    iterations: int = 2
    rate: float = 1e-3
    scale: float = 1.0
    samples: int = 2
    edition: int = 1
    """Of the user's own reward."""

    def values(self, root: Path) -> dict[str, Any]:
        found: dict[str, Any] = {**_composed(), "seed": self.seed, "iterations": self.iterations}
        found["run"] = {"name": "orders", "root": str(root)}
        found["optimizer"] = {**found["optimizer"], "lr": self.rate}
        found["reward"] = {**found["reward"], "scale": self.scale}
        found["evaluate"] = {**found["evaluate"], "samples": self.samples}
        return found


_cache: dict[str, dict[str, Any]] = {}


def _composed() -> dict[str, Any]:
    if not _cache:
        _cache["values"] = compose([*WORDS, "++run.name=orders"])
    return _cache["values"]


def longer(setting: Setting) -> Setting:
    return replace(setting, iterations=setting.iterations + 1)


def shorter(setting: Setting) -> Setting:
    return replace(setting, iterations=max(1, setting.iterations - 1))


def other_rate(setting: Setting) -> Setting:
    return replace(setting, rate=3e-3 if setting.rate == 1e-3 else 1e-3)


def other_scale(setting: Setting) -> Setting:
    return replace(setting, scale=0.5 if setting.scale == 1.0 else 1.0)


def other_evaluation(setting: Setting) -> Setting:
    return replace(setting, samples=5 - setting.samples)


def edit(setting: Setting) -> Setting:
    return replace(setting, edition=3 - setting.edition)


def same(setting: Setting) -> Setting:
    return setting


Step = tuple[OnMismatch, Callable[[Setting], Setting]]
CHANGES = (longer, other_rate, other_scale, other_evaluation, edit)
STEPS: list[Step] = [
    (OnMismatch.ERROR, longer),
    *((OnMismatch.KEEP, change) for change in CHANGES),
    *((OnMismatch.RECOMPUTE, change) for change in (*CHANGES, shorter, same)),
]
FEW: list[Step] = [
    (OnMismatch.ERROR, longer),
    (OnMismatch.KEEP, other_rate),
    (OnMismatch.KEEP, edit),
    (OnMismatch.RECOMPUTE, other_scale),
    (OnMismatch.RECOMPUTE, shorter),
]


class Lab:
    """Makes runs, and fresh runs to compare them with."""

    def __init__(self, root: Path, sources: Path) -> None:
        self._root, self._sources = root, sources
        self._fresh: dict[Setting, Path] = {}
        self._count = itertools.count()

    def place(self) -> Path:
        return self._root / f"r{next(self._count)}"

    def go(self, setting: Setting, root: Path, choice: OnMismatch = OnMismatch.ERROR) -> Path:
        self._write_code(setting.edition)
        run = create_run(validate(RunConfig, setting.values(root)), {}, choice)
        drive(run)
        return run.folder

    def fresh(self, setting: Setting) -> Path:
        if setting not in self._fresh:
            self._fresh[setting] = self.go(setting, self.place())
        return self._fresh[setting]

    def copy(self, run: Path) -> Path:
        root = self.place()
        shutil.copytree(run, root / "orders", symlinks=True)
        return root

    def take(self, run: Path, root: Path, setting: Setting, step: Step) -> Setting:
        """Take one step in a run, and check what it promises."""
        choice, change = step
        after = change(setting)
        before = contents(run)
        if (
            choice is OnMismatch.ERROR
            and after.iterations <= setting.iterations
            and after != setting
        ):
            with pytest.raises(MismatchError):
                self.go(after, root, choice)
            return setting
        self.go(after, root, choice)
        if choice is OnMismatch.RECOMPUTE:
            self._equals_a_fresh_run(run, after)
        else:
            consistent(run)
            now = contents(run)
            assert {name: now[name] for name in before} == before, "what was there is unchanged"
            for iteration in range(setting.iterations, after.iterations):
                manifest = read_manifest(stage_folder(run, "train", iteration))
                assert manifest is not None
                assert manifest.metrics["lr"] == pytest.approx(after.rate * self._share(run))
        return after

    def _equals_a_fresh_run(self, run: Path, setting: Setting) -> None:
        fresh = self.fresh(setting)
        assert contents(run) == contents(fresh)
        assert (run / METRICS_FILE).read_bytes() == (fresh / METRICS_FILE).read_bytes()
        assert not (run / ACCEPTED_FILE).exists()
        there, wanted = weight_versions(run), weight_versions(fresh)
        assert there.keys() >= wanted.keys()
        for version in wanted:
            assert _bytes(there[version]) == _bytes(wanted[version])

    @staticmethod
    def _share(run: Path) -> float:
        """Further iterations run at the last rate of the schedule."""
        settings = Run.open(run).config.optimizer
        return settings.learning_rate(10**6, settings.lr_decay_iterations or 1) / settings.lr

    def _write_code(self, edition: int) -> None:
        text = REWARD.format(factor=float(edition))
        path = self._sources / "reward_of_orders.py"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            forget_code()


def consistent(run: Path) -> None:
    """Every result was made of the inputs that are there."""
    graph = Graph(Run.open(run).config)
    for node in graph.nodes():
        manifest = read_manifest(graph.output_folder(run, node))
        assert manifest is not None
        for name, source in graph.inputs(node).items():
            made = read_manifest(graph.output_folder(run, source))
            assert made is not None
            assert manifest.inputs[name] == made.content, f"{name} of {node.name}"


def forget_code() -> None:
    """Let this process read the user's module again, as the process of a new start would."""
    sys.modules.pop("reward_of_orders", None)
    importlib.invalidate_caches()
    for cached in (
        identity._parse_module,
        identity._module_file_digest,
        identity._module_path,
        identity._verified_snapshot,
    ):
        cached.cache_clear()


def _bytes(out: Path) -> dict[str, bytes]:
    manifest = read_manifest(out)
    assert manifest is not None
    return {name: (out / manifest.data / name).read_bytes() for name in manifest.files}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    sources = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch, no_report():
        patch.syspath_prepend(str(sources))
        patch.setattr(sys, "dont_write_bytecode", True)
        yield Lab(tmp_path_factory.mktemp("orders"), sources)
    forget_code()


def go_all_ways(lab: Lab, steps: Sequence[Step], depth: int, start: Setting) -> None:
    """Every sequence of so many steps; those that begin alike share their beginning."""

    def further(run: Path, setting: Setting, left: int) -> None:
        for step in steps if left else ():
            root = lab.copy(run)
            after = lab.take(root / "orders", root, setting, step)
            further(root / "orders", after, left - 1)
            shutil.rmtree(root)

    further(lab.fresh(start), start, depth)


def test_every_pair_of_steps(lab: Lab) -> None:
    go_all_ways(lab, FEW, 2, Setting())


def test_redo_after_keep_makes_anew_what_was_kept(lab: Lab) -> None:
    start = Setting(iterations=4)
    root = lab.copy(lab.fresh(start))
    run = root / "orders"
    kept = lab.take(run, root, start, (OnMismatch.KEEP, lambda s: longer(other_rate(s))))
    after = lab.take(run, root, kept, (OnMismatch.RECOMPUTE, other_scale))
    assert list((run / "archive").glob(f"*/{ACCEPTED_FILE}")), (
        "the accepted mismatches are not lost"
    )
    lab.take(run, root, after, (OnMismatch.RECOMPUTE, lambda s: replace(s, iterations=2)))


class Interrupting(InProcessExecutor):
    """Ends the driver as a person does, when it comes to the second update."""

    def start(self, node: StageNode, call: StageCall) -> None:
        if node == StageNode("train", 1):
            raise KeyboardInterrupt
        super().start(node, call)


def test_a_redo_that_was_interrupted_can_be_kept_without_mixing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Setting(iterations=3)
    root = lab.copy(lab.fresh(start))
    run, scaled = root / "orders", other_scale(start)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.commands.experiment.InProcessExecutor", Interrupting)
        with pytest.raises(InterruptedByUser):
            lab.go(scaled, root, OnMismatch.RECOMPUTE)
    old = {name: digest for name, digest in contents(run).items() if "/train" in name}
    assert old.keys() == {"it/0000/train", "it/0002/train"}, "the second is of the old rewards"
    lab.go(other_rate(scaled), root, OnMismatch.KEEP)
    consistent(run)
    now = contents(run)
    assert [now[name] == old[name] for name in sorted(old)] == [True, False]


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2), st.lists(st.sampled_from(STEPS), min_size=3, max_size=4))
def test_longer_sequences(lab: Lab, seed: int, steps: list[Step]) -> None:
    setting = Setting(seed=seed)
    root = lab.copy(lab.fresh(setting))
    for step in steps:
        setting = lab.take(root / "orders", root, setting, step)
    lab.take(root / "orders", root, setting, (OnMismatch.RECOMPUTE, same))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("steps", "depth"), [(STEPS, 2), (FEW, 3)], ids=["all", "few"])
def test_every_sequence_of_another_seed(lab: Lab, steps: list[Step], depth: int) -> None:
    go_all_ways(lab, steps, depth, Setting(seed=1))
