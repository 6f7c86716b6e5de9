"""Parts by name and by ``module:attribute``, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.errors import EXIT_BAD_INPUT, ConfigError
from rlinf.rewards import rewards
from rlinf.rewards.task_rewards import ScoreReward
from rlinf.track import trackers
from tests.bad_input.door import Base, assert_mentions, refused

GOOD = """
from rlinf.rewards.base import Reward


class Mine(Reward):
    def compute(self, trajectories, scores):
        return []
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, with a package ``registered`` in it."""
    folder = tmp_path / "own"
    (folder / "registered").mkdir(parents=True)
    files = {
        "good": GOOD,
        "odd": "class Mine: ...\nmine = 3\n",
        "half": "from rlinf.rewards.base import Reward\nclass Mine(Reward): ...\n",
        "wrong": "def f(:\n",
        "lacks": "\nimport no_such_package\n",
        "raises": "x = 1\ny = x / 0\n",
    }
    for name, text in files.items():
        (folder / "registered" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_name_with_a_colon_is_the_part_itself(own: Path) -> None:
    assert rewards.target("registered.good:Mine") == "registered.good:Mine"
    assert rewards.get("registered.good:Mine").__name__ == "Mine"
    assert rewards.get("score") is ScoreReward


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("registred.good:Mine", ["no module 'registred'", "PYTHONPATH"]),
        ("registered.god:Mine", ["no module 'registered.god'"]),
        ("registered.good:Mien", ["good.py has no 'Mien'; did you mean 'Mine'?"]),
        ("registered.odd:Mine", ["is no reward", "rlinf.rewards.base.Reward"]),
        ("registered.odd:mine", ["is no reward", "make it a subclass"]),
        ("registered.half:Mine", ["lacks compute"]),
        ("registered.wrong:Mine", ["wrong.py, line 1: SyntaxError"]),
        ("registered.lacks:Mine", ["lacks.py, line 2", "no_such_package"]),
        ("registered.raises:Mine", ["raises.py, line 2: ZeroDivisionError"]),
        (":Mine", ["expected MODULE:CLASS"]),
        ("registered.good:", ["expected MODULE:CLASS"]),
        ("a/b:c", ["expected MODULE:CLASS"]),
    ],
)
def test_an_unusable_target_is_refused_by_its_key_before_anything_is_written(
    own: Path, base: Base, name: str, words: list[str]
) -> None:
    refused(base("arithmetic", {"reward.name": name}), "reward.name", *words)


@pytest.mark.parametrize("section", ["task", "model", "algorithm", "engine", "trainer"])
def test_every_kind_of_part_can_be_a_target(own: Path, base: Base, section: str) -> None:
    refused(
        base("arithmetic", {f"{section}.name": "registered.good:Mine"}),
        f"{section}.name",
        f"is no {section}",
    )


def test_a_tracker_can_be_a_target_too(own: Path) -> None:
    (own / "registered" / "tracks.py").write_text(
        "class Mine:\n    def log(self, step, metrics): ...\n    def close(self): ...\n"
    )
    assert trackers.get("registered.tracks:Mine").__name__ == "Mine"
    with pytest.raises(ConfigError) as caught:
        trackers.get("registered.odd:Mine", "log.trackers.0")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert_mentions(str(caught.value), "log.trackers.0", "is no tracker")
