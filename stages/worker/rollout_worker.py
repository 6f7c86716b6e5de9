"""Rollout workers: generate the trajectories of a work item's starts.

A work item is some of the starts of a rollout. The worker that collects the rollout fetches the
trajectories; a work item ends once it has all of them. A rollout worker keeps only its engine and
environment, so it can start and stop at any time. If it is lost, trajectories that were fetched
are kept, and other workers generate the remaining starts. A worker that must run other stages can
leave the last, long samples of a work item to another worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

from rlinf.artifacts import read_manifest
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.wire_format import encode_record
from rlinf.config import RunConfig
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import UNFINISHED
from rlinf.errors import EXIT_REQUEUE, DataError, RequeueRequested, UpstreamFailed
from rlinf.user_code import exit_code_and_message
from stages.context import StageContext, StageInput
from stages.device_schedule import DeviceSchedule
from stages.factory import WEIGHTS
from stages.layout import (
    CHANNELS_FOLDER,
    WORK_ITEM,
    partial_samples_channel,
    work_item_channel,
)
from stages.live_store import LiveOutput, LiveStore, StreamEnd
from stages.progress_watchdog import timeout_from_environment, watch_progress
from stages.rollout import generate_trajectories
from stages.runner import withdraw_on_damage
from stages.worker.messages import GenerateStarts, WorkItemEnded
from stages.worker.record_transfer import fetch_stream
from stages.worker_state import COMPUTING, ActivityTracker, WorkerState

REASSIGN_FRACTION = 0.25
"""A work item that is reassigned ends once at most this share of its samples is unfinished."""
FETCH_TIMEOUT_S = 60.0
"""Seconds without a request for a finished work item's trajectories after which it has failed."""
log = logging.getLogger("rlinf")


class RolloutWorker:
    """A thread that processes work items in order, the earliest iteration first.

    Work items use the device while the worker's stages wait for inputs.

    Args:
        report: sends a report to the driver.
        report_stall: sends the report of a work item whose process must end.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        store: LiveStore,
        schedule: DeviceSchedule,
        worker_state: WorkerState,
        activity: ActivityTracker,
        report: Callable[[WorkItemEnded], None],
        should_stop: Callable[[], bool],
        report_stall: Callable[[str, str], None] = lambda work_item, reason: None,
    ) -> None:
        self._run, self._config, self._worker_state = run, config, worker_state
        self._live_store, self._schedule = store, schedule
        self._activity, self._report, self._should_stop = activity, report, should_stop
        self._report_stall = report_stall
        self._thread = ThreadPoolExecutor(1, "generate")
        self._items: set[str] = set()
        """Queued and running work items that were not cancelled."""
        self._queue: list[GenerateStarts] = []
        """Work items that have not begun."""
        self._lock = threading.Lock()
        self._reassigned: set[str] = set()
        """Running work items whose last samples another worker will continue."""

    def enqueue(self, order: GenerateStarts) -> None:
        """Add a work item to the queue."""
        with self._lock:
            self._items.add(order.work_item)
            self._queue.append(order)
        self._thread.submit(self._process_next)

    def reassign(self, work_item: str) -> None:
        """End a running work item once few samples are unfinished, for another worker.

        A queued work item is returned to the driver at once, with all its starts unfinished.
        """
        with self._lock:
            queued = [order for order in self._queue if order.work_item == work_item]
            self._queue = [order for order in self._queue if order.work_item != work_item]
            if not queued and work_item in self._items:
                self._reassigned.add(work_item)
        for order in queued:
            self._drop_trajectories(order)
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
            self._drop_trajectories(order)

    def _drop_trajectories(self, order: GenerateStarts) -> None:
        output = self._live_store.output(order.output)
        output.drop_stream(work_item_channel(order.work_item))

    def _process(self, order: GenerateStarts) -> None:
        work_item, code, reason = order.work_item, 0, ""
        spans: tuple[tuple[str, float, float], ...] = ()
        unfinished = list[Trajectory]()
        ctx = self._context(order, lambda: self._should_stop() or work_item not in self._items)
        name = order.label
        self._activity.add(name, ctx.stage)
        try:
            watch = watch_progress(
                name,
                timeout_from_environment(),
                lambda: ctx.activity != COMPUTING,
                report=lambda reason: self._report_stall(work_item, reason),
            )
            with withdraw_on_damage(), watch:
                self._activity.start(name, lambda: ctx.activity)
                unfinished = self._generate(ctx, order)
            spans = tuple((s["name"], s["start"], s["end"]) for s in ctx.spans)
        except (RequeueRequested, UpstreamFailed) as error:
            code, reason = EXIT_REQUEUE, str(error)
        except BaseException as error:
            code, reason = exit_code_and_message(error)
        ctx.release()
        self._activity.remove(name)
        self._reassigned.discard(work_item)
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
                num_partial_samples=len(unfinished),
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

    def _generate(self, ctx: StageContext, order: GenerateStarts) -> list[Trajectory]:
        """Generate the trajectories and wait until the receiver has fetched them.

        Returns:
            The unfinished samples, which another worker may fetch.

        Raises:
            UpstreamFailed: the receiver or the worker that began the samples is lost, or the
                weights are neither live nor committed.
            RequeueRequested: the worker must stop.
            DataError: a trajectory cannot be sent.
        """
        self._use_weights(ctx, order)
        work_item, output = order.work_item, self._live_store.output(order.output)
        total, partial_samples = len(order.starts) * self._config.rollout.group_size, None
        if order.partial:
            total, partial_samples = order.partial.num_samples, self._fetch_partial(ctx, order)

        def should_abort(remaining: int, num_samples: int) -> bool:
            return work_item in self._reassigned and remaining <= REASSIGN_FRACTION * num_samples

        unfinished = []
        stream, num_done = output.stream(work_item_channel(work_item)), 0
        for trajectory in generate_trajectories(ctx, order.starts, partial_samples, should_abort):
            if trajectory.stop_reason == UNFINISHED:
                unfinished.append(trajectory)
            else:
                record = trajectory.to_record()
                encode_record(record)  # raises here if it cannot be sent to the receiver
                stream.put(record)
                num_done += 1
                ctx.report_progress(num_done, total, "samples")
        stream.finish(StreamEnd(num_done))
        # A work item may be cancelled because its last sample has ended the rollout.
        if order.starts and not stream.wait_until_fetched(ctx.should_stop, FETCH_TIMEOUT_S):
            if self._should_stop():
                raise RequeueRequested("stopping while the trajectories are fetched")
            if work_item in self._items:
                raise UpstreamFailed(f"{order.receiver} has not fetched all trajectories")
        if unfinished:
            partial_stream = output.stream(partial_samples_channel(work_item))
            for trajectory in unfinished:
                partial_stream.put(trajectory.to_record())
            partial_stream.finish(StreamEnd(len(unfinished)))
        return unfinished

    def _fetch_partial(self, ctx: StageContext, order: GenerateStarts) -> dict[int, Trajectory]:
        """Return the samples that another worker began, by number.

        Raises:
            UpstreamFailed: that worker is lost.
        """
        assert order.partial is not None
        worker, channel = order.partial.worker, order.partial.channel
        folder = self._run / CHANNELS_FOLDER
        try:
            records = fetch_stream(folder, worker, order.output, channel, ctx.should_stop)
        except (ChannelFailed, DataError) as error:
            raise UpstreamFailed(f"no unfinished samples from {worker}: {error}") from None
        return {record.identity.sample: Trajectory.from_record(record) for record in records}

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
