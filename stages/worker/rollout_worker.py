"""Rollout workers: generate the starts of a work item and send the trajectories.

A work item is some of the starts of a rollout. A rollout worker keeps only its engine and
environment, so it can start and stop at any time. If it is lost, the trajectories that it has sent
are kept, and other workers generate the remaining starts. A worker that must run other stages can
pass the last, long samples of a work item to another worker, the *successor*.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from socket import gethostname

from rlinf.artifacts import read_manifest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import UNFINISHED
from rlinf.errors import EXIT_REQUEUE, RequeueRequested, UpstreamFailed
from rlinf.user_code import exit_code_and_message
from stages.context import StageContext, StageInput
from stages.device_schedule import DeviceSchedule
from stages.factory import WEIGHTS
from stages.layout import WORK_ITEM, partial_samples_channel
from stages.live_store import LiveOutput, LiveStore
from stages.rollout import generate_trajectories
from stages.runner import withdraw_on_damage
from stages.worker.messages import GenerateStarts, WorkItemEnded
from stages.worker.record_transfer import SOURCE_ATTEMPT, RecordSender
from stages.worker_state import ActivityTracker, WorkerState

REASSIGN_FRACTION = 0.25
"""A work item passes to its successor once at most this share of its samples is unfinished."""
log = logging.getLogger("rlinf")


class RolloutWorker:
    """A thread that processes work items in order, the earliest iteration first.

    Work items use the device while the worker's stages wait for inputs.

    Args:
        report: sends a report to the driver.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        store: LiveStore,
        sender: RecordSender,
        schedule: DeviceSchedule,
        worker_state: WorkerState,
        activity: ActivityTracker,
        report: Callable[[WorkItemEnded], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._worker_state = run, config, worker_state
        self._live_store, self._record_sender, self._schedule = store, sender, schedule
        self._activity, self._report, self._should_stop = activity, report, should_stop
        self._thread = ThreadPoolExecutor(1, "generate")
        self._items: set[str] = set()
        """Queued and running work items that were not cancelled."""
        self._queue: list[GenerateStarts] = []
        """Work items that have not begun."""
        self._lock = threading.Lock()
        self._successors: dict[str, str] = {}
        """The successor of each running work item that will be reassigned."""

    def enqueue(self, order: GenerateStarts) -> None:
        """Add a work item to the queue."""
        with self._lock:
            self._items.add(order.work_item)
            self._queue.append(order)
        self._thread.submit(self._process_next)

    def reassign(self, work_item: str, successor: str) -> None:
        """Pass a running work item to a successor once few samples are unfinished.

        A queued work item is returned to the driver at once, with all its starts unfinished.
        """
        with self._lock:
            queued = [order for order in self._queue if order.work_item == work_item]
            self._queue = [order for order in self._queue if order.work_item != work_item]
            if not queued and work_item in self._items:
                self._successors[work_item] = successor
        for order in queued:
            starts = order.starts
            self._report_end(
                WorkItemEnded(work_item=work_item, host=gethostname(), unfinished_starts=starts)
            )

    def cancel(self) -> None:
        """Cancel all queued and running work items."""
        self._items.clear()

    def submit(self, work: Callable[[], None]) -> None:
        """Run other work in the thread of the engine."""
        self._thread.submit(work)

    def close(self) -> None:
        self.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _process_next(self) -> None:
        """Process the queued work item of the earliest iteration once all stages wait."""
        with self._schedule.idle_time():
            with self._lock:
                if not self._queue:
                    return
                order = min(self._queue, key=lambda order: order.iteration)
                self._queue.remove(order)
            if order.work_item in self._items:
                self._process(order)

    def _process(self, order: GenerateStarts) -> None:
        work_item, code, reason = order.work_item, 0, ""
        spans: tuple[tuple[str, float, float], ...] = ()
        unfinished, successor = list[Trajectory](), ""
        ctx = self._context(order, lambda: self._should_stop() or work_item not in self._items)
        name = order.label
        self._activity.add(name, ctx.stage)
        try:
            with withdraw_on_damage():
                self._activity.start(name, lambda: ctx.activity)
                unfinished, successor = self._generate(ctx, order)
            spans = tuple((s["name"], s["start"], s["end"]) for s in ctx.spans)
        except (RequeueRequested, UpstreamFailed) as error:
            code, reason = EXIT_REQUEUE, str(error)
        except BaseException as error:
            code, reason = exit_code_and_message(error)
        ctx.release()
        self._activity.remove(name)
        self._successors.pop(work_item, None)
        if code:
            log.warning("%s: %s", name, reason)
        size = self._config.rollout.group_size
        self._report_end(
            WorkItemEnded(
                work_item=work_item,
                host=gethostname(),
                exit_code=code,
                reason=reason[-8000:],
                spans=spans,
                unfinished_starts=tuple(sorted({r.identity.sample // size for r in unfinished})),
                successor=successor,
                num_partial_samples=len(unfinished) if successor else 0,
                used_disk_fallback=ctx.inputs["weights"].used_disk_fallback,
            )
        )

    def _report_end(self, report: WorkItemEnded) -> None:
        """Report the end of a work item, unless it was cancelled before it was completed.

        A completed work item may count as cancelled, because its last sample may end the rollout,
        which cancels all work items.
        """
        completed = not report.exit_code and bool(report.spans)
        if report.work_item in self._items or completed:
            self._items.discard(report.work_item)
            self._report(report)

    def _generate(self, ctx: StageContext, order: GenerateStarts) -> tuple[list[Trajectory], str]:
        """Generate the trajectories and send them to the receiver.

        Returns:
            The unfinished samples, and the successor that received them, if any.

        Raises:
            UpstreamFailed: the receiver is lost, or the weights are neither live nor committed.
        """
        self._use_weights(ctx, order)
        # The receiver checks later whether these weights were committed.
        source_info = (
            {} if order.weights_attempt is None else {SOURCE_ATTEMPT: order.weights_attempt}
        )
        receiver, work_item, out = order.receiver, order.work_item, order.output
        sender = self._record_sender.stream_to(f"{out}:trajectories", [receiver], 0, 1)
        total, partial_samples = len(order.starts) * self._config.rollout.group_size, None
        if order.partial:
            channel, total = order.partial.channel, order.partial.num_samples
            output = self._live_store.output(out)
            records = output.iter_records(channel, total, ctx.should_stop)
            partial_samples = {r.identity.sample: Trajectory.from_record(r) for r in records}
            output.drop_stream(channel)

        def should_abort(remaining: int, num_samples: int) -> bool:
            return work_item in self._successors and remaining <= REASSIGN_FRACTION * num_samples

        unfinished = []
        for num_done, trajectory in enumerate(
            generate_trajectories(ctx, order.starts, partial_samples, should_abort), 1
        ):
            if trajectory.stop_reason == UNFINISHED:
                unfinished.append(trajectory)
            else:
                marked = replace(trajectory, extra={**trajectory.extra, **source_info})
                sender.put(marked.to_record())
                ctx.report_progress(num_done, total, "samples")
        if not sender.flush():
            raise UpstreamFailed(f"{receiver} did not receive all trajectories")
        if not unfinished:
            return [], ""
        successor = self._successors[work_item]
        sender = self._record_sender.stream_to(
            f"{out}:{partial_samples_channel(work_item)}", [successor], 0, 1
        )
        for trajectory in unfinished:
            sender.put(trajectory.to_record())
        return unfinished, successor if sender.flush() else ""

    def _use_weights(self, ctx: StageContext, order: GenerateStarts) -> None:
        """Use the work item's weights from the live store, or else from the disk.

        This method must not wait for a commit, because this worker may be the one that must repeat
        the commit if it fails.

        Raises:
            UpstreamFailed: the weights are neither in memory nor committed.
        """
        weights, folder = ctx.inputs["weights"], order.weights
        manifest = read_manifest(weights.folder)
        committed = None if manifest is None else manifest.data
        attempt = order.weights_attempt or committed
        if attempt is not None and ctx.worker_state.engine_weights is not None:
            output = self._live_store.output(folder)
            if (tensors := output.get_object(WEIGHTS, attempt)) is not None:
                weights.live_output = LiveOutput()
                weights.live_output.put_object(attempt, WEIGHTS, tensors)
                return
            weights.used_disk_fallback = order.weights_attempt is not None
        if manifest is None or order.weights_attempt not in (None, committed):
            source = f"by {attempt} " if attempt else ""
            raise UpstreamFailed(f"weights of {folder} {source}are neither in memory nor committed")
        # With a known manifest, reading does not wait, even if the manifest is withdrawn later.
        weights.known_manifest = manifest

    def _context(self, order: GenerateStarts, should_stop: Callable[[], bool]) -> StageContext:
        out = self._run / order.output
        weights = StageInput(self._run / order.weights, None, None, should_stop)
        return StageContext(
            config=self._config,
            stage=WORK_ITEM,
            iteration=order.iteration,
            run_folder=self._run,
            output_folder=out,
            data_folder=out,
            world=ProcessGroupInfo(),
            inputs={"weights": weights},
            worker_state=self._worker_state,
            should_stop=should_stop,
        )
