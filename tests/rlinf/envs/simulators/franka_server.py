"""Run under the interpreter of ``franka``, given an address: franky-sim's arm answers there in the
robot's own protocol, and does what it is told on standard input, a word a line.

While it moves, each of its milliseconds waits for the command that belongs to it. franky-sim itself
goes on without, as time does; where a busy machine keeps the client from its thousand commands a
second, it then sees jumps and starts the next motion at a velocity that nobody meant, which a real
arm refuses by a reflex.

``speed X``
    a millisecond of the arm takes so many of the clock; 0: as few as it can.
``reflex``, ``press``
    the arm has stopped by itself (what it hit is forgotten when it is asked to recover), or a
    person has pressed its button, which lasts until ``release``. franky-sim knows neither by
    itself; both end the motion by the answer that the protocol has for it.
``measure``
    prints since the last time, as JSON: the milliseconds, the least and the greatest coordinates of
    the hand, and its greatest speed over 10 ms.
"""

from __future__ import annotations

import collections
import json
import queue
import select
import sys
import threading
import time
from typing import Any

import numpy as np
from franky_sim import SimulationServer
from franky_sim import simulation_server as serving
from franky_sim.franka_robot_protocol import (
    AutomaticErrorRecoveryCommand,
    AutomaticErrorRecoveryStatus,
    BaseCommand,
    MoveStatus,
    RobotCommand,
    RobotMode,
)
from franky_sim.franka_robot_server import FrankaRobotServer
from franky_sim.mujoco_simulator import MujocoSimulator

SPEED_MS = 10
ANSWERS_S = 0.3


class Stopped(FrankaRobotServer):
    """An arm that may be stopped."""

    mode: RobotMode | None = None
    heard, talks = False, False
    """Whether the client has answered the last state, and any of this motion, whose first ones it
    only looks at."""

    def _handle_udp_command(self, data: bytes) -> None:
        self.heard = self.talks = True
        super()._handle_udp_command(data)

    def _pre_process_commands(self) -> None:
        # One that came while it was awaited is new in this millisecond.
        if not self.heard:
            super()._pre_process_commands()

    def _post_process_commands(self) -> None:
        super()._post_process_commands()
        self.heard = False

    def await_command(self) -> None:
        """Wait for the client, unless it says something else, or is gone."""
        latest = time.monotonic() + ANSWERS_S
        waits = self.current_motion_id and self.talks
        while waits and not self.heard and time.monotonic() < latest:
            self._process_udp_commands()
            if not self.heard and select.select([self._tcp_socket], [], [], 5e-5)[0]:
                break

    @property
    def robot_state(self) -> Any:
        found = super().robot_state
        return found if self.mode is None else found.replace(robot_mode=self.mode)

    def halt(self, mode: RobotMode, status: MoveStatus) -> None:
        self.mode, motion = mode, self.current_motion_id
        self.stop_motion(send_preemption_signal=False)
        if motion:
            BaseCommand.send_response(self._tcp_socket, RobotCommand.kMove, motion, status)
        self.reset_current_motion_id()

    def start_motion(self, *motion: Any) -> None:
        if self.mode is not None:
            raise ValueError("stopped")
        self.talks = False
        super().start_motion(*motion)


class Way:
    """Where the hand went."""

    def __init__(self) -> None:
        self._last: collections.deque[np.ndarray] = collections.deque(maxlen=SPEED_MS + 1)
        self._least, self._greatest, self._speed = np.full(3, np.inf), np.full(3, -np.inf), 0.0
        self._count = 0

    def add(self, place: np.ndarray) -> None:
        self._last.append(place)
        self._count += 1
        self._least = np.minimum(self._least, place)
        self._greatest = np.maximum(self._greatest, place)
        if len(self._last) > SPEED_MS:
            moved = float(np.linalg.norm(place - self._last[0]))
            self._speed = max(self._speed, moved * 1000 / SPEED_MS)

    @property
    def measured(self) -> dict[str, Any]:
        return {
            "ms": self._count,
            "least": self._least.tolist(),
            "greatest": self._greatest.tolist(),
            "speed": self._speed,
        }


def recover(command: AutomaticErrorRecoveryCommand, server: Stopped) -> None:
    if server.mode == RobotMode.kUserStopped:
        refused = AutomaticErrorRecoveryStatus.kCommandRejectedDueToActivatedSafetyFunctions
        command.reply(refused)
        return
    server.mode = None
    command.reply(AutomaticErrorRecoveryStatus.kSuccess)


def main() -> None:
    serving.FrankaRobotServer = Stopped
    AutomaticErrorRecoveryCommand.handle = recover
    values: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            values.put(line.split())

    with MujocoSimulator() as simulator:
        arm = simulator.add_robot()
        with SimulationServer(simulator, hostname_candidates=[sys.argv[1]]) as server:
            threading.Thread(target=listen, daemon=True).start()
            print("ready", flush=True)
            speed, way = 1.0, Way()
            while True:
                robot = server.robot_servers[0]
                server.run_once(speed)
                robot.await_command()
                way.add(np.array(arm.kinematics(arm.inner_state.q).translation))
                while not values.empty():
                    word, *value = values.get()
                    if word == "speed":
                        speed = float(value[0])
                    elif word == "reflex":
                        robot.halt(RobotMode.kReflex, MoveStatus.kReflexAborted)
                    elif word == "press":
                        safe = MoveStatus.kPreemptedDueToActivatedSafetyFunctions
                        robot.halt(RobotMode.kUserStopped, safe)
                    elif word == "release":
                        robot.mode = None
                    elif word == "measure":
                        print(json.dumps(way.measured), flush=True)
                        way = Way()


if __name__ == "__main__":
    main()
