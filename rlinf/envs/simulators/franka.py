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

import contextlib
import difflib
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

CONNECT_TIMEOUT_S = 10.0
"""Time for the arm's first answer."""
CLOCK_TIMEOUT_S = 3.0
"""If the arm's clock does not advance for this time, the connection is lost."""
ACCELERATION_TIME_S, JERK_TIME_S = 0.2, 0.02
"""Least time from rest to full speed, and to full acceleration. The trajectory generator receives
the motion of the arm anew at each step, but not all of its acceleration, which costs it the latter
time. So the hand keeps that distance from the sides of its box."""
MAX_ROTATION_SPEED = 0.5
"""Rotation speed of the hand and the elbow on the way home, rad/s."""
POSITION_TOLERANCE_M = 0.01
"""Tolerance of the hand's position, relative to its box and to home."""
HOMING_TIMEOUT_S, REST_TIME_MS = 10.0, 300.0
"""Time to drive home, beside twice the time of the way at full speed; and to rest there."""
MODE_HINTS = {
    "UserStopped": "its stop button is pressed; release it when nothing is in the way",
    "Guiding": "a person guides it by hand",
    "Other": "unlock its joints and activate FCI in its Desk",
}
DOWNWARD_QUATERNION = (1.0, 0.0, 0.0, 0.0)
"""The hand's direction, a quaternion (x, y, z, w)."""


class FrankaArmError(RuntimeError):
    """The arm does not follow a command; the message says why."""


class FrankaReflexError(FrankaArmError):
    """The arm has stopped by itself."""


class FrankaArm:
    """A connection to an arm: sends the hand to positions in the box, on the arm's own clock."""

    def __init__(self, settings: FrankaSettings, pressed: Callable[[], bool]) -> None:
        """Create the connection. ``pressed`` returns whether the reader's stop button is pressed;
        it is checked before and during motion."""
        self._settings, self._pressed = settings, pressed
        self._robot: Any = None
        self._elbow: Any = None
        self._aim: np.ndarray | None = None
        """The hand's target, unless the arm was stopped since."""

    @property
    def clock(self) -> float:
        """The arm's clock, milliseconds."""
        with self._translate_errors():
            return 0.0 if self._robot is None else clock_ms(self._robot.state)

    def drive_home(self) -> Any:
        """Drive home; return the state at rest."""
        if self._robot is None:
            self._robot = self._connected()
        with self._translate_errors():
            state = self._robot.state
        if robot_mode(state) == "Reflex":
            self.recover()
        self._see(state, moves=False)
        self._aim = hand_position(state)
        self.send_hand_to(np.array(self._settings.home), elbow=self._elbow)
        longest = self._from_home(state) / self._settings.speed * 2 + HOMING_TIMEOUT_S
        latest = clock_ms(state) + 1000 * longest
        while clock_ms(state) < latest:
            state = self.wait_until(clock_ms(state) + 100)
            with self._translate_errors():
                moves = self._robot.is_in_control
            # It may not have begun.
            if not moves and self._from_home(state) < POSITION_TOLERANCE_M:
                return self.wait_until(clock_ms(state) + REST_TIME_MS)
        raise FrankaArmError(f"the arm is not at kwargs.home after {longest:.0f} s of its clock")

    def _from_home(self, state: Any) -> float:
        """Return the distance from home, meters."""
        return float(np.linalg.norm(hand_position(state) - np.array(self._settings.home)))

    def send_hand_to(self, to: np.ndarray, elbow: Any = None) -> None:
        """Begin to drive the hand to a position ``[3]``, meters, where it comes to rest, unless it
        is already on its way there.

        Args:
            elbow: the elbow's state there.
        """
        import franky

        if self._aim is None:
            raise FrankaArmError("the arm was stopped; it moves again after the next reset")
        if elbow is None and (self._aim == to).all():
            return
        pose = franky.RobotPose(franky.Affine(to, DOWNWARD_QUATERNION), elbow)
        with self._translate_errors():
            self._see(self._robot.state, moves=elbow is None)
            self._robot.move(franky.CartesianMotion(pose), asynchronous=True)
        self._aim = np.array(to)

    def wait_until(self, due: float) -> Any:
        """Return the arm's state when its clock reaches ``due``.

        Raises:
            FrankaArmError: the arm was stopped, has left its box, or its clock does not advance.
        """
        last, heard = -1.0, time.monotonic()
        while True:
            with self._translate_errors():
                self._robot.poll_motion()
                state = self._robot.state
            self._see(state)
            now = clock_ms(state)
            if now >= due:
                return state
            if now != last:
                last, heard = now, time.monotonic()
            elif time.monotonic() > heard + CLOCK_TIMEOUT_S:
                raise FrankaArmError(
                    f"the connection to {self._settings.host} is lost: its clock stands"
                )
            # Half of what is left: also an arm whose clock goes twice as fast is seen in time.
            time.sleep(min(max(due - now, 1.0) / 2000, 0.02))

    def recover(self) -> None:
        """Clear the error that stopped the arm.

        Raises:
            FrankaArmError: the arm does not recover.
        """
        import franky

        with self._translate_errors():
            # If its state reported the reflex, the error of the motion is still pending;
            # it would end the next one.
            with contextlib.suppress(franky.ControlException):
                self._robot.join_motion(CLOCK_TIMEOUT_S)
            done = self._robot.recover_from_errors()
        if not done:
            raise FrankaArmError("the arm has stopped by itself and does not recover; see its Desk")
        self._aim = np.full(3, np.nan)

    def stop(self) -> None:
        self._aim, robot = None, self._robot
        if robot is not None:
            with contextlib.suppress(Exception):
                robot.stop()
            with contextlib.suppress(Exception):
                robot.join_motion(CLOCK_TIMEOUT_S)

    def close(self) -> None:
        self.stop()
        self._robot = None

    @contextlib.contextmanager
    def stop_on_error(self) -> Iterator[None]:
        """Stop the arm on any error inside, an interruption included, and close the connection."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _see(self, state: Any, moves: bool = True) -> None:
        """Check that the arm may move.

        Raises:
            FrankaArmError: it may not.
        """
        if self._pressed():
            raise FrankaArmError("kwargs.reader: its stop button is pressed")
        if (now := robot_mode(state)) == "Reflex" and moves:
            raise FrankaReflexError(f"the arm has stopped by itself: {state.last_motion_errors}")
        if now not in ("Idle", "Move", "Reflex"):
            raise FrankaArmError(f"the arm is in mode {now}; {MODE_HINTS.get(now, 'see its Desk')}")
        low, high = np.array(self._settings.box)
        at = hand_position(state)
        if ((at < low - POSITION_TOLERANCE_M) | (at > high + POSITION_TOLERANCE_M)).any():
            where = f"the hand is at {at.round(3).tolist()}, outside of kwargs.box"
            raise FrankaArmError(
                f"{where}; put it inside by hand, or look whether the box is right"
            )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise franky's errors as ours."""
        import franky

        try:
            yield
        except (franky.ControlException, franky.CommandException) as error:
            state = self._state()
            if state is not None:
                self._see(state, moves=False)
            raise FrankaReflexError(f"the arm has stopped by itself: {error}") from None
        except (franky.NetworkException, franky.ProtocolException) as error:
            raise FrankaArmError(
                f"the connection to {self._settings.host} is lost: {error}"
            ) from None
        except RuntimeError as error:
            if isinstance(error, FrankaArmError):
                raise
            # franky has no type for what its generator of trajectories and its network library say.
            if self._state() is None:
                text = f"the connection to {self._settings.host} is lost: {error}"
                raise FrankaArmError(text) from None
            raise FrankaReflexError(f"the arm has stopped by itself: {error}") from None

    def _state(self) -> Any:
        try:
            return self._robot.state
        except Exception:  # there is no other sign of a connection that is lost
            return None

    def _connected(self) -> Any:
        """Return a connection with the speed limits set.

        Raises:
            FrankaArmError: there is none within :data:`CONNECT_TIMEOUT_S`.
        """
        import franky

        settings, results = self._settings, list[Any]()
        config = franky.RealtimeConfig

        def connect() -> None:
            try:
                robot = franky.Robot(
                    settings.host,
                    default_torque_threshold=settings.torque_nm,
                    default_force_threshold=settings.force_n,
                    realtime_config=config.Enforce if settings.realtime else config.Ignore,
                )
            except Exception as error:  # any error is reported
                results.append(error)
            else:
                results.append(robot)

        latest = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            # Where another program has the arm, this waits for ever.
            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            thread.join(max(latest - time.monotonic(), 0.0))
            if not results:
                raise FrankaArmError(
                    f"kwargs.host: {settings.host} does not answer for {CONNECT_TIMEOUT_S:g} s; "
                    "another program may be connected to it"
                )
            if isinstance(results[-1], franky.Robot):
                break
            if time.monotonic() + 1 > latest:
                real = isinstance(results[-1], franky.RealtimeException)
                key = "kwargs.realtime" if real else "kwargs.host"
                raise FrankaArmError(f"{key}: cannot connect to {settings.host}: {results[-1]}")
            time.sleep(0.5)
        robot, fastest = results[-1], settings.speed / np.sqrt(3)
        for name, speed in (
            ("translation", fastest),
            ("rotation", MAX_ROTATION_SPEED),
            ("elbow", MAX_ROTATION_SPEED),
        ):
            accelerates = speed / ACCELERATION_TIME_S
            getattr(robot, f"{name}_velocity_limit").set(speed)
            getattr(robot, f"{name}_acceleration_limit").set(accelerates)
            getattr(robot, f"{name}_jerk_limit").set(accelerates / JERK_TIME_S)
        self._elbow = robot.state.elbow
        return robot


def clock_ms(state: Any) -> float:
    """Return the arm's clock, milliseconds."""
    return float(state.time.to_msec())


def hand_position(state: Any) -> np.ndarray:
    """Return the hand's position, meters, float64 ``[3]``."""
    return np.array(state.O_T_EE.translation, np.float64).reshape(3)


def robot_mode(state: Any) -> str:
    return str(state.robot_mode.name)


PACKAGES = ("franky", "gymnasium")
SINGLE_INSTANCE = True
TASKS = ("reach",)
LATE_TOLERANCE = 0.1
"""Share of a step by which it may be late."""
MAX_SPEED = 0.5
"""Highest speed of the hand, m/s."""
GOAL_MARGIN = 0.15
"""Share of the box, at each side, in which no goal is drawn."""


class FrankaSettings(NamedTuple):
    """The keys of ``kwargs``."""

    host: str
    """Address of the arm."""
    box: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Corners of the hand's workspace, meters, in the frame of the arm's base."""
    home: tuple[float, float, float] | None = None
    """Position at which an episode begins; the middle of the box by default."""
    speed: float = 0.05
    """Highest speed of the hand, m/s."""
    rate_hz: float = 10.0
    steps: int = 100
    reached_m: float = 0.02
    force_n: float = 20.0
    torque_nm: float = 20.0
    """Force and torque at which the arm detects a collision, and stops."""
    realtime: bool = True
    """Whether a real-time kernel is required, as for a real arm."""
    reader: str = ""
    """``module:Class`` or ``FILE.py:Class``; ``expert``: the environment's own expert always takes
    over."""
    reader_args: Mapping[str, Any] = {}

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> FrankaSettings:
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
        settings = cls(**kwargs)
        box = np.asarray(settings.box, np.float64)
        if box.shape != (2, 3) or not (box[0] < box[1]).all():
            raise ValueError(f"kwargs.box: {settings.box}; expected [[x, y, z], [x, y, z]], rising")
        home = np.asarray(box.mean(0) if settings.home is None else settings.home, np.float64)
        if home.shape != (3,) or not ((box[0] <= home) & (home <= box[1])).all():
            raise ValueError(f"kwargs.home: {settings.home} is not in kwargs.box {settings.box}")
        if not 0 < settings.speed <= MAX_SPEED:
            raise ValueError(
                f"kwargs.speed: {settings.speed}; expected m/s, above 0, to {MAX_SPEED}"
            )
        for name in ("rate_hz", "steps", "reached_m", "force_n", "torque_nm"):
            if not getattr(settings, name) > 0:
                raise ValueError(f"kwargs.{name}: {getattr(settings, name)}; expected more than 0")
        corners: Any = tuple(map(tuple, box.tolist()))
        return settings._replace(box=corners, home=tuple(home.tolist()))


def make(id: str, kwargs: dict[str, Any]) -> FrankaEnv:
    """``id`` is one of :data:`TASKS`; ``kwargs`` are :class:`FrankaSettings`.

    Raises:
        ImportError, ValueError: see the package.
    """
    if id not in TASKS:
        near = difflib.get_close_matches(id, TASKS, 3, 0.3)
        raise ValueError(f"Franka has no task {id!r}; near it: {', '.join(near) or TASKS[0]}")
    import franky  # noqa: F401 - that it is there

    return FrankaEnv(FrankaSettings.from_kwargs(kwargs))


class FrankaEnv:
    """The arm at an address; it is connected at the first reset."""

    step_info_keys = ("intervened", "performed", "late")

    def __init__(self, settings: FrankaSettings) -> None:
        from gymnasium.spaces import Box

        self._settings = settings
        self._reader = self._read_by(settings.reader)
        self._arm = FrankaArm(settings, getattr(self._reader, "stopped", lambda: False))
        self._low, self._high = (np.array(corner) for corner in settings.box)
        # A cube in the ball of the speed, for the arm limits each axis by itself.
        fastest = settings.speed / np.sqrt(3)
        self._unit = fastest / settings.rate_hz
        self._nearest = self._low + fastest * JERK_TIME_S, self._high - fastest * JERK_TIME_S
        self._period = 1000 / settings.rate_hz
        self._point, self._sent, self._at = np.zeros((3, 3))
        self._away, self._due, self._steps, self._recovered = 0.0, 0.0, 0, False
        self._observation = np.zeros(12, np.float32)
        self.action_space = Box(-1, 1, (3,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (12,), np.float32)

    def reset(self, seed: int | None = None) -> Any:
        """
        Raises:
            FrankaArmError: the arm does not answer, is stopped, or stands outside of its box.
        """
        margin = GOAL_MARGIN * (self._high - self._low)
        random = np.random.default_rng(seed)
        self._point = random.uniform(self._low + margin, self._high - margin)
        self._steps, self._recovered = 0, False
        with self._arm.stop_on_error():
            state = self._arm.drive_home()
        self._sent, self._due = np.array(self._settings.home), clock_ms(state)
        self._at = hand_position(state)
        self._away = float(np.linalg.norm(self._point - self._at))
        self._show(state)
        return self._observation, {}

    def step(self, action: Any) -> Any:
        """Act; ``info`` has ``success``; ``intervened``, whether a person acted; ``performed``, the
        action executed within the box; ``late``.

        Raises:
            FrankaArmError: the arm has stopped, and the episode is over.
        """
        before = self._sent
        with self._arm.stop_on_error():
            person = None if self._reader is None else self._reader.read(self._observation)
            wanted = np.asarray(action if person is None else person, np.float64).reshape(3)
            if not np.isfinite(wanted).all():
                raise FrankaArmError(f"kwargs.reader: {wanted.tolist()} is no action")
            self._sent = before + self._unit * np.clip(wanted, -1, 1)
            self._sent = np.clip(self._sent, *self._nearest)
            began = self._arm.clock
            late = began > self._due + self._period / 2
            # If the policy used most of the step, its action still gets a full one.
            due = self._period + (began if late else self._due)
            state = self._go(due)
            performed = np.clip((self._sent - before) / self._unit, -1, 1)
            late |= clock_ms(state) > due + LATE_TOLERANCE * self._period
            self._due = clock_ms(state) if late else due
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
        return self._observation, reward, solved, self._steps >= self._settings.steps, info

    def expert_action(self) -> np.ndarray:
        """Return the action towards the goal, as fast as is allowed: float32 ``[3]``."""
        return np.clip((self._point - self._sent) / self._unit, -1, 1).astype(np.float32)

    def stop(self) -> None:
        """Stop the arm now; nothing moves until the next reset."""
        self._arm.stop()

    def close(self) -> None:
        self._arm.close()
        if hasattr(self._reader, "close"):
            self._reader.close()

    def _go(self, due: float) -> Any:
        """Return the arm's state at the end of a step, on its way to its target."""
        try:
            self._arm.send_hand_to(self._sent)
            return self._arm.wait_until(due)
        except FrankaReflexError:
            if self._recovered:
                raise
            self._recovered = True
            # It rests where it stopped; the next action goes on from there.
            self._arm.recover()
            state = self._arm.wait_until(due)
            self._sent = np.clip(hand_position(state), *self._nearest)
            return state

    def _show(self, state: Any) -> None:
        """Store the state that a policy sees."""
        at = hand_position(state)
        moved = (at - self._at) * self._settings.rate_hz / self._settings.speed
        middle, half = (self._high + self._low) / 2, (self._high - self._low) / 2
        parts = (10 * (self._point - at), 10 * (self._sent - at), moved, (at - middle) / half)
        self._observation, self._at = np.concatenate(parts).astype(np.float32), at

    def _read_by(self, name: str) -> Any:
        """Return the reader of this name; None without one."""
        if not name:
            return None
        if name == "expert":
            return FrankaExpertOperator(self)
        module, _, attribute = name.rpartition(":")
        try:
            if module.endswith(".py"):
                spec = importlib.util.spec_from_file_location("reader", module)
                assert spec is not None
                assert spec.loader is not None
                loaded = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(loaded)
            else:
                loaded = importlib.import_module(module)
            return getattr(loaded, attribute)(**self._settings.reader_args)
        except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"kwargs.reader: {name!r}: {error!r}") from None


class FrankaExpertOperator:
    """A reader that acts as the environment's own expert, in place of a person."""

    def __init__(self, world: FrankaEnv) -> None:
        self._world = world

    def read(self, state: np.ndarray) -> np.ndarray:
        return self._world.expert_action()
