"""What a profile measures in runs of its own is not preceded by a second SFT stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.experiment import drive
from pipeline.plan import Plan
from pipeline.planning.profile.profile_pass import clone_run
from pipeline.run import Run
from rlinf.artifacts import read_manifest


@pytest.mark.usefixtures("undrawn")
def test_a_run_like_another_starts_from_its_sft_weights(tiny_run: Path, tmp_path: Path) -> None:
    made = clone_run(Run.open(tiny_run), Plan(), tmp_path, "alone", 1)
    drive(made)
    theirs, ours = (read_manifest(run / "sft") for run in (tiny_run, made.folder))
    assert theirs is not None
    assert ours is not None
    assert ours.data == theirs.data
    assert not list((made.folder / "sft").glob("*.bad-*"))
    assert read_manifest(made.folder / "it/0000/sync") is not None
    assert read_manifest(tiny_run / "sft") == theirs
