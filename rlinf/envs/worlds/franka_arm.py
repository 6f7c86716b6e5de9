"""A connection to a Franka arm by franky-control: sends the hand to places in a box, no faster than
is allowed, in the arm's own time, and stops it where anything is wrong.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .franka import Settings

CONNECTS_S = 10.0
"""For the arm's first answer."""
SILENT_S = 3.0
"""Without which its clock has not gone on, and the connection is lost."""
ACCELERATES_S, JERKS_S = 0.2, 0.02
"""From rest to full speed, and to full acceleration, at the least. The generator of trajectories is
told anew at each step how the arm moves; what it is not told of the acceleration takes it the
latter, so the hand is sent no nearer to a side of its box than it goes in that time."""
TURNS = 0.5
"""Of the hand and the elbow on the way home, rad/s."""
OUTSIDE_M = 0.01
"""How far from its box the hand may be found, and from home when it is there."""
HOMES_S, RESTS_MS = 10.0, 300.0
"""To drive home, beside twice the time that the way takes at full speed; and to rest there."""
MODES = {
    "UserStopped": "its stop button is pressed; release it when nothing is in the way",
    "Guiding": "a person guides it by hand",
    "Other": "unlock its joints and activate FCI in its Desk",
}
DOWNWARD = (1.0, 0.0, 0.0, 0.0)
"""The hand's direction, a quaternion (x, y, z, w)."""


class ArmError(RuntimeError):
    """The arm does not do what it is told, and why."""


class Reflex(ArmError):
    """It has stopped by itself."""


class Arm:
    """A connection to an arm: sends the hand to places in the box, in the arm's own time."""

    def __init__(self, settings: Settings, pressed: Callable[[], bool]) -> None:
        """``pressed``: whether the reader's stop button is, asked before and while it moves."""
        self._settings, self._pressed = settings, pressed
        self._robot: Any = None
        self._elbow: Any = None
        self._aim: np.ndarray | None = None
        """Where the hand was sent, unless it was stopped since."""

    @property
    def clock(self) -> float:
        """Milliseconds, of the arm."""
        with self._told():
            return 0.0 if self._robot is None else clock(self._robot.state)

    def home(self) -> Any:
        """Drive home; the state there, at rest."""
        if self._robot is None:
            self._robot = self._connected()
        with self._told():
            state = self._robot.state
        if mode(state) == "Reflex":
            self.recover()
        self._see(state, moves=False)
        self._aim = place(state)
        self.send(np.array(self._settings.home), elbow=self._elbow)
        longest = self._from_home(state) / self._settings.speed * 2 + HOMES_S
        latest = clock(state) + 1000 * longest
        while clock(state) < latest:
            state = self.until(clock(state) + 100)
            with self._told():
                moves = self._robot.is_in_control
            # It may not have begun.
            if not moves and self._from_home(state) < OUTSIDE_M:
                return self.until(clock(state) + RESTS_MS)
        raise ArmError(f"the arm is not at kwargs.home after {longest:.0f} s of its clock")

    def _from_home(self, state: Any) -> float:
        """Meters."""
        return float(np.linalg.norm(place(state) - np.array(self._settings.home)))

    def send(self, to: np.ndarray, elbow: Any = None) -> None:
        """Begin to drive the hand to a place ``[3]``, meters, where it is to rest, from whatever it
        does now, unless it is on its way there.

        Args:
            elbow: how the elbow is to be there.
        """
        import franky

        if self._aim is None:
            raise ArmError("the arm was stopped; it moves again after the next reset")
        if elbow is None and (self._aim == to).all():
            return
        pose = franky.RobotPose(franky.Affine(to, DOWNWARD), elbow)
        with self._told():
            self._see(self._robot.state, moves=elbow is None)
            self._robot.move(franky.CartesianMotion(pose), asynchronous=True)
        self._aim = np.array(to)

    def until(self, due: float) -> Any:
        """The arm's state when its clock is there.

        Raises:
            ArmError: it was stopped, has gone where it must not be, or its clock stands.
        """
        last, heard = -1.0, time.monotonic()
        while True:
            with self._told():
                self._robot.poll_motion()
                state = self._robot.state
            self._see(state)
            now = clock(state)
            if now >= due:
                return state
            if now != last:
                last, heard = now, time.monotonic()
            elif time.monotonic() > heard + SILENT_S:
                raise ArmError(f"the connection to {self._settings.host} is lost: its clock stands")
            # Half of what is left: also an arm whose clock goes twice as fast is seen in time.
            time.sleep(min(max(due - now, 1.0) / 2000, 0.02))

    def recover(self) -> None:
        """Ask the arm to forget why it stopped.

        Raises:
            ArmError: it does not.
        """
        import franky

        with self._told():
            # Where its state told of the reflex, what ended the motion is still to be asked for;
            # it would end the next one.
            with contextlib.suppress(franky.ControlException):
                self._robot.join_motion(SILENT_S)
            done = self._robot.recover_from_errors()
        if not done:
            raise ArmError("the arm has stopped by itself and does not recover; see its Desk")
        self._aim = np.full(3, np.nan)

    def stop(self) -> None:
        self._aim, robot = None, self._robot
        if robot is not None:
            with contextlib.suppress(Exception):
                robot.stop()
            with contextlib.suppress(Exception):
                robot.join_motion(SILENT_S)

    def close(self) -> None:
        self.stop()
        self._robot = None

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the arm on whatever goes wrong inside, an interruption included; a connection is
        given up."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _see(self, state: Any, moves: bool = True) -> None:
        """See that the arm may go on.

        Raises:
            ArmError: it may not.
        """
        if self._pressed():
            raise ArmError("kwargs.reader: its stop button is pressed")
        if (now := mode(state)) == "Reflex" and moves:
            raise Reflex(f"the arm has stopped by itself: {state.last_motion_errors}")
        if now not in ("Idle", "Move", "Reflex"):
            raise ArmError(f"the arm is in mode {now}; {MODES.get(now, 'see its Desk')}")
        low, high = np.array(self._settings.box)
        at = place(state)
        if ((at < low - OUTSIDE_M) | (at > high + OUTSIDE_M)).any():
            where = f"the hand is at {at.round(3).tolist()}, outside of kwargs.box"
            raise ArmError(f"{where}; put it inside by hand, or look whether the box is right")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What franky raises, as ours."""
        import franky

        try:
            yield
        except (franky.ControlException, franky.CommandException) as error:
            state = self._state()
            if state is not None:
                self._see(state, moves=False)
            raise Reflex(f"the arm has stopped by itself: {error}") from None
        except (franky.NetworkException, franky.ProtocolException) as error:
            raise ArmError(f"the connection to {self._settings.host} is lost: {error}") from None
        except RuntimeError as error:
            if isinstance(error, ArmError):
                raise
            # franky has no type for what its generator of trajectories and its network library say.
            if self._state() is None:
                text = f"the connection to {self._settings.host} is lost: {error}"
                raise ArmError(text) from None
            raise Reflex(f"the arm has stopped by itself: {error}") from None

    def _state(self) -> Any:
        try:
            return self._robot.state
        except Exception:  # there is no other sign of a connection that is lost
            return None

    def _connected(self) -> Any:
        """A connection, with the limits of speed.

        Raises:
            ArmError: there is none within :data:`CONNECTS_S`.
        """
        import franky

        settings, found = self._settings, list[Any]()
        config = franky.RealtimeConfig

        def connect() -> None:
            try:
                robot = franky.Robot(
                    settings.host,
                    default_torque_threshold=settings.torque_nm,
                    default_force_threshold=settings.force_n,
                    realtime_config=config.Enforce if settings.realtime else config.Ignore,
                )
            except Exception as error:  # whatever it is, it is told
                found.append(error)
            else:
                found.append(robot)

        latest = time.monotonic() + CONNECTS_S
        while True:
            # Where another program has the arm, this waits for ever.
            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            thread.join(max(latest - time.monotonic(), 0.0))
            if not found:
                raise ArmError(
                    f"kwargs.host: {settings.host} does not answer for {CONNECTS_S:g} s; another "
                    "program may be connected to it"
                )
            if isinstance(found[-1], franky.Robot):
                break
            if time.monotonic() + 1 > latest:
                real = isinstance(found[-1], franky.RealtimeException)
                key = "kwargs.realtime" if real else "kwargs.host"
                raise ArmError(f"{key}: cannot connect to {settings.host}: {found[-1]}")
            time.sleep(0.5)
        robot, fastest = found[-1], settings.speed / np.sqrt(3)
        for name, speed in (("translation", fastest), ("rotation", TURNS), ("elbow", TURNS)):
            accelerates = speed / ACCELERATES_S
            getattr(robot, f"{name}_velocity_limit").set(speed)
            getattr(robot, f"{name}_acceleration_limit").set(accelerates)
            getattr(robot, f"{name}_jerk_limit").set(accelerates / JERKS_S)
        self._elbow = robot.state.elbow
        return robot


def clock(state: Any) -> float:
    """Milliseconds."""
    return float(state.time.to_msec())


def place(state: Any) -> np.ndarray:
    """Of the hand, meters, float64 ``[3]``."""
    return np.array(state.O_T_EE.translation, np.float64).reshape(3)


def mode(state: Any) -> str:
    return str(state.robot_mode.name)
