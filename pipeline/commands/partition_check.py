"""``rlinf doctor --partition``: short jobs that check partitions, and what their reports mean.

There is one job for each kind of device (:mod:`pipeline.planning.profile.device_kinds`), and all
jobs run at the same time. A job has two nodes and two processes per node where the partition has
them. Its processes run :mod:`pipeline.commands.node_probe`.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from launchers.launcher import JobSpec
from launchers.slurm_launcher import SlurmLauncher
from pipeline.commands.doctor import Finding
from pipeline.commands.node_probe import (
    DISK_CHECK,
    FILES_CHECK,
    GPU_CHECK,
    IS_VISIBLE,
    NODE_LINK,
    NODES_LINK,
    SERVER_FILE,
    SOCKET_CHECK,
    STAGES_CHECK,
    TIME,
    Link,
    ProbeTask,
    RankReport,
    partition_link,
)
from pipeline.console import create_console
from pipeline.plan import StagePlan, load_plan
from pipeline.planning.profile.device_kinds import DeviceKind, list_kinds, select_kinds
from pipeline.resources import ClusterConfig, job_resources, stage_interpreter
from pipeline.run import collect_provenance
from rlinf.artifacts import write_atomic
from rlinf.channels.requests import Request, RequestServer
from rlinf.config import RunConfig, validate
from rlinf.errors import EXIT_BAD_INPUT, ConfigError, PlanError, SlurmError
from rlinf.interpreters import set_interpreters
from slurm import gpus
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import Inventory
from slurm.job_limits import check_resources, cluster_limits_from_inventory
from slurm.jobs import JobResources, JobState, JobStatus
from slurm.site import SiteConfig, load_site
from stages.factory import create_algorithm
from stages.flow import flow_of
from stages.layout import CHANNELS_FOLDER, CONFIG_FILE

PROCESSES_PER_NODE, MAX_NODES = 2, 2
"""Size of a job where the partition has as much: a link within a node, and one between nodes."""
CPU_MEM_MB, GPU_MEM_MB, GPU_CPUS = 1500, 8000, 4
"""Memory per process without and with a GPU, MiB, and CPUs per process with a GPU."""
STUCK_TIMEOUT_S = 15.0
"""Seconds after which a job is cancelled whose pending reason never ends by itself."""
END_TIMEOUT_S = 20.0
"""Seconds in which the processes of a job must end after its first one has finished."""
MIN_MATRIX_SHARE = 0.5
"""Share of the data sheet's matrix rate below which a GPU is reported as slow."""
MIN_LINK_BYTES_PER_S = {
    ("nccl", NODE_LINK): 5e9,
    ("nccl", NODES_LINK): 2e9,
    ("gloo", NODE_LINK): 1e8,
    ("gloo", NODES_LINK): 1e8,
}
"""Bytes per second below which a link is reported as slow. Links between jobs are those of
nodes."""
MAX_IMPORT_S = 30.0
MAX_ROUND_TRIP_S, MAX_CLOCK_DIFFERENCE_S = 0.1, 1.0
MIN_FILE_BYTES_PER_S, MAX_VISIBLE_S = 5e7, 5.0
MIN_TEMPORARY_BYTES, MIN_SHARED_BYTES = 5 << 30, 1 << 30
"""Free bytes of the temporary folder and of ``/dev/shm``."""
GB, GIB = 1e9, 1 << 30
Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class PartitionOptions:
    """Options of ``rlinf doctor --partition``; see its ``--help``."""

    partitions: tuple[str, ...]
    folder: Path = Path("runs")
    site: Path | None = None
    minutes: float = 5.0
    words: tuple[str, ...] = ()
    """An experiment with overrides, whose first stages are tried; empty: none."""


@dataclass
class ProbeJob:
    """A job, its state and the reports of its processes."""

    kind: DeviceKind
    task: ProbeTask
    stage_plan: StagePlan
    status: JobStatus | None = None
    """The last known status; None: not submitted."""
    refusal: str = ""
    """Why there is no job, or "" if it was submitted."""
    interpreter: str | None = None
    """Python of the job; None: that of this process, or of the container."""
    reports: list[RankReport] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    """Findings from before the job."""


def check_partitions(options: PartitionOptions) -> list[Finding]:
    """Run a job on each kind of device of the partitions, and return the findings.

    Raises:
        PlanError: a partition does not exist, or the site file is invalid; nothing was written.
        ConfigError, DataError: the experiment is invalid.
        SlurmError: Slurm is not installed or does not answer.
    """
    client = SlurmClient()
    inventory = discover_inventory(client)
    cluster = cluster_of(options)
    site = load_site(cluster.site) if cluster.site else SiteConfig()
    if cluster.site:
        site.check_partitions(inventory.partitions, cluster.site)
        set_interpreters(site.interpreters)
    inventory = inventory.with_site_settings(site)
    kinds = select_kinds(list_kinds(inventory, site), options.partitions)
    parent = options.folder.expanduser().absolute()
    folder = parent / f".doctor-{secrets.token_hex(4)}"
    try:
        jobs = prepare_jobs(options, kinds, inventory, folder)
        with time_server(folder, cluster):
            run_jobs(jobs, cluster, client, inventory, options.minutes)
        findings = [finding for job in jobs for finding in job_findings(job, jobs)]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if any(finding.level == "fail" for finding in findings):
        findings.append(Finding("ok", "logs", f"{folder} (delete it when you have read them)"))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return findings


def cluster_of(options: PartitionOptions) -> ClusterConfig:
    """Return the cluster settings of the experiment, or the defaults, with the site file."""
    values: dict[str, object] = {}
    if options.words:
        from pipeline.commands.experiment import compose_words

        values.update(compose_words(options.words).get("cluster", {}))
    values["launcher"] = "slurm"
    if options.site is not None:
        values["site"] = str(options.site)
    return validate(ClusterConfig, values, "cluster")


def prepare_jobs(
    options: PartitionOptions, kinds: Sequence[DeviceKind], inventory: Inventory, folder: Path
) -> list[ProbeJob]:
    """Return a job per kind, with the frozen configuration of a run if there is an experiment."""
    jobs = []
    for number, kind in enumerate(kinds):
        stage_plan = job_request(kind, options.minutes, inventory)
        task = ProbeTask(
            folder=folder,
            job=number,
            num_jobs=len(kinds),
            tasks_per_node=stage_plan.processes,
            nodes=stage_plan.nodes,
            gpus_per_node=stage_plan.gpus,
        )
        job = ProbeJob(kind, task, stage_plan)
        if options.words:
            add_stages(job, options.words)
        jobs.append(job)
    return jobs


def job_request(kind: DeviceKind, minutes: float, inventory: Inventory) -> StagePlan:
    """Return the resources of the job on a kind: two nodes of two processes, or fewer."""
    nodes = min(MAX_NODES, kind.nodes)
    per_node = min(PROCESSES_PER_NODE, kind.devices_per_node)
    has_gpus = kind.gpus_per_node > 0
    if not has_gpus and nodes > 1:
        per_node = 1
    cpus = min(GPU_CPUS, kind.cpus_per_node // per_node) if has_gpus else 1
    mem_mb = per_node * (GPU_MEM_MB if has_gpus else CPU_MEM_MB)
    limit = inventory.partitions[kind.partition].time_limit_min
    # The job also ends if this process is killed.
    time_limit_min = math.ceil(minutes) + 1
    return StagePlan(
        partition=kind.partition,
        nodes=nodes,
        processes=per_node,
        gpus=per_node if has_gpus else 0,
        gpu_type=kind.gpu_type or None,
        constraint=kind.constraint or None,
        cpus=max(1, cpus),
        mem_mb=min(mem_mb, kind.mem_mb_per_node or mem_mb),
        time_limit_min=min(time_limit_min, limit or time_limit_min),
    )


def add_stages(job: ProbeJob, words: Sequence[str]) -> None:
    """Freeze the configuration of an experiment for a job, with a small batch.

    The job gets the CPUs and the memory that the plan gives to the training stage.

    Raises:
        ConfigError, DataError, PlanError: the experiment is invalid.
    """
    from pipeline.commands.experiment import compose_words, load_configuration, prepare_run

    config = load_configuration(words)
    flow = flow_of(config)
    stages = [name for name in flow.all_stages if name in {*flow.setup_stages, *flow.stages}]
    try:
        job.interpreter = stage_interpreter(config, flow, *stages)
    except ConfigError as error:
        text = f"not tried, because one job cannot run them: {error}"
        job.notes.append(Finding("warn", f"{job.kind.name}: {STAGES_CHECK}", text))
        return
    train = load_plan(config).stage_plan(flow.train_stage)
    max_cpus = max(1, job.kind.cpus_per_node // job.stage_plan.processes)
    update = {
        "cpus": min(train.cpus, max_cpus),
        "mem_mb": train.mem_mb or job.stage_plan.mem_mb,
    }
    job.stage_plan = job.stage_plan.model_copy(update=update)
    processes = job.stage_plan.nodes * job.stage_plan.processes
    size = smallest_batch(config, processes)
    # Plan and cluster of the run would place its stages; here they run in the processes of the job.
    own = [word for word in words if not re.match(r"[+~]*(plan|cluster|run)\b", word)]
    own += ["sft.max_steps=0", f"rollout.batch_size={size}", "log.trackers=[]"]
    own += [f"run.root={job.task.folder}", f"run.name=run-{job.task.job}"]
    run = prepare_run(compose_words(own))
    job.task = job.task.model_copy(update={"config": run.folder / CONFIG_FILE})


def smallest_batch(config: RunConfig, processes: int) -> int:
    """Return the run's batch size, halved while each process and minibatch still gets samples."""
    size, group_size = config.rollout.batch_size, config.rollout.group_size
    minibatches = create_algorithm(config).minibatches
    while (
        size % 2 == 0
        and size // 2 >= max(processes, minibatches)
        and not (size // 2 * group_size) % (minibatches * processes)
    ):
        size //= 2
    return size


@contextlib.contextmanager
def time_server(folder: Path, cluster: ClusterConfig) -> Iterator[None]:
    """Answer the requests of the jobs: the time here, and whether a file is visible here."""
    channels = folder / CHANNELS_FOLDER

    def handle(request: Request) -> None:
        if request.method == TIME:
            request.reply({"time": time.time()})
        elif request.method == IS_VISIBLE:
            request.reply({"visible": (folder / str(request.arguments["name"])).exists()})
        else:
            request.reject(f"unknown method {request.method!r}")

    channels.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = RequestServer(channels / SERVER_FILE, handle, interface=cluster.network_interface)
    try:
        yield
    finally:
        server.close()


def run_jobs(
    jobs: Sequence[ProbeJob],
    cluster: ClusterConfig,
    client: SlurmClient,
    inventory: Inventory,
    minutes: float,
) -> None:
    """Submit all jobs, wait for their ends or the deadline, and read their reports.

    Jobs that have not ended are cancelled.
    """
    launcher = SlurmLauncher(
        client, cluster_limits_from_inventory(inventory), stuck_timeout_s=STUCK_TIMEOUT_S
    )
    deadline = time.monotonic() + 60 * minutes
    active: dict[str, ProbeJob] = {}
    try:
        for job in jobs:
            try:
                resources = job_resources(job.stage_plan, cluster, job.interpreter)
                check_resources(resources, inventory.partitions, f"job of {job.kind.name}")
                active[launcher.submit(job_spec(job, resources))] = job
            except (PlanError, SlurmError) as error:
                job.refusal = str(error)
        waiting = f"checking {', '.join(job.kind.name for job in jobs)}"
        with create_console(stderr=True).status(waiting):
            submitted = dict(active)
            while active and time.monotonic() < deadline:
                for job_id, status in launcher.poll(list(active)).items():
                    active[job_id].status = status
                    if not status.state.is_active:
                        del active[job_id]
                time.sleep(launcher.poll_interval_s)
        launcher.cancel(list(active))
        wait_for_ends(client, [job_id for job_id in submitted if job_id.isdigit()])
    except BaseException:
        launcher.cancel(list(active))
        raise
    finally:
        launcher.close()
    for job in jobs:
        job.reports = read_reports(job.task)


def job_spec(job: ProbeJob, resources: JobResources) -> JobSpec:
    """Write the task file of a job, and return the job."""
    folder = job.task.job_folder
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "task.json", job.task.model_dump_json())
    return JobSpec(
        f"doctor/{job.kind.name}",
        (str(folder / "task.json"),),
        folder,
        job.task.folder / "logs",
        resources,
        "pipeline.commands.node_probe",
        allow_requeue=False,
    )


def wait_for_ends(client: SlurmClient, ids: Sequence[str]) -> None:
    """Wait until jobs have left the queue, because their processes still write reports."""
    end = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < end:
        queue = client.queue()
        if not any(job_id in queue and queue[job_id].state.is_active for job_id in ids):
            return
        time.sleep(client.poll_interval_s)


def read_reports(task: ProbeTask) -> list[RankReport]:
    """Return the reports of a job's processes in rank order; those that exist and are complete."""
    reports = []
    for path in task.job_folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValidationError):
            reports.append(RankReport.model_validate_json(path.read_text()))
    return sorted(reports, key=lambda report: report.rank)


def job_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Finding]:
    """Yield the findings of a job, in the order of its checks.

    Args:
        jobs: all jobs of the check, for the names of links between them.
    """
    yield from job.notes
    name, reports, status = job.kind.name, job.reports, job.status
    if job.refusal:
        yield Finding("fail", f"{name}: job", f"{job.refusal}. {REFUSAL_ADVICE}")
        return
    if status is not None and status.state is JobState.PENDING:
        reason = f" ({status.reason})" if status.reason else ""
        yield Finding(
            "fail",
            f"{name}: job",
            f"not checked: it has not started{reason}. Give it more time with --minutes, or "
            "repeat when the partition has free nodes (rlinf inventory)",
        )
        return
    if status is not None and status.state is not JobState.DONE:
        yield _unfinished_job(job, status)
    if not reports:
        return
    for topic in (
        _python_findings,
        _gpu_findings,
        _socket_findings,
        _clock_findings,
        _link_findings,
        _file_findings,
        _disk_findings,
        _stage_findings,
    ):
        for level, check, detail in topic(job, jobs):
            yield Finding(level, f"{name}: {check}", detail)


Row = tuple[Level, str, str]
"""Level, check and detail of a finding."""
REFUSAL_ADVICE = "Set account, qos or constraint of this partition in the site file (--site)"


def _unfinished_job(job: ProbeJob, status: JobStatus) -> Finding:
    """Return the finding of a job that failed, or that was cancelled at the deadline."""
    steps = [f"rank {r.rank} on {r.host} in {r.step!r}" for r in job.reports if r.step]
    where = f"; stopped: {', '.join(steps)}" if steps else ""
    if status.state is JobState.RUNNING:
        text = f"cancelled at the deadline{where}. Give it more time with --minutes"
    else:
        reason = " ".join(status.reason.split()) or status.state.value
        text = f"failed{where}: {reason[-500:]}"
    if not job.reports and status.exit_code != EXIT_BAD_INPUT:
        text += (
            ". No process reported: Python or rlinf cannot start on the nodes; see setup and "
            "python_command of the site file"
        )
    return Finding("fail", f"{job.kind.name}: job", text)


def _error_rows(job: ProbeJob, check: str, advice: str) -> Iterator[Row]:
    """Yield a row for each message of a failed check, with the hosts."""
    by_text: dict[str, list[str]] = {}
    for report in job.reports:
        if check in report.errors:
            by_text.setdefault(report.errors[check], []).append(report.host)
    for text, hosts in by_text.items():
        yield "fail", check, f"{', '.join(sorted(set(hosts)))}: {text}. {advice}"


def _measurement_row(check: str, text: str, is_ok: bool, warning: str) -> Row:
    """Return the row of a measurement, whose text continues with the warning if it is not ok."""
    return ("ok", check, text) if is_ok else ("warn", check, text + warning)


def _python_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    here = collect_provenance()["versions"]
    hosts = ", ".join(sorted({report.host for report in job.reports}))
    first = job.reports[0]
    differences = sorted(
        {
            f"{package} {there} on {report.host}, {own} here"
            for report in job.reports
            for package in {*here, *report.versions}
            if (there := report.versions.get(package, "missing"))
            != (own := here.get(package, "missing"))
        }
    )
    python = f"Python {first.versions.get('python', '?')} ({first.python}), torch "
    python += first.versions.get("torch", "?")
    if differences:
        yield (
            "warn",
            "Python",
            f"{python}; {'; '.join(differences)}. Use one environment: it belongs on a shared "
            "filesystem, or in the container of python_command",
        )
    else:
        yield "ok", "Python", f"{hosts}: {python}, as here"
    import_s = max(report.import_s for report in job.reports)
    if import_s > MAX_IMPORT_S:
        yield (
            "warn",
            "imports",
            f"{import_s:.0f} s: each job starts slowly, because the environment is on a slow "
            "filesystem; use a container image or a copy on the node's disk",
        )


def _gpu_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    expected = job.task.gpus_per_node
    if not expected:
        yield "ok", GPU_CHECK, "the partition has none; links are measured with Gloo"
        return
    yield from _error_rows(job, GPU_CHECK, "Compare driver and CUDA version with nvidia-smi")
    first = next((r for r in job.reports if len(r.gpus) < expected), None)
    if first is not None:
        torch = first.versions.get("torch", "?")
        driver = "; ".join(first.driver) or "nvidia-smi lists none, so the node has no driver"
        remedy = (
            "Install a torch for CUDA in the environment of the jobs"
            if not first.cuda
            else "Update the driver, or install a torch for an older CUDA"
            if first.driver
            else "Check the partition, or bind the driver into the container (--nv)"
        )
        built = f"built for CUDA {first.cuda}" if first.cuda else "built without CUDA"
        yield (
            "fail",
            GPU_CHECK,
            f"{first.host}: Slurm gave {expected} per node, and torch {torch} ({built}) sees "
            f"{len(first.gpus)}; driver: {driver}. {remedy}",
        )
        return
    models = sorted({gpu for report in job.reports for gpu in report.gpus})
    drivers = sorted({line.rpartition(",")[2].strip() for r in job.reports for line in r.driver})
    cuda = job.reports[0].cuda
    text = f"{', '.join(models)}; torch for CUDA {cuda}, driver {', '.join(drivers) or 'unknown'}"
    yield "ok", GPU_CHECK, text
    for model in models:
        yield from _matrix_row(job, model)


def _matrix_row(job: ProbeJob, model: str) -> Iterator[Row]:
    """Yield the row of the matrix rate of one model of GPU."""
    rates = [
        report.matrix_flops
        for report in job.reports
        if report.matrix_flops is not None and model in report.gpus
    ]
    if not rates:
        return
    tera = [rate / gpus.TERA for rate in rates]
    text = f"{model}: {min(tera):.0f} to {max(tera):.0f} TFLOP/s in bfloat16"
    spec = gpus.find_gpu(model)
    if spec is None or spec.bf16_flops is None:
        reason = "no data sheet is known" if spec is None else "it has no units for bfloat16"
        yield "warn", "matrix rate", f"{text}; {reason}"
        return
    share = min(rates) / spec.bf16_flops
    yield _measurement_row(
        "matrix rate",
        f"{text}, {share:.0%} of the data sheet of {spec.name}",
        share >= MIN_MATRIX_SHARE,
        ". Other work, a power limit or heat slows the GPU: nvidia-smi -q -d PERFORMANCE,POWER "
        "says which",
    )


def _socket_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    advice = (
        "Name a network that both share with cluster.network_interface, or run the driver as a "
        "job with rlinf submit"
    )
    yield from _error_rows(job, SOCKET_CHECK, advice)
    measured = [report for report in job.reports if report.round_trip_s is not None]
    if not measured:
        return
    slowest_s = max(report.round_trip_s or 0.0 for report in measured)
    ways = sorted({f"{r.server_address} by {r.server_interface or '?'}" for r in measured})
    text = f"to this machine: {', '.join(ways)}; round trip {slowest_s * 1e3:.1f} ms"
    is_ok = slowest_s <= MAX_ROUND_TRIP_S
    yield _measurement_row(SOCKET_CHECK, text, is_ok, f", which is slow. {advice}")


def _clock_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    differences = [
        (r.clock_difference_s, r.host) for r in job.reports if r.clock_difference_s is not None
    ]
    if not differences:
        return
    worst_s, host = max(differences, key=lambda pair: abs(pair[0]))
    if abs(worst_s) > MAX_CLOCK_DIFFERENCE_S:
        order = "behind" if worst_s > 0 else "ahead of"
        yield (
            "warn",
            "clock",
            f"{host} is {abs(worst_s):.1f} s {order} this machine: times in the report are "
            "shifted. Ask the administrators to synchronise clocks (NTP)",
        )
    else:
        yield "ok", "clock", f"differs by at most {abs(worst_s) * 1e3:.0f} ms"


def _link_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    number = job.task.job
    titles = {NODE_LINK: NODE_LINK, NODES_LINK: NODES_LINK}
    if number:
        titles[partition_link(number)] = f"link to {jobs[0].kind.name}"
    for name, title in titles.items():
        ends = [report for report in job.reports if name in report.links]
        errors = [r.errors[name] for r in job.reports if name in r.errors]
        if errors and name == partition_link(number) and not jobs[0].reports:
            yield "warn", title, "not measured, because both jobs must run at the same time"
            continue
        if errors:
            network = f" ({_describe_link(ends[0], name)})" if ends else ""
            yield (
                "fail",
                title,
                f"{errors[0]}{network}. Set cluster.network_interface to the network of the "
                "nodes; NCCL_DEBUG=INFO in env of the site file shows what NCCL tries",
            )
            continue
        if not ends or not ends[0].links[name].bytes_per_s:
            continue
        link = ends[0].links[name]
        rate = min(report.links[name].bytes_per_s for report in ends)
        text = f"{_describe_link(ends[0], name)}: {rate / GB:.2f} GB/s"
        if job.task.gpus_per_node and link.backend == "gloo":
            text += " (Gloo, because torch sees no GPU)"
        minimum = MIN_LINK_BYTES_PER_S[link.backend, name if name == NODE_LINK else NODES_LINK]
        yield _measurement_row(
            title,
            text,
            rate >= minimum,
            f", less than {minimum / GB:g}. Set cluster.network_interface to the fast network, and "
            "look for NET/IB in the log with NCCL_DEBUG=INFO",
        )


def _describe_link(report: RankReport, name: str) -> str:
    link: Link = report.links[name]
    if link.peer == report.host:
        return f"{link.backend.upper()} on {report.host}"
    way = f" by {link.interface}" if link.interface else ""
    return f"{link.backend.upper()} between {report.host} and {link.peer}{way}"


def _file_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    yield from _error_rows(
        job, FILES_CHECK, "The folder of the runs must be on a filesystem that all nodes share"
    )
    values = {
        key: next((v for r in job.reports if (v := getattr(r, key)) is not None), None)
        for key in ("write_bytes_per_s", "read_bytes_per_s", "visible_here_s", "visible_node_s")
    }
    write, read = values["write_bytes_per_s"], values["read_bytes_per_s"]
    delays = [values[key] for key in ("visible_here_s", "visible_node_s")]
    delay_s = max((delay for delay in delays if delay is not None), default=None)
    if write is not None and read is not None:
        minutes = 14 * GB / min(write, read) / 60
        yield _measurement_row(
            FILES_CHECK,
            f"writes {write / GB:.2f} GB/s, reads {read / GB:.2f} GB/s",
            min(write, read) >= MIN_FILE_BYTES_PER_S,
            f": 14 GB of weights (7 B in bfloat16) take {minutes:.0f} min. Choose a run.root on "
            "the parallel filesystem",
        )
    if delay_s is not None:
        yield _measurement_row(
            "rename",
            f"other nodes see it after {delay_s:.2f} s",
            delay_s <= MAX_VISIBLE_S,
            ": each stage of a job waits as long. Use pools, or a run.root on another filesystem",
        )


def _disk_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    yield from _error_rows(job, DISK_CHECK, "Set TMPDIR in env of the site file")
    for path in dict.fromkeys(path for report in job.reports for path in report.disks):
        disks = [report.disks[path] for report in job.reports if path in report.disks]
        smallest = min(disks, key=lambda disk: disk.free_bytes)
        is_shared = path == "/dev/shm"
        text = f"{path}: {smallest.free_bytes / GIB:.3g} of {smallest.total_bytes / GIB:.3g} GiB"
        text += " free"
        if smallest.write_bytes_per_s is not None:
            text += f", writes {smallest.write_bytes_per_s / GB:.2f} GB/s"
        is_ok = smallest.free_bytes >= (MIN_SHARED_BYTES if is_shared else MIN_TEMPORARY_BYTES)
        remedy = (
            "Weights of engine servers and pools go through it: rlinf clean on the node removes "
            "leftovers, and containers need a larger one (--shm-size)"
            if is_shared
            else "Set TMPDIR in env of the site file to a larger disk of the node"
        )
        yield _measurement_row(DISK_CHECK, text, is_ok, f". {remedy}")


def _stage_findings(job: ProbeJob, jobs: Sequence[ProbeJob]) -> Iterator[Row]:
    if job.task.config is None:
        return
    yield from _error_rows(job, STAGES_CHECK, f"Logs: {job.task.folder / 'logs'}")
    times: Mapping[str, float] = job.reports[0].stages
    if not times or any(STAGES_CHECK in report.errors for report in job.reports):
        return
    text = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in times.items())
    load_s = job.reports[0].engine_load_s
    engine = f"; the engine started in {load_s:.1f} s of these" if load_s is not None else ""
    processes = job.stage_plan.nodes * job.stage_plan.processes
    yield "ok", STAGES_CHECK, f"a small batch on {processes} processes: {text}{engine}"
