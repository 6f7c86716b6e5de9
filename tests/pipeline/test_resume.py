"""A start that would not make what a run holds is refused; no choice of it loses anything."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import resume
from pipeline.commands.experiment import drive, prepare_run
from pipeline.commands.status import read_status
from pipeline.graph import Graph
from pipeline.resume import OnMismatch, resolve_mismatches
from pipeline.run import Run
from pipeline.run_state import ARCHIVE, RunState
from rlinf.artifacts import MANIFEST, read_manifest
from rlinf.errors import CodeIdentityError, ConfigError, MismatchError, RunLockedError
from stages import identity
from stages.layout import ACCEPTED_FILE, CODE_FILE, CONFIG_FILE, RUN_FILE
from stages.runner import StageCall, run_stage
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def finished(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run of two iterations that a test may change."""
    shutil.copytree(tiny_run, tmp_path / "tiny")
    return tmp_path / "tiny"


def everything(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def committed(run: Run) -> RunState:
    found = RunState(run, Graph(run.config))
    found.scan()
    return found


def edit(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """As if a source file had been changed."""
    before = identity.product_digests()
    assert file in before
    monkeypatch.setattr(identity, "product_digests", lambda: before | {file: "edited"})


def test_a_changed_key_is_refused_before_anything_is_touched(
    finished: Path, compose: Compose
) -> None:
    before = everything(finished)
    with pytest.raises(MismatchError) as error:
        prepare_run(compose("optimizer.lr=0.5"))
    message = str(error.value)
    assert "optimizer.lr: 0.01 -> 0.5" in message
    assert "2 iterations (0 to 1)" in message
    assert "SFT" not in message
    assert "--redo" in message
    assert "--keep" in message
    assert len(message.splitlines()) <= 5
    assert everything(finished) == before


def test_keys_that_change_no_result_are_accepted(finished: Path, compose: Compose) -> None:
    run = prepare_run(compose("evaluate.every=2", "checkpoint.keep_last=3"))
    assert run.config.checkpoint.keep_last == 3
    assert not committed(run).mismatched
    drive(Run.open(finished))
    assert "checkpoint" in yaml.safe_load((finished / CONFIG_FILE).read_text())


def test_changed_code_is_refused_and_named_whoever_starts(
    finished: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(monkeypatch, "rlinf/trainers/fsdp.py")
    before = everything(finished)
    for start in (lambda: prepare_run(compose()), lambda: drive(Run.open(finished))):
        with pytest.raises(MismatchError, match=r"code: rlinf/trainers/fsdp\.py") as error:
            start()
        assert "SFT, 2 iterations (0 to 1)" in str(error.value)
    assert everything(finished) == before


def test_redo_makes_anew_what_differs_and_nothing_else(
    finished: Path, tiny_run: Path, compose: Compose
) -> None:
    """No sample is as long as these limits, so the rewards stay the same."""
    limits = ("reward.overlong_penalty_start=1000", "reward.overlong_penalty_end=2000")
    kept = (finished / "it/0000/train/manifest.json").stat().st_mtime_ns
    made = (finished / "it/0000/reward/manifest.json").read_bytes()
    drive(prepare_run(compose(*limits), OnMismatch.RECOMPUTE))
    aside = next((finished / ARCHIVE).iterdir())
    assert {p.relative_to(aside).as_posix() for p in aside.glob("it/*/*")} == {
        "it/0000/reward",
        "it/0001/reward",
    }
    assert (aside / "it/0000/reward/manifest.json").read_bytes() == made
    old = read_manifest(aside / "it/0000/reward")
    assert old is not None
    assert (aside / "it/0000/reward" / old.data).is_dir()
    assert (finished / "it/0000/reward/manifest.json").read_bytes() != made
    assert (finished / "it/0000/train/manifest.json").stat().st_mtime_ns == kept
    shutil.rmtree(finished / ARCHIVE)
    assert contents(finished) == contents(tiny_run), "the same rewards give the same rest"
    drive(Run.open(finished))
    assert not (finished / ARCHIVE).exists(), "once is enough"


def test_keep_goes_on_with_what_is_there_and_notes_it(
    finished: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(monkeypatch, "rlinf/trainers/fsdp.py")
    shutil.rmtree(finished / "evaluate/0002")
    before = contents(finished)
    drive(prepare_run(compose("optimizer.lr=0.5"), OnMismatch.KEEP))
    after = contents(finished)
    assert {name: after[name] for name in before} == before
    assert "evaluate/0002" in after
    entry = json.loads((finished / ACCEPTED_FILE).read_text())["entries"][0]
    assert entry["differences"] == ["optimizer.lr: 0.01 -> 0.5", "code: rlinf/trainers/fsdp.py"]
    assert "train/1" in entry["outputs"]
    drive(Run.open(finished))
    assert contents(finished) == after, "a later start does not ask again"
    (shown,) = read_status(finished).accepted_mismatches
    assert shown.differences == tuple(entry["differences"])
    assert (
        "optimizer.lr: 0.01 -> 0.5"
        in json.loads((finished / RUN_FILE).read_text())["accepted_mismatches"][0]
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.hidden=64", "weights of another model (model.hidden: 32 -> 64)"),
        ("optimizer.name=sgd", "moments of another optimizer (optimizer.name:"),
        ("trainer.lora={rank: 2}", "state of other adapters (trainer.lora"),
    ],
)
def test_what_no_trainer_could_go_on_from_cannot_be_kept(
    finished: Path, compose: Compose, word: str, message: str
) -> None:
    before = everything(finished)
    with pytest.raises(MismatchError, match=re.escape(message)):
        prepare_run(compose(word), OnMismatch.KEEP)
    assert everything(finished) == before


def test_an_edited_frozen_configuration_is_noticed(finished: Path, compose: Compose) -> None:
    path = finished / CONFIG_FILE
    path.write_text(path.read_text().replace("seed: 0", "seed: 1", 1))
    before = everything(finished)
    for start in (lambda: drive(Run.open(finished)), lambda: prepare_run(compose())):
        with pytest.raises(MismatchError, match=r"config\.yaml: seed: 0 -> 1"):
            start()
    assert everything(finished) == before
    drive(Run.open(finished), on_mismatch=OnMismatch.KEEP)
    drive(Run.open(finished))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"- 1\n", b"seed: {}\n", b""])
@pytest.mark.parametrize("name", [CONFIG_FILE, RUN_FILE, ACCEPTED_FILE])
def test_a_damaged_file_of_a_run_is_named_in_few_lines(
    finished: Path, name: str, content: bytes
) -> None:
    (finished / name).write_bytes(content)
    with pytest.raises((ConfigError, MismatchError), match=name.replace(".", r"\.")) as error:
        drive(Run.open(finished))
    assert len(str(error.value).splitlines()) <= 5


def test_a_damaged_frozen_configuration_is_written_anew_by_the_first_command(
    finished: Path, compose: Compose
) -> None:
    whole = yaml.safe_load((finished / CONFIG_FILE).read_text())
    (finished / CONFIG_FILE).write_bytes(b"\xff")
    with pytest.raises(MismatchError, match=r"config\.yaml: damaged"):
        prepare_run(compose())
    prepare_run(compose(), OnMismatch.KEEP)
    made = yaml.safe_load((finished / CONFIG_FILE).read_text())
    made["run"], whole["run"] = None, None
    assert made == whole
    assert not committed(Run.open(finished)).mismatched


def test_added_iterations_run_at_the_last_rate_of_the_schedule(
    finished: Path, compose: Compose
) -> None:
    before = contents(finished)
    run = prepare_run(compose("iterations=3"))
    assert run.config.optimizer.lr_decay_iterations == 2
    drive(run)
    after = contents(finished)
    assert {name: after[name] for name in before} == before, "byte for byte"
    last, added = (read_manifest(finished / f"it/000{i}/train") for i in (1, 2))
    assert last is not None
    assert added is not None
    assert added.metrics["lr"] == last.metrics["lr"]
    assert not (finished / ARCHIVE).exists()


def test_added_iterations_at_a_rate_of_zero_are_refused(compose: Compose, tmp_path: Path) -> None:
    words = (
        "optimizer.lr_scheduler_type=linear",
        "optimizer.min_lr_ratio=0",
        "optimizer.lr_warmup_iterations=0",
    )
    drive(prepare_run(compose(*words)))
    with pytest.raises(ConfigError, match="ends at 0 after 2 iterations"):
        prepare_run(compose(*words, "iterations=3"))
    assert yaml.safe_load((tmp_path / "tiny" / CONFIG_FILE).read_text())["iterations"] == 2


def test_fewer_iterations_change_nothing_that_is_there(finished: Path, compose: Compose) -> None:
    before = everything(finished)
    run = prepare_run(compose("iterations=1"))
    assert run.config.iterations == 1
    after = everything(finished)
    # It was copied: its root is another one.
    assert {k: v for k, v in after.items() if v != before.get(k)}.keys() <= {CONFIG_FILE, RUN_FILE}
    assert after.keys() == before.keys()
    assert Run.open(finished).config.iterations == 2


def test_a_run_that_is_driven_is_not_settled_by_another_start(
    finished: Path, compose: Compose
) -> None:
    run = Run.open(finished)
    with run.lock(), pytest.raises(RunLockedError, match="driven by process"):
        prepare_run(compose("optimizer.lr=0.5"), OnMismatch.RECOMPUTE)


def test_a_run_cannot_be_driven_while_a_start_changes_it(
    finished: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: Any) -> None:
        with pytest.raises(RunLockedError, match="driven by process"), Run.open(finished).lock():
            pass
        resolve_mismatches(*given)

    monkeypatch.setattr(resume, "resolve_mismatches", meanwhile)
    prepare_run(compose("optimizer.lr=0.5"), OnMismatch.KEEP)
    with Run.open(finished).lock():
        pass


def test_a_driver_does_not_begin_with_a_configuration_that_was_replaced(
    compose: Compose, tmp_path: Path
) -> None:
    first = prepare_run(compose("seed=1"))
    prepare_run(compose("seed=2"))
    with pytest.raises(RunLockedError, match=r"another command changed .* \(seed: 1 -> 2\)"):
        drive(first)
    assert not list((tmp_path / "tiny").rglob(MANIFEST))


def test_a_stage_refuses_to_run_other_code_than_the_run_was_started_with(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(finished / "evaluate/0002")
    edit(monkeypatch, "stages/evaluate.py")
    call = StageCall(
        "evaluate",
        finished / CONFIG_FILE,
        finished / "evaluate/0002",
        2,
        {"weights": finished / "it/0001/sync"},
    )
    with pytest.raises(CodeIdentityError, match=r"stages/evaluate\.py differs from the code"):
        run_stage(call)
    assert not list(finished.glob("evaluate/0002/*"))


def test_a_key_that_a_later_version_knows_changes_no_identity(
    finished: Path, compose: Compose
) -> None:
    values = yaml.safe_load((finished / CONFIG_FILE).read_text())
    del values["rollout"]["in_flight_updates"]
    old = finished.parent / "old.yaml"
    old.write_text(yaml.safe_dump(values))
    from stages.identity import stage_key
    from stages.runner import load_config

    earlier = load_config(old)
    assert earlier.rollout.in_flight_updates is False
    assert stage_key(earlier, "rollout", 0, {}, "") != stage_key(
        load_config(finished / CONFIG_FILE), "rollout", 0, {}, ""
    )
    from pipeline.run import write_run_record

    shutil.copy(old, finished / CONFIG_FILE)
    write_run_record(finished, values)
    run = prepare_run(compose("iterations=3"), OnMismatch.KEEP)
    assert "in_flight_updates" not in run.config.explicit_values()["rollout"]
    assert (finished / CODE_FILE).exists()
