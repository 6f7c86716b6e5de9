"""A worker of an elastic pool: it collects the starts it is given and sends what comes of them.

It keeps nothing but the engine and the environment, so it can begin and end at any time. What it
has sent when it dies counts; the rest of its starts others do.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname
from typing import Any

from rlinf.config import RunConfig
from rlinf.errors import EXIT_REQUEUE, InputFailed, RequeueRequested, RlinfError
from rlinf.trainers.world import World
from stages.activity import Activity
from stages.context import Context, Input
from stages.inbox import Outbox
from stages.rollout import collected
from stages.runner import withdrawing

log = logging.getLogger("rlinf")


class Generator:
    """Does claims one after the other, and other work between them, in a thread of its own."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        outbox: Outbox,
        resident: dict[str, Any],
        activity: Activity,
        report: Callable[[dict[str, Any]], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._outbox, self._resident = run, config, outbox, resident
        self._activity, self._report, self._stopping = activity, report, stopping
        self._thread = ThreadPoolExecutor(1, "generate")
        self._waiting: set[str] = set()
        """Claims that are to be done; one that is dropped is not."""

    def claim(self, order: Mapping[str, Any]) -> None:
        """Do a claim after those that came before it."""
        self._waiting.add(str(order["claim"]))
        self._thread.submit(self._do, order)

    def drop(self) -> None:
        """Nobody wants the claims of until now any more."""
        self._waiting.clear()

    def submit(self, work: Callable[[], None]) -> None:
        """Do something else with the engine."""
        self._thread.submit(work)

    def close(self) -> None:
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, order: Mapping[str, Any]) -> None:
        claim, code, reason, spans = str(order["claim"]), 0, "", []
        if claim not in self._waiting:
            return
        ctx = self._context(order, lambda: self._stopping() or claim not in self._waiting)
        node = str(order["node"])
        self._activity.ordered(node, ctx.stage)
        self._activity.begins(node, lambda: ctx.doing)
        try:
            with withdrawing(ctx.world):
                self._send(ctx, order)
            spans = [[s["name"], s["start"], s["end"]] for s in ctx.spans]
        except (RequeueRequested, InputFailed) as error:
            code, reason = EXIT_REQUEUE, str(error)
        except RlinfError as error:
            code, reason = error.exit_code, str(error)
        except BaseException as error:
            code, reason = 1, "".join(traceback.format_exception(error))
        self._activity.ended(node)
        if code:
            log.warning("%s, claim %s: %s", node, claim, reason)
        if claim in self._waiting:
            self._waiting.discard(claim)
            said = {"code": code, "reason": reason[-8000:], "spans": spans, "host": gethostname()}
            self._report({"claim": claim, **said})

    def _send(self, ctx: Context, order: Mapping[str, Any]) -> None:
        """
        Raises:
            InputFailed: who gathers the trajectories no longer takes them.
        """
        to = str(order["to"])
        sender = self._outbox.writer(f"{order['out']}:trajectories", [to], 0, 1)
        total = len(order["starts"]) * self._config.rollout.group_size
        for done, trajectory in enumerate(collected(ctx, order["starts"]), 1):
            sender.put(trajectory, weight=len(trajectory))
            ctx.progress(done, total, "samples")
        if not sender.flush():
            raise InputFailed(f"{to} did not take all trajectories")

    def _context(self, order: Mapping[str, Any], stopping: Callable[[], bool]) -> Context:
        out = self._run / str(order["out"])
        weights = Input(self._run / str(order["weights"]), None, None, stopping)
        return Context(
            config=self._config,
            stage="rollout",
            iteration=int(order["iteration"]),
            run=self._run,
            out=out,
            data=out,
            world=World(),
            inputs={"weights": weights},
            resident=self._resident,
            stopping=stopping,
        )
