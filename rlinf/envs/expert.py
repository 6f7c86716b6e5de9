"""Demonstrations of a simulator's own expert."""

from __future__ import annotations

import numpy as np

from rlinf.data.record import Identity, Record
from rlinf.envs.loop import COLUMN_OF, typed
from rlinf.envs.processes import Process
from rlinf.envs.seen import Refused, seen_in
from rlinf.envs.simulator import Worlds
from rlinf.errors import ConfigError
from rlinf.seeding import generator

MOST = 1000
"""Steps of an episode."""


def demonstrated(
    worlds: Worlds | Process, seed: int, count: int, instruction: bool | str
) -> list[Record]:
    """Episodes from ``count`` starts, each to its first success; unsolved ones are left out.

    Raises:
        ConfigError: the simulator has no expert, or it solves nothing.
    """
    episodes = []
    for number in range(count):
        begin = int(generator(seed, "demonstration", number).integers(2**31))
        try:
            came = worlds.demonstrate(begin, MOST)
        except Refused as error:
            raise ConfigError(str(error)) from None
        if not came["success"][-1]:
            continue
        rows = [
            typed({name: column[t] for name, column in seen_in(came).items()}, instruction)
            for t in range(len(came["success"]))
        ]
        steps = {
            COLUMN_OF.get(name, name): np.stack([row[name] for row in rows]) for name in rows[0]
        }
        actions = came["action"]
        if actions.dtype.kind == "f":
            actions = actions.astype(np.float32)
        steps |= {"actions": actions, "rewards": came["reward"].astype(np.float32)}
        episodes.append(Record(Identity(0, number), steps))
    if not episodes:
        raise ConfigError(
            f"task.demonstrations: the simulator's expert solved none of {count} episodes; ask for "
            "more, or set it to 0"
        )
    return episodes
