"""Pictures of MuJoCo's worlds."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("mujoco", reason="the extra 'sims' is not installed")
from rlinf.envs.gym import GymConfig, create_simulator_process
from rlinf.errors import InputError


def test_where_there_is_no_renderer_it_says_which_packages_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the libraries that EGL offers none is there, as on a machine without them."""
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/none.json")
    config = GymConfig(id="InvertedPendulum-v5", images={"free": (8, 8)}, renderer="egl")
    with contextlib.closing(create_simulator_process(config)) as process:
        message = r"task\.renderer: egl does not work here \(.+\); egl needs .*libegl1 .*libosmesa6"
        with pytest.raises(InputError, match=message):
            process.reset([0], [0])
