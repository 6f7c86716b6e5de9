"""Eight short runs end with the bytes on file, in one process, as jobs, in pools, and killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.environments import need_environment
from tests.golden.runs import PORTABLE, RUNS, WAYS, command, cpu_field, recorded
from tests.pipeline.helpers import contents, killed_until_it_ends, start_driver

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
pytestmark = pytest.mark.timeout(900)
SLOW = pytest.mark.slow


def need(name: str) -> None:
    """Skip a run whose simulator's environment is not installed."""
    if name.startswith("metaworld"):
        need_environment("metaworld")


def assert_recorded(name: str, root: Path) -> None:
    """The content digest of every stage is the one on file."""
    found, expected = contents(root / "run"), recorded()[name]
    changed = sorted(
        place for place in found.keys() | expected.keys() if found.get(place) != expected.get(place)
    )
    assert not changed, (
        f"{name}: the contents of {changed} differ from tests/golden/digests.json (on "
        f"{cpu_field('model name')}); if the change is intended, compare the values once and run "
        f"python -m tests.golden.record {name}"
    )


CASES = [
    pytest.param(name, way, marks=[SLOW] if way != "process" or name == "metaworld_vla" else [])
    for name in RUNS
    for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_run_ends_with_the_bytes_on_file(name: str, way: str, tmp_path: Path) -> None:
    need(name)
    log = tmp_path / "log"
    driver = start_driver(command(name, way, tmp_path), log, PORTABLE)
    assert driver.wait(timeout=800) == 0, log.read_text()
    assert_recorded(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_ends_with_the_bytes_on_file(name: str, tmp_path: Path) -> None:
    need(name)
    chance = random.Random(name)
    words, log = command(name, "process", tmp_path), tmp_path / "log"
    killed_until_it_ends(words, log, chance, seconds=(2, 4), attempts=8, last_s=600, env=PORTABLE)
    assert_recorded(name, tmp_path)


def test_the_digests_tell_a_changed_seed(tmp_path: Path) -> None:
    """The comparison can fail: another seed has other bytes in every stage of learning."""
    words = [*command("cartpole_ppo", "process", tmp_path), "++seed=1"]
    log = tmp_path / "log"
    assert start_driver(words, log, PORTABLE).wait(timeout=300) == 0, log.read_text()
    found, expected = contents(tmp_path / "run"), recorded()["cartpole_ppo"]
    assert found.keys() == expected.keys()
    assert all(found[place] != expected[place] for place in found if "train" in place)
