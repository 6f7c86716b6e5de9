"""A Franka arm by franky-control (https://github.com/TimSchneider42/franky), which speaks to a real
one, or to franky-sim in its place.

The package brings no tasks; ``reach`` is one of ours: the hand is to come within ``reached_m`` of a
point in the box, which the seed of a reset draws. The reward is how much nearer it came, in
decimeters, and 1 more where it is there, which ends the episode with success.

The state is 12 numbers: from the hand to the point, and from the hand to where it was sent
(decimeters, 3 each), its velocity (in ``speed``, 3), and its place in the box (-1 to 1, 3). An
action ``[3]`` moves where the hand is sent, along the axes of the arm's base, at ``speed`` at most;
the hand keeps its direction. There are no pictures and the gripper is left alone.

A step takes ``1 / rate_hz`` of the arm's own clock, the time that the policy takes included: with a
real arm that is the time of the day, and a simulator that is slower or faster than that gives the
same episodes. A step that began or ended too late is ``late``, and the next one is not shortened.

What is safe is seen to here, whatever the policy says:

- nothing moves before the first reset, which drives in a straight line to ``home``, and only from
  within the box;
- the hand is sent to places in the box alone, where it comes to rest by itself when no more is
  heard; the arm's own generator of trajectories has the limits of speed;
- whatever goes wrong stops the arm. A reflex of the arm (a collision, ...) is recovered from once
  in an episode; a second one, its stop button, or a lost connection ends the episode, and the next
  reset connects anew; a reset that fails ends the run;
- the end of the process stops it.

A person takes over by a *reader*, a class with ``read(state)``, which is asked before each action
and returns None (the policy acts) or an action in the place of the policy's. It may also have
``stopped()``, a stop button: that is asked before the arm moves and while it does, on the way home
too, and where it is true the arm stops and the episode is over. What is pressed between two steps
only it has to remember. Its ``close()``, if it has one, ends it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .franka_arm import JERKS_S, Arm, ArmError, Reflex, clock, place

PACKAGES = ("franky", "gymnasium")
SINGLE = True
TASKS = ("reach",)
LATE = 0.1
"""Share of a step by which it may be late."""
FASTEST = 0.5
"""Of a hand, m/s."""
MARGIN = 0.15
"""Of the box, at each side, where no point is drawn."""


class Settings(NamedTuple):
    """``kwargs``."""

    host: str
    """Address of the arm."""
    box: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Corners of where the hand may be, meters, in the frame of the arm's base."""
    home: tuple[float, float, float] | None = None
    """Where an episode begins; the middle of the box by default."""
    speed: float = 0.05
    """Of the hand, m/s, at most."""
    rate_hz: float = 10.0
    steps: int = 100
    reached_m: float = 0.02
    force_n: float = 20.0
    torque_nm: float = 20.0
    """At which the arm takes what it feels for a collision, and stops."""
    realtime: bool = True
    """Whether a kernel that is real-time is asked for, as a real arm needs."""
    reader: str = ""
    """``module:Class`` or ``FILE.py:Class``; ``expert``: the world's own takes over, always."""
    reader_args: Mapping[str, Any] = {}

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> Settings:
        """
        Raises:
            ValueError: names the key.
        """
        for name in kwargs:
            if name not in cls._fields:
                near = difflib.get_close_matches(name, cls._fields, 3, 0.3) or cls._fields
                raise ValueError(f"kwargs.{name}: no such key; near it: {', '.join(near)}")
        for name, what in (
            ("host", "the arm's address"),
            ("box", "the corners of where its hand may be, [[x, y, z], [x, y, z]] in meters"),
        ):
            if not kwargs.get(name):
                raise ValueError(f"kwargs.{name}: is not set; give {what}")
        found = cls(**kwargs)
        box = np.asarray(found.box, np.float64)
        if box.shape != (2, 3) or not (box[0] < box[1]).all():
            raise ValueError(f"kwargs.box: {found.box}; expected [[x, y, z], [x, y, z]], rising")
        home = np.asarray(box.mean(0) if found.home is None else found.home, np.float64)
        if home.shape != (3,) or not ((box[0] <= home) & (home <= box[1])).all():
            raise ValueError(f"kwargs.home: {found.home} is not in kwargs.box {found.box}")
        if not 0 < found.speed <= FASTEST:
            raise ValueError(f"kwargs.speed: {found.speed}; expected m/s, above 0, to {FASTEST}")
        for name in ("rate_hz", "steps", "reached_m", "force_n", "torque_nm"):
            if not getattr(found, name) > 0:
                raise ValueError(f"kwargs.{name}: {getattr(found, name)}; expected more than 0")
        corners: Any = tuple(map(tuple, box.tolist()))
        return found._replace(box=corners, home=tuple(home.tolist()))


def make(id: str, kwargs: dict[str, Any]) -> World:
    """``id`` is one of :data:`TASKS`; ``kwargs`` are :class:`Settings`.

    Raises:
        ImportError, ValueError: see the package.
    """
    if id not in TASKS:
        near = difflib.get_close_matches(id, TASKS, 3, 0.3)
        raise ValueError(f"Franka has no task {id!r}; near it: {', '.join(near) or TASKS[0]}")
    import franky  # noqa: F401 - that it is there

    return World(Settings.of(kwargs))


class World:
    """The arm of an address, which is connected at the first reset."""

    tells = ("intervened", "performed", "late")

    def __init__(self, settings: Settings) -> None:
        from gymnasium.spaces import Box

        self._settings = settings
        self._reader = self._read_by(settings.reader)
        self._arm = Arm(settings, getattr(self._reader, "stopped", lambda: False))
        self._low, self._high = (np.array(corner) for corner in settings.box)
        # A cube in the ball of the speed, for the arm limits each axis by itself.
        fastest = settings.speed / np.sqrt(3)
        self._unit = fastest / settings.rate_hz
        self._nearest = self._low + fastest * JERKS_S, self._high - fastest * JERKS_S
        self._period = 1000 / settings.rate_hz
        self._point, self._sent, self._at = np.zeros((3, 3))
        self._away, self._due, self._steps, self._recovered = 0.0, 0.0, 0, False
        self._seen = np.zeros(12, np.float32)
        self.action_space = Box(-1, 1, (3,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (12,), np.float32)

    def reset(self, seed: int | None = None) -> Any:
        """
        Raises:
            ArmError: the arm does not answer, is stopped, or stands outside of its box.
        """
        margin = MARGIN * (self._high - self._low)
        random = np.random.default_rng(seed)
        self._point = random.uniform(self._low + margin, self._high - margin)
        self._steps, self._recovered = 0, False
        with self._arm.stopping():
            state = self._arm.home()
        self._sent, self._due = np.array(self._settings.home), clock(state)
        self._at = place(state)
        self._away = float(np.linalg.norm(self._point - self._at))
        self._show(state)
        return self._seen, {}

    def step(self, action: Any) -> Any:
        """``info``: ``success``; ``intervened``, whether a person acted; ``performed``, the action
        that was carried out within the box; ``late``.

        Raises:
            ArmError: the arm has stopped, and the episode is over.
        """
        before = self._sent
        with self._arm.stopping():
            person = None if self._reader is None else self._reader.read(self._seen)
            wanted = np.asarray(action if person is None else person, np.float64).reshape(3)
            if not np.isfinite(wanted).all():
                raise ArmError(f"kwargs.reader: {wanted.tolist()} is no action")
            self._sent = before + self._unit * np.clip(wanted, -1, 1)
            self._sent = np.clip(self._sent, *self._nearest)
            began = self._arm.clock
            late = began > self._due + self._period / 2
            # A policy that took most of the step's time leaves its action a whole one.
            due = self._period + (began if late else self._due)
            state = self._go(due)
            performed = np.clip((self._sent - before) / self._unit, -1, 1)
            late |= clock(state) > due + LATE * self._period
            self._due = clock(state) if late else due
            self._show(state)
        self._steps += 1
        away = float(np.linalg.norm(self._point - self._at))
        solved = away <= self._settings.reached_m
        reward, self._away = 10 * (self._away - away) + solved, away
        info = {
            "success": solved,
            "intervened": person is not None,
            "performed": performed.astype(np.float32),
            "late": bool(late),
        }
        return self._seen, reward, solved, self._steps >= self._settings.steps, info

    def expert(self) -> np.ndarray:
        """Towards the point, by what is left to it, as fast as is allowed: float32 ``[3]``."""
        return np.clip((self._point - self._sent) / self._unit, -1, 1).astype(np.float32)

    def stop(self) -> None:
        """Stop the arm now; nothing moves until the next reset."""
        self._arm.stop()

    def close(self) -> None:
        self._arm.close()
        if hasattr(self._reader, "close"):
            self._reader.close()

    def _go(self, due: float) -> Any:
        """The arm's state when a step is over, on its way to where it was sent."""
        try:
            self._arm.send(self._sent)
            return self._arm.until(due)
        except Reflex:
            if self._recovered:
                raise
            self._recovered = True
            # It rests where it stopped; the next action goes on from there.
            self._arm.recover()
            state = self._arm.until(due)
            self._sent = np.clip(place(state), *self._nearest)
            return state

    def _show(self, state: Any) -> None:
        """Keep the state that a policy sees."""
        at = place(state)
        moved = (at - self._at) * self._settings.rate_hz / self._settings.speed
        middle, half = (self._high + self._low) / 2, (self._high - self._low) / 2
        parts = (10 * (self._point - at), 10 * (self._sent - at), moved, (at - middle) / half)
        self._seen, self._at = np.concatenate(parts).astype(np.float32), at

    def _read_by(self, name: str) -> Any:
        """The reader of this name; None without one."""
        if not name:
            return None
        if name == "expert":
            return Expert(self)
        module, _, attribute = name.rpartition(":")
        try:
            if module.endswith(".py"):
                spec = importlib.util.spec_from_file_location("reader", module)
                assert spec is not None
                assert spec.loader is not None
                found = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(found)
            else:
                found = importlib.import_module(module)
            return getattr(found, attribute)(**self._settings.reader_args)
        except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"kwargs.reader: {name!r}: {error!r}") from None


class Expert:
    """A reader: the world's own expert, in the place of a person."""

    def __init__(self, world: World) -> None:
        self._world = world

    def read(self, state: np.ndarray) -> np.ndarray:
        return self._world.expert()
