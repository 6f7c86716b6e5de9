"""A Franka arm, controlled with franky-control (https://github.com/TimSchneider42/franky); the arm
is real, or simulated by franky-sim.

The package has no tasks, so this module defines one, ``reach``: the hand must come within
``reached_m`` of a goal, which the seed of a reset draws in the box. The reward is the decrease of
the distance to the goal in decimeters, plus 1 at the goal, which ends the episode with success.

The state is 12 numbers: the vectors from the hand to the goal and from the hand to its target
(decimeters, 3 each), the hand's velocity (in units of ``speed``, 3), and its position in the box
(-1 to 1, 3). An action ``[3]`` moves the hand's target along the axes of the arm's base, at most at
``speed``. The hand keeps its orientation. Images are not supported, and the gripper does not move.

A step takes ``1 / rate_hz`` of the arm's own clock, including the time of the policy. The clock of
a real arm is real time; a slower or faster simulator gives the same episodes. A step that begins or
ends too late is ``late``; the next step is not shortened.

This module is responsible for safety, whatever the policy's actions are:

- nothing moves before the first reset. A reset drives in a straight line to ``home``, and only from
  within the box;
- the hand's targets are in the box; without further commands the hand comes to rest at its target.
  The arm's own trajectory generator enforces the speed limits;
- any error stops the arm. One reflex of the arm per episode (a collision, for example) is
  recovered; a second reflex, the stop button, or a lost connection ends the episode, and the next
  reset connects again. A reset that fails ends the run;
- the end of the process stops the arm.

A person intervenes through a *reader* of an input device, a class with ``read(state)``, which is
called before each action. It returns None (the policy acts) or an action that replaces the
policy's. A reader may also have ``stopped()``, which is called before and during motion, also on
the way home. It returns whether a stop button was pressed, also between two steps; if so, the arm
stops and the episode ends. A reader's ``close()``, if any, is called at the end.
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
"""Time limit of the arm's first answer."""
CLOCK_TIMEOUT_S = 3.0
"""If the arm's clock does not advance for this time, the connection is lost."""
ACCELERATION_TIME_S, JERK_TIME_S = 0.2, 0.02
"""Minimum times: from rest to full speed, and from zero to full acceleration. At each step the
trajectory generator receives the arm's velocity, but not its full acceleration, so it may brake too
late by JERK_TIME_S. Targets therefore keep the corresponding distance from the sides of the box."""
MAX_ROTATION_SPEED = 0.5
"""Rotation speed of the hand and the elbow on the way home, rad/s."""
POSITION_TOLERANCE_M = 0.01
"""Tolerance of the hand's position, relative to its box and to home."""
HOMING_TIMEOUT_S, REST_TIME_MS = 10.0, 300.0
"""Time limit of driving home, in addition to twice the time at full speed; and the time at rest
after the hand has reached home."""
MODE_HINTS = {
    "UserStopped": "its stop button is pressed; release it when nothing is in the way",
    "Guiding": "a person guides it by hand",
    "Other": "unlock its joints and activate FCI in its Desk",
}
"""Advice for error messages, by the arm's mode."""
DOWNWARD_QUATERNION = (1.0, 0.0, 0.0, 0.0)
"""The hand's orientation, a quaternion (x, y, z, w)."""


class FrankaArmError(RuntimeError):
    """The arm does not follow a command; the message says why."""


class FrankaReflexError(FrankaArmError):
    """The arm has stopped by itself."""


class FrankaArm:
    """A connection to an arm: sends the hand to positions in the box, on the arm's own clock."""

    def __init__(self, settings: FrankaSettings, is_stop_pressed: Callable[[], bool]) -> None:
        """Create the connection. ``is_stop_pressed`` returns whether the reader's stop button is
        pressed; it is called before and during motion."""
        self._settings, self._is_stop_pressed = settings, is_stop_pressed
        self._robot: Any = None
        self._elbow: Any = None
        """The elbow's state at the connection; the arm drives home with it."""
        self._target: np.ndarray | None = None
        """The hand's target; None after the arm was stopped."""

    @property
    def clock(self) -> float:
        """The arm's clock, milliseconds."""
        with self._translate_errors():
            return 0.0 if self._robot is None else clock_ms(self._robot.state)

    def drive_home(self) -> Any:
        """Drive home; return the state at rest."""
        if self._robot is None:
            self._robot = self._connect()
        with self._translate_errors():
            state = self._robot.state
        if robot_mode(state) == "Reflex":
            self.recover()
        self._check_state(state, allow_reflex=True)
        self._target = hand_position(state)
        self.send_hand_to(np.array(self._settings.home), elbow=self._elbow)
        timeout_s = self._distance_from_home(state) / self._settings.speed * 2 + HOMING_TIMEOUT_S
        deadline_ms = clock_ms(state) + 1000 * timeout_s
        while clock_ms(state) < deadline_ms:
            state = self.wait_until(clock_ms(state) + 100)
            with self._translate_errors():
                is_moving = self._robot.is_in_control
            # Check the distance too, because the motion may not have begun.
            if not is_moving and self._distance_from_home(state) < POSITION_TOLERANCE_M:
                return self.wait_until(clock_ms(state) + REST_TIME_MS)
        raise FrankaArmError(f"the arm is not at kwargs.home after {timeout_s:.0f} s of its clock")

    def _distance_from_home(self, state: Any) -> float:
        """Return the distance from home, meters."""
        return float(np.linalg.norm(hand_position(state) - np.array(self._settings.home)))

    def send_hand_to(self, position: np.ndarray, elbow: Any = None) -> None:
        """Begin to drive the hand to a position ``[3]``, meters, where it comes to rest. Nothing is
        sent if that is its target already.

        Args:
            elbow: the elbow's state at the position; None: any.
        """
        import franky

        if self._target is None:
            raise FrankaArmError("the arm was stopped; it moves again after the next reset")
        if elbow is None and (self._target == position).all():
            return
        pose = franky.RobotPose(franky.Affine(position, DOWNWARD_QUATERNION), elbow)
        with self._translate_errors():
            self._check_state(self._robot.state, allow_reflex=elbow is not None)
            self._robot.move(franky.CartesianMotion(pose), asynchronous=True)
        self._target = np.array(position)

    def wait_until(self, end_ms: float) -> Any:
        """Return the arm's state when its clock reaches ``end_ms``.

        Raises:
            FrankaArmError: the arm was stopped, has left its box, or its clock does not advance.
        """
        last_ms, last_change = -1.0, time.monotonic()
        while True:
            with self._translate_errors():
                self._robot.poll_motion()
                state = self._robot.state
            self._check_state(state)
            now_ms = clock_ms(state)
            if now_ms >= end_ms:
                return state
            if now_ms != last_ms:
                last_ms, last_change = now_ms, time.monotonic()
            elif time.monotonic() > last_change + CLOCK_TIMEOUT_S:
                raise FrankaArmError(
                    f"the connection to {self._settings.host} is lost: its clock does not advance"
                )
            # Half of the remaining time, so that a simulator at double speed is read in time too.
            time.sleep(min(max(end_ms - now_ms, 1.0) / 2000, 0.02))

    def recover(self) -> None:
        """Clear the error that stopped the arm.

        Raises:
            FrankaArmError: the arm does not recover.
        """
        import franky

        with self._translate_errors():
            # If the state reported the reflex, the error of the motion is still pending and would
            # end the next motion.
            with contextlib.suppress(franky.ControlException):
                self._robot.join_motion(CLOCK_TIMEOUT_S)
            has_recovered = self._robot.recover_from_errors()
        if not has_recovered:
            raise FrankaArmError("the arm has stopped by itself and does not recover; see its Desk")
        self._target = np.full(3, np.nan)  # unequal to the next position, which is thus sent

    def stop(self) -> None:
        self._target, robot = None, self._robot
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
        """Stop the arm and close the connection on any error within the context, including an
        interruption."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _check_state(self, state: Any, allow_reflex: bool = False) -> None:
        """Check that the arm may move; ``allow_reflex``: even if it has stopped by itself.

        Raises:
            FrankaArmError: the arm may not move.
        """
        if self._is_stop_pressed():
            raise FrankaArmError("kwargs.reader: its stop button is pressed")
        if (mode := robot_mode(state)) == "Reflex" and not allow_reflex:
            raise FrankaReflexError(f"the arm has stopped by itself: {state.last_motion_errors}")
        if mode not in ("Idle", "Move", "Reflex"):
            hint = MODE_HINTS.get(mode, "see its Desk")
            raise FrankaArmError(f"the arm is in mode {mode}; {hint}")
        low, high = np.array(self._settings.box)
        hand = hand_position(state)
        if ((hand < low - POSITION_TOLERANCE_M) | (hand > high + POSITION_TOLERANCE_M)).any():
            raise FrankaArmError(
                f"the hand is at {hand.round(3).tolist()}, outside of kwargs.box; put it inside by "
                "hand, or check whether the box is right"
            )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise franky's errors as :class:`FrankaArmError`."""
        import franky

        try:
            yield
        except (franky.ControlException, franky.CommandException) as error:
            state = self._read_state()
            if state is not None:
                self._check_state(state, allow_reflex=True)
            raise FrankaReflexError(f"the arm has stopped by itself: {error}") from None
        except (franky.NetworkException, franky.ProtocolException) as error:
            raise FrankaArmError(
                f"the connection to {self._settings.host} is lost: {error}"
            ) from None
        except RuntimeError as error:
            if isinstance(error, FrankaArmError):
                raise
            # franky has no exception types for its trajectory generator and its network library.
            if self._read_state() is None:
                message = f"the connection to {self._settings.host} is lost: {error}"
                raise FrankaArmError(message) from None
            raise FrankaReflexError(f"the arm has stopped by itself: {error}") from None

    def _read_state(self) -> Any:
        """Return the arm's state; None if the connection is lost."""
        try:
            return self._robot.state
        except Exception:  # there is no other sign of a connection that is lost
            return None

    def _connect(self) -> Any:
        """Return a connected robot with the speed limits set.

        Raises:
            FrankaArmError: the arm does not connect within :data:`CONNECT_TIMEOUT_S`.
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

        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            # While another program is connected to the arm, connect() waits forever.
            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            thread.join(max(deadline - time.monotonic(), 0.0))
            if not results:
                raise FrankaArmError(
                    f"kwargs.host: {settings.host} does not answer for {CONNECT_TIMEOUT_S:g} s; "
                    "another program may be connected to it"
                )
            if isinstance(results[-1], franky.Robot):
                break
            if time.monotonic() + 1 > deadline:
                is_realtime_error = isinstance(results[-1], franky.RealtimeException)
                key = "kwargs.realtime" if is_realtime_error else "kwargs.host"
                raise FrankaArmError(f"{key}: cannot connect to {settings.host}: {results[-1]}")
            time.sleep(0.5)
        robot, axis_speed = results[-1], settings.speed / np.sqrt(3)
        for name, speed in (
            ("translation", axis_speed),
            ("rotation", MAX_ROTATION_SPEED),
            ("elbow", MAX_ROTATION_SPEED),
        ):
            acceleration = speed / ACCELERATION_TIME_S
            getattr(robot, f"{name}_velocity_limit").set(speed)
            getattr(robot, f"{name}_acceleration_limit").set(acceleration)
            getattr(robot, f"{name}_jerk_limit").set(acceleration / JERK_TIME_S)
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
"""Tolerated delay of a step, as a fraction of its duration."""
MAX_SPEED = 0.5
"""Maximum speed of the hand, m/s."""
GOAL_MARGIN = 0.15
"""Margin at each side of the box in which no goal is drawn, as a fraction of its size."""


class FrankaSettings(NamedTuple):
    """The keys of ``kwargs``."""

    host: str
    """Address of the arm."""
    box: tuple[tuple[float, float, float], tuple[float, float, float]]
    """Corners of the hand's workspace, meters, in the frame of the arm's base."""
    home: tuple[float, float, float] | None = None
    """Position at which an episode begins; the middle of the box by default."""
    speed: float = 0.05
    """Maximum speed of the hand, m/s."""
    rate_hz: float = 10.0
    """Steps per second of the arm's clock."""
    steps: int = 100
    """Maximum number of steps of an episode."""
    reached_m: float = 0.02
    """The goal is reached at this distance, meters."""
    force_n: float = 20.0
    torque_nm: float = 20.0
    """Force (N) and torque (Nm) at which the arm detects a collision and stops."""
    realtime: bool = True
    """Whether a real-time kernel is required, as for a real arm."""
    reader: str = ""
    """``module:Class`` or ``FILE.py:Class``; ``expert``: the environment's own expert always
    intervenes."""
    reader_args: Mapping[str, Any] = {}
    """Keyword arguments of the reader's class."""

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
        for name, description in (
            ("host", "the arm's address"),
            ("box", "the corners of where its hand may be, [[x, y, z], [x, y, z]] in meters"),
        ):
            if not kwargs.get(name):
                raise ValueError(f"kwargs.{name}: is not set; give {description}")
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
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    if id not in TASKS:
        near = difflib.get_close_matches(id, TASKS, 3, 0.3)
        raise ValueError(f"Franka has no task {id!r}; near it: {', '.join(near) or TASKS[0]}")
    import franky  # noqa: F401 - raises ImportError if it is not installed

    return FrankaEnv(FrankaSettings.from_kwargs(kwargs))


class FrankaEnv:
    """The environment of one arm, which is connected at the first reset."""

    step_info_keys = ("intervened", "performed", "late")

    def __init__(self, settings: FrankaSettings) -> None:
        from gymnasium.spaces import Box

        self._settings = settings
        self._reader = self._load_reader(settings.reader)
        self._arm = FrankaArm(settings, getattr(self._reader, "stopped", lambda: False))
        self._low, self._high = (np.array(corner) for corner in settings.box)
        # The arm limits each axis separately; the three together reach settings.speed at most.
        axis_speed = settings.speed / np.sqrt(3)
        self._action_scale = axis_speed / settings.rate_hz
        """Distance by which an action of 1 moves the target along its axis, meters."""
        margin = axis_speed * JERK_TIME_S
        self._target_bounds = self._low + margin, self._high - margin
        self._period_ms = 1000 / settings.rate_hz
        self._goal, self._target, self._hand = np.zeros((3, 3))
        """Positions, meters: goal, hand's target, and hand at the last observation."""
        self._distance, self._step_end_ms, self._steps = 0.0, 0.0, 0
        """Distance to the goal (meters), end of the last step (arm's clock), steps so far."""
        self._has_recovered = False
        """Whether a reflex was recovered in this episode."""
        self._observation = np.zeros(12, np.float32)
        self.action_space = Box(-1, 1, (3,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (12,), np.float32)

    def reset(self, seed: int | None = None) -> Any:
        """
        Raises:
            FrankaArmError: the arm does not answer, is stopped, or is outside of its box.
        """
        margin = GOAL_MARGIN * (self._high - self._low)
        random = np.random.default_rng(seed)
        self._goal = random.uniform(self._low + margin, self._high - margin)
        self._steps, self._has_recovered = 0, False
        with self._arm.stop_on_error():
            state = self._arm.drive_home()
        self._target, self._step_end_ms = np.array(self._settings.home), clock_ms(state)
        self._hand = hand_position(state)
        self._distance = float(np.linalg.norm(self._goal - self._hand))
        self._observe(state)
        return self._observation, {}

    def step(self, action: Any) -> Any:
        """Execute an action. ``info`` has ``success``; ``intervened``, whether a person acted;
        ``performed``, the executed action, which stays in the box; and ``late``.

        Raises:
            FrankaArmError: the arm has stopped, and the episode is over.
        """
        previous_target = self._target
        with self._arm.stop_on_error():
            intervention = None if self._reader is None else self._reader.read(self._observation)
            requested = np.asarray(
                action if intervention is None else intervention, np.float64
            ).reshape(3)
            if not np.isfinite(requested).all():
                raise FrankaArmError(f"kwargs.reader: {requested.tolist()} is no action")
            target = previous_target + self._action_scale * np.clip(requested, -1, 1)
            self._target = np.clip(target, *self._target_bounds)
            start_ms = self._arm.clock
            is_late = start_ms > self._step_end_ms + self._period_ms / 2
            # If the policy used most of the step, its action still gets a full step.
            end_ms = self._period_ms + (start_ms if is_late else self._step_end_ms)
            state = self._move_until(end_ms)
            performed = np.clip((self._target - previous_target) / self._action_scale, -1, 1)
            is_late |= clock_ms(state) > end_ms + LATE_TOLERANCE * self._period_ms
            self._step_end_ms = clock_ms(state) if is_late else end_ms
            self._observe(state)
        self._steps += 1
        distance = float(np.linalg.norm(self._goal - self._hand))
        solved = distance <= self._settings.reached_m
        reward, self._distance = 10 * (self._distance - distance) + solved, distance
        info = {
            "success": solved,
            "intervened": intervention is not None,
            "performed": performed.astype(np.float32),
            "late": bool(is_late),
        }
        return self._observation, reward, solved, self._steps >= self._settings.steps, info

    def expert_action(self) -> np.ndarray:
        """Return the action towards the goal at full speed, float32 ``[3]``."""
        return np.clip((self._goal - self._target) / self._action_scale, -1, 1).astype(np.float32)

    def stop(self) -> None:
        """Stop the arm now; nothing moves until the next reset."""
        self._arm.stop()

    def close(self) -> None:
        self._arm.close()
        if hasattr(self._reader, "close"):
            self._reader.close()

    def _move_until(self, end_ms: float) -> Any:
        """Move towards the target; return the arm's state at the end of the step."""
        try:
            self._arm.send_hand_to(self._target)
            return self._arm.wait_until(end_ms)
        except FrankaReflexError:
            if self._has_recovered:
                raise
            self._has_recovered = True
            # The arm rests where it stopped; the next action continues from that position.
            self._arm.recover()
            state = self._arm.wait_until(end_ms)
            self._target = np.clip(hand_position(state), *self._target_bounds)
            return state

    def _observe(self, state: Any) -> None:
        hand = hand_position(state)
        velocity = (hand - self._hand) * self._settings.rate_hz / self._settings.speed
        middle, half = (self._high + self._low) / 2, (self._high - self._low) / 2
        to_goal, to_target = 10 * (self._goal - hand), 10 * (self._target - hand)
        parts = (to_goal, to_target, velocity, (hand - middle) / half)
        self._observation, self._hand = np.concatenate(parts).astype(np.float32), hand

    def _load_reader(self, name: str) -> Any:
        """Return the reader with this name; None if the name is empty."""
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
                reader_module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(reader_module)
            else:
                reader_module = importlib.import_module(module)
            return getattr(reader_module, attribute)(**self._settings.reader_args)
        except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
            raise ValueError(f"kwargs.reader: {name!r}: {error!r}") from None


class FrankaExpertOperator:
    """A reader that returns the actions of the environment's own expert, in place of a person's."""

    def __init__(self, env: FrankaEnv) -> None:
        self._env = env

    def read(self, state: np.ndarray) -> np.ndarray:
        return self._env.expert_action()
