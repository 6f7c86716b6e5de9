"""An error of the user's own simulator that comes in every start ends the run as the user's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, create_simulator_process, user_modules
from rlinf.envs.simulator_errors import USER_CODE_PREFIX, format_error
from rlinf.envs.subprocess_env import SimulatorError, create_simulator_error
from rlinf.errors import UserCodeError
from tests.rlinf.envs.test_lost_episodes import BREAKING, played

ALWAYS = {"fails": list(range(99))}
LINE = 'raise ZeroDivisionError("the third step")'


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(("split", "starts"), [("train", 1), ("test", 3)])
def test_it_ends_the_run_wherever_it_is_stepped(
    processes: int, split: str, starts: int, tmp_path: Path
) -> None:
    with pytest.raises(UserCodeError) as found:
        played(split, starts, tmp_path, kwargs=ALWAYS, num_processes=processes)
    text = str(found.value)
    assert found.value.exit_code == 65
    assert text.count("Traceback") == 1
    assert text.index(USER_CODE_PREFIX) < text.index("breaking_worlds.py") < text.index(LINE)
    assert "simulator.py" not in text


@pytest.mark.parametrize("processes", [0, 1])
def test_one_that_begins_nothing_does_too(processes: int, tmp_path: Path) -> None:
    from tests.rlinf.envs import breaking_worlds

    breaking_worlds.resets.clear()
    with pytest.raises(UserCodeError, match="ZeroDivisionError: a reset"):
        kwargs = {"begins_not": [1, 2, 3]}
        played("train", 1, tmp_path, kwargs=kwargs, num_processes=processes)


def test_episodes_that_fail_alone_stay_as_they_are(tmp_path: Path) -> None:
    _, records = played("test", 3, tmp_path, kwargs={"fails": []}, num_processes=1)
    assert not any(record.num_failed_episodes for record in records)
    _, records = played("test", 2, tmp_path, kwargs=ALWAYS, num_processes=1)
    assert all(record.num_failed_episodes for record in records), "others are elsewhere, maybe"


def test_an_environment_of_gymnasiums_registry_is_the_users_too() -> None:
    task = {"id": "tests.rlinf.envs.failing_worlds:Falling-v0", "kwargs": {"how": "reset"}}
    config = GymConfig.model_validate(task)
    with (
        contextlib.closing(create_simulator_process(config)) as process,
        pytest.raises(
            UserCodeError, match=rf"{USER_CODE_PREFIX} ZeroDivisionError(?s:.)*the reset"
        ),
    ):
        process.reset([0], [0])


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


@pytest.mark.parametrize(
    ("error", "own", "users"),
    [
        (KeyError("x"), __name__, True),
        (KeyError("x"), __file__, True),
        (KeyError("x"), "numpy", False),
        (ConnectionResetError("x"), __name__, False),
        (MemoryError(), __name__, False),
    ],
)
def test_whose_it_is_and_whether_it_may_pass(error: Exception, own: str, users: bool) -> None:
    assert (USER_CODE_PREFIX in format_error(raised(error), (own,))) is users


def test_one_that_others_lost_too_is_tried_again() -> None:
    mine, other = format_error(raised(KeyError("x")), (__name__,)), "simulator process 1 was killed"
    assert isinstance(create_simulator_error("m", mine, mine), UserCodeError)
    assert type(create_simulator_error("m", mine, other)) is SimulatorError
    assert type(create_simulator_error("m")) is SimulatorError


def test_only_modules_of_the_user_count() -> None:
    def of(**task: Any) -> tuple[str, ...]:
        return user_modules(GymConfig.model_validate(task))

    assert of(id="CartPole-v1") == ()
    assert of(id="mylab:Env-v0") == ("mylab",)
    assert of(id="any", simulator=BREAKING["simulator"]) == ("tests.rlinf.envs.breaking_worlds",)
    assert of(id="robocasa:PnPCounterToCab", simulator="robosuite") == ()
