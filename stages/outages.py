"""Outages of tools in a batch of dialogues: how many there were, and how many are too many.

A dialogue that an outage ended trains nothing, so that what is learnt does not depend on it. Only
its absence does, which is why a batch that lost too many fails.
"""

from __future__ import annotations

from collections import Counter

from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.envs.dialogue import TOOL_COUNTS, DialogueConfig, is_failed
from rlinf.errors import StageError
from stages.context import Context
from stages.parts import environment_class


class Outages:
    """Counts over the trajectories of a stage; of other tasks than dialogues there are none."""

    def __init__(self, config: RunConfig) -> None:
        _, options = environment_class(config)
        self._options = options if isinstance(options, DialogueConfig) else None
        self._samples = self._failed = 0
        self._counts = Counter[str]()

    def add(self, trajectory: Record) -> None:
        """Count one trajectory."""
        if self._options is None:
            return
        self._samples += 1
        self._failed += is_failed(trajectory)
        for name in TOOL_COUNTS:
            self._counts[name] += int(trajectory.info[name])

    def record(self, ctx: Context) -> None:
        """Write the metrics ``tool_errors``, ``tool_retries`` (sums) and ``failed_share``.

        Raises:
            StageError: more than ``task.max_failed_share`` of the dialogues were lost.
        """
        if self._options is None or not self._samples:
            return
        for name in TOOL_COUNTS:
            ctx.metric(name, self._counts[name], weight=0)
        ctx.metric("failed_share", self._failed / self._samples, weight=self._samples)
        most = self._options.max_failed_share
        if self._failed > most * self._samples:
            raise StageError(
                f"{self._failed} of {self._samples} dialogues failed, more than "
                f"task.max_failed_share={most:g}; the log names what each raised. Mend the tool, "
                "and let it raise rlinf.envs.dialogue.ToolInputError where the policy is at fault"
            )
