"""``python -m stages.worker.main``: one resident worker of a pool.

The worker receives orders from the run's driver, schedules its stages on the device, and commits
the output of a stage while the next stage computes. Its stages share records and weights in memory,
and other workers fetch both from it. Data that is not in memory is read from disk, so a worker can
start, stop or be replaced at any time.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlinf import process_tuning, shared_memory
from rlinf.artifacts import DATA_PREFIX, MANIFEST
from rlinf.channels.channel import ChannelFailed
from rlinf.channels.control_link import WorkerLink
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.channels.requests import Request, RequestServer
from rlinf.config import RunConfig
from rlinf.errors import (
    EXIT_NO_PROGRESS,
    EXIT_REQUEUE,
    RlinfError,
    exception_line,
    translate_resource_errors,
)
from rlinf.user_code import exit_code_and_message, translate_user_errors
from slurm.stop_signals import StopFlag, seconds_until_stop
from stages.context import LiveContext, StageInput
from stages.device_schedule import DeviceSchedule, DeviceSlot, Unscheduled
from stages.factory import WEIGHTS, weight_sync_dtype
from stages.layout import CHANNELS_FOLDER, CONFIG_FILE, worker_name, worker_pointer
from stages.live_store import LiveOutput, LiveStore
from stages.rank_reports import AttemptRanks
from stages.runner import StageAttempt, StageCall, load_config, withdraw_on_damage
from stages.weight_deltas import WeightDeltas
from stages.worker.messages import (
    AttemptEnded,
    CancelWork,
    CollectedStarts,
    FetchOutput,
    FetchWeights,
    GenerateStarts,
    ReassignWork,
    RunStages,
    ServePolicy,
    ShutDown,
    StageOrder,
    WeightsAvailable,
    WorkerOrder,
    WorkerReport,
    WorkItemEnded,
    read_order,
)
from stages.worker.policy_client import PolicyClients
from stages.worker.policy_server import PolicyServer
from stages.worker.record_transfer import RECORDS, Fetcher, RecordFetch, RecordServer
from stages.worker.rollout_worker import RolloutWorker
from stages.worker.weight_transfer import WeightPublisher, WeightReceiver
from stages.worker_state import ActivityTracker, WorkerState

STATUS_INTERVAL_S = 1.0
"""Seconds between two reports of the status to the driver."""
STOP_GRACE_S, SHUTDOWN_GRACE_S = 30.0, 5.0
"""Seconds for running work to end: after a signal of Slurm, and after an order to shut down."""
STALL_REPORT_S = 1.0
"""Seconds for the last report of a process that must end at once."""
COMMIT_DELAY_S = 0.1
"""Delay of a commit, so that it does not compete with the start of the next stage: both are mostly
Python code."""
log = logging.getLogger("rlinf")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the driver shuts the worker down (exit code 0) or Slurm stops it (75)."""
    process_tuning.tune_process()
    shared_memory.remove_orphaned_segments()
    parser = argparse.ArgumentParser(prog="python -m stages.worker.main", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--name", required=True, help="name of the pool")
    parser.add_argument(
        "--uncast", action="store_true", help="send weights in the dtype of the trainer"
    )
    parser.add_argument("--deltas", action="store_true", help="write and read weights as deltas")
    parser.add_argument(
        "--orphan-s", type=float, default=600.0, help="exit after this time without a driver"
    )
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    # kill -QUIT writes the stack of a hanging worker to its log.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        config = load_config(arguments.run / CONFIG_FILE)
        with translate_resource_errors(), StopFlag() as stop, translate_user_errors():
            worker = PoolWorker(
                arguments.run,
                config,
                arguments.name,
                stop,
                uncast=arguments.uncast,
                deltas=arguments.deltas,
            )
            return worker.serve(arguments.orphan_s)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


class PoolWorker:
    """One resident worker of a pool; see the module docstring.

    Args:
        pool: the name of the pool.
        uncast: send weights in the trainer's dtype instead of the engine's.
        deltas: write and read weights as deltas.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        pool: str,
        stop: StopFlag,
        *,
        uncast: bool,
        deltas: bool,
    ) -> None:
        self._run, self._config, self._stop = run, config, stop
        self._world = ProcessGroupInfo.from_environment(run / CHANNELS_FOLDER)
        self._name = worker_name(pool, self._world.rank)
        dtype = None if uncast else weight_sync_dtype(config)
        weight_deltas = WeightDeltas(dtype) if deltas else None
        self._worker_state = WorkerState(on_progress=self._on_progress, weight_deltas=weight_deltas)
        self._live_store, self._schedule = LiveStore(), DeviceSchedule()
        self._activity = ActivityTracker()
        self._stage_threads: dict[str, threading.Thread] = {}
        """Threads of running stages, by node."""
        self._computed: set[str] = set()
        """Nodes whose stages have computed but are not committed."""
        self._leaving_event = threading.Event()
        """Set when the worker shuts down."""
        self._last_progress = time.monotonic()
        """When any stage last made progress (monotonic, s)."""
        self._lock = threading.Lock()
        channels = run / CHANNELS_FOLDER
        self._record_server = RecordServer(self._live_store)
        self._publisher = WeightPublisher(channels, self._name, dtype)
        self._fetcher = Fetcher(channels)
        self._weight_receiver = WeightReceiver(
            channels, self._name, self._live_store, config.rollout.staleness, self._report_weights
        )
        self._rollout_worker = RolloutWorker(
            run,
            config,
            self._live_store,
            self._schedule,
            self._worker_state,
            self._activity,
            self._report_work_item_end,
            self._should_stop,
            self._report_stall,
        )
        shared = (self._live_store, self._schedule, self._worker_state, self._activity)
        self._policy_server = PolicyServer(run, config, self._name, *shared, self._should_stop)
        self._policy_clients = PolicyClients(channels, self._name)
        self._server = RequestServer(worker_pointer(channels, self._name), self._handle_request)
        remaining_s = seconds_until_stop()
        description = {
            "pool": pool,
            "rank": self._world.rank,
            "ranks": self._world.size,
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "host": os.uname().nodename,
            "ends": None if remaining_s is None else time.time() + remaining_s,
        }
        self._link = WorkerLink(channels, self._name, description)

    def serve(self, orphan_s: float) -> int:
        """Execute the driver's orders; return the exit code."""
        exit_code, last_status, commit_timeout_s = 0, 0.0, 0.0
        try:
            while not self._stop.is_set():
                if time.monotonic() - last_status > STATUS_INTERVAL_S:
                    last_status = time.monotonic()
                    self._update_status()
                if self._link.silent_s > orphan_s and self._is_idle(orphan_s):
                    log.warning("no driver for %.0f s: leaving", orphan_s)
                    break
                orders = [read_order(content) for content in self._link.receive_orders(0.2)]
                shut_down = next((order for order in orders if isinstance(order, ShutDown)), None)
                if shut_down is not None:
                    commit_timeout_s = shut_down.commit_timeout_s
                    break
                for order in orders:
                    self._execute(order)
            else:
                exit_code = EXIT_REQUEUE
        except ChannelFailed as error:
            log.warning("this worker cannot continue: %s", error)
            exit_code = 1
        self._shut_down(exit_code, commit_timeout_s)
        return exit_code

    def _execute(self, order: WorkerOrder) -> None:
        match order:
            case RunStages():
                # Reserve all slots before any stage begins, so that all ranks use the same order.
                for stage, thread in [(stage, self._add_stage(stage)) for stage in order.stages]:
                    if thread is not None and stage.in_engine_thread:
                        self._rollout_worker.submit(thread.run)
                    elif thread is not None:
                        thread.start()
            case FetchOutput():
                for worker in order.producers:
                    self._fetcher.add(worker, RecordFetch(order, worker, self._live_store))
            case FetchWeights():
                self._fetcher.add(order.producer, self._weight_receiver.create_fetch(order))
            case ServePolicy():
                self._policy_server.serve(order)
            case AttemptEnded():
                self._policy_server.end_attempt(order)
                self._policy_clients.end_attempt(order)
            case GenerateStarts():
                self._rollout_worker.enqueue(order)
            case ReassignWork():
                self._rollout_worker.reassign(order.work_item)
            case CancelWork():
                self._rollout_worker.cancel()

    def _is_idle(self, seconds: float) -> bool:
        """Return whether no stage runs, or none has made progress for ``seconds``."""
        has_work = self._stage_threads or self._policy_server.is_busy
        return not has_work or time.monotonic() - self._last_progress > seconds

    def _should_stop(self) -> bool:
        return self._stop.is_set() or self._leaving_event.is_set()

    def _shut_down(self, exit_code: int, commit_timeout_s: float) -> None:
        """Wait a short time for running work to end; for commits, up to ``commit_timeout_s``.

        A stage that still computes does not get ``commit_timeout_s``: it may wait for the commit of
        an input, and the worker that computes the input may be lost.
        """
        self._leaving_event.set()
        with self._lock:
            # A stage in the engine's thread has a thread object that is never started.
            running = {
                node: thread for node, thread in self._stage_threads.items() if thread.is_alive()
            }
        start = time.monotonic()
        grace_s = STOP_GRACE_S if exit_code == EXIT_REQUEUE else SHUTDOWN_GRACE_S
        for node, thread in running.items():
            while thread.is_alive():
                limit_s = max(grace_s, commit_timeout_s) if node in self._computed else grace_s
                if time.monotonic() - start > limit_s:
                    break
                thread.join(0.05)
        self._schedule.close()
        self._rollout_worker.close()
        self._policy_server.close()
        self._fetcher.close()
        self._publisher.close()
        self._weight_receiver.close()
        self._link.close()
        self._server.close()
        self._worker_state.close()

    def _handle_request(self, request: Request) -> None:
        """Handle a request of another worker."""
        if request.method == RECORDS:
            self._record_server.handle(request)
        elif request.method == WEIGHTS:
            self._publisher.handle(request)
        else:
            self._policy_server.handle(request)

    def _send_report(self, report: WorkerReport) -> None:
        self._link.send_report(report.to_dict())

    def _add_stage(self, order: StageOrder) -> threading.Thread | None:
        """Register a stage and reserve its slot; return its thread, or None if it already runs."""
        node = order.node
        if order.receives_trajectories:
            self._report_collected(order)
        with self._lock:
            if node in self._stage_threads:
                self._policy_clients.update_order(order)
                return None
            self._policy_clients.add(order, self._process_group_info(order).rank)
            is_unscheduled = order.receives_trajectories or order.in_engine_thread
            slot = Unscheduled() if is_unscheduled else self._schedule.add(order.position)
            thread = threading.Thread(
                target=self._run_stage, args=(order, slot), name=node, daemon=True
            )
            self._stage_threads[node] = thread
            self._last_progress = time.monotonic()
        live_inputs = [folder for folder, is_live in order.inputs.values() if is_live]
        self._live_store.pin(node, [order.output, *live_inputs])
        self._activity.add(node, order.stage)
        output = self._live_store.output(order.output)
        output.reset()
        self._update_status()
        return thread

    def _run_stage(self, order: StageOrder, slot: DeviceSlot | Unscheduled) -> None:
        output = self._live_store.output(order.output)
        try:
            # Heartbeats begin before the stage has its slot: other ranks may already compute.
            ranks = AttemptRanks(
                self._run / order.output / f"{DATA_PREFIX}{order.attempt}",
                self._process_group_info(order),
            )
            with withdraw_on_damage(), ranks.attempt_scope():
                with slot:
                    attempt = self._create_attempt(order, output, slot)
                    self._activity.start(order.node, lambda: attempt.ctx.activity)
                    with self._policy_clients.client_scope(order.node):
                        attempt.compute()
                    self._activity.mark_computed(order.node)
                    name = attempt.ctx.data_folder.name
                    output.mark_complete(name)
                    published = (order.output, name, order.iteration)
                    self._publisher.publish(*published, output.objects)
                    if WEIGHTS in output.objects:
                        self._report_weights(*published)
                    self._live_store.evict_objects(2 + self._config.rollout.staleness)
                    self._computed.add(order.node)
                time.sleep(COMMIT_DELAY_S)
                # Commit without the slot: an input's stage may have to run again in this worker.
                manifest = attempt.commit()
            if manifest.data != attempt.ctx.data_folder.name:
                log.warning("%s: another attempt was committed first", order.node)
            self._report_end(order, 0, "")
        except BaseException as error:
            slot.leave()
            self._report_failure(order, output, error)

    def _create_attempt(
        self, order: StageOrder, output: LiveOutput, slot: DeviceSlot | Unscheduled
    ) -> StageAttempt:
        world, out = self._process_group_info(order), order.output
        inputs = {}
        for name, (folder, live) in order.inputs.items():
            source = self._live_store.output(folder) if live else None
            inputs[name] = StageInput(self._run / folder, None, source, self._should_stop)

        now = time.time()
        return StageAttempt(
            StageCall(
                order.stage,
                self._run / CONFIG_FILE,
                self._run / out,
                order.iteration,
                {name: stage_input.folder for name, stage_input in inputs.items()},
            ),
            self._config,
            world,
            inputs,
            self._worker_state,
            self._should_stop,
            process_start=now,
            start=now,
            name=order.attempt,
            live=LiveContext(output, slot, order.num_chunks),
            worker=self._name,
            report_stall=lambda reason: self._report_stall(order.node, reason),
            receives_trajectories=order.receives_trajectories,
            remote_policy=self._policy_clients.get(order.node),
        )

    def _report_stall(self, node: str, reason: str) -> None:
        """Report a work item without progress to the driver, before this process ends."""
        report = WorkItemEnded(work_item=node, exit_code=EXIT_NO_PROGRESS, reason=reason)
        self._send_report(report)
        time.sleep(STALL_REPORT_S)

    def _process_group_info(self, order: StageOrder) -> ProcessGroupInfo:
        """Return this process's rank and layout in a stage."""
        ranks, pool = order.ranks, self._world
        if len(ranks) == 1:
            return ProcessGroupInfo()
        if len(ranks) == pool.size:
            return replace(pool, layout=ParallelLayout.parse(order.layout))
        # Some ranks compute another stage, so the process group of the pool cannot be used.
        speeds = pool.speed_weights and tuple(pool.speed_weights[rank] for rank in ranks)
        return ProcessGroupInfo(ranks.index(pool.rank), len(ranks), pool.local_rank, speeds)

    def _report_failure(self, order: StageOrder, output: LiveOutput, error: BaseException) -> None:
        node = order.node
        exit_code, reason = exit_code_and_message(error)
        output.fail(f"{node} failed: {exception_line(reason)}")
        log.warning("%s: %s", node, reason)
        self._report_end(order, exit_code, reason)

    def _report_end(self, order: StageOrder, exit_code: int, reason: str) -> None:
        node = order.node
        with self._lock:
            self._stage_threads.pop(node, None)
            self._computed.discard(node)
            self._live_store.unpin(node)
        self._last_progress = time.monotonic()
        self._activity.remove(node)
        self._send_report(WorkItemEnded(work_item=node, exit_code=exit_code, reason=reason[-8000:]))
        self._update_status()
        self._drop_committed()

    def _drop_committed(self) -> None:
        """Drop live outputs that are committed and that no running stage of this worker reads."""
        dropped = self._live_store.release_committed(self._is_committed)
        self._publisher.drop_outputs(dropped)
        self._fetcher.drop_outputs(dropped)

    def _is_committed(self, folder: str) -> bool:
        try:
            return (self._run / folder / MANIFEST).exists()
        except OSError:
            return False  # checked again when the next stage ends

    def _report_collected(self, order: StageOrder) -> None:
        """Report to the driver the starts of a rollout of which this worker has all samples."""
        size = self._config.rollout.group_size
        records = self._live_store.output(order.output).available_records("trajectories")
        count = Counter(record.identity.sample // size for record in records)
        collected = sorted(start for start, samples in count.items() if samples == size)
        self._send_report(CollectedStarts(node=order.node, starts=tuple(collected)))

    def _report_weights(self, out: str, attempt: str, iteration: int) -> None:
        self._send_report(WeightsAvailable(output=out, attempt=attempt, iteration=iteration))

    def _report_work_item_end(self, report: WorkItemEnded) -> None:
        self._send_report(report)
        self._drop_committed()

    def _on_progress(self, stage: str, done: int, total: int, unit: str, note: str) -> None:
        self._last_progress = time.monotonic()
        self._activity.update(stage, done, total, unit, note)
        self._update_status()

    def _update_status(self) -> None:
        engine = self._worker_state.engine
        self._link.send_status(
            {
                "active_stages": self._activity.rows(),
                "version": None if engine is None else engine.version,
                "queued_records": self._live_store.num_unread,
                "malformed": self._server.malformed,
            }
        )


if __name__ == "__main__":
    sys.exit(main())
