"""``python -m pipeline.commands.node_probe TASK.json``: the checks of ``rlinf doctor --partition``
that run in a job, on each of its processes.

Each process writes a report after every check. So the report of a process that hangs or is killed
names the check in which it stopped.
"""

import time

FIRST_LINE = time.time()
"""Time of the first line of code, seconds since the epoch."""

import contextlib  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from pydantic import Field  # noqa: E402

from rlinf.channels import curve_sockets  # noqa: E402
from rlinf.channels.process_group import ProcessGroupInfo  # noqa: E402
from rlinf.channels.requests import RequestClient  # noqa: E402
from rlinf.config import Section  # noqa: E402
from rlinf.errors import RlinfError  # noqa: E402
from stages.layout import CHANNELS_FOLDER  # noqa: E402

SERVER_FILE = "doctor.json"
"""Pointer file of the server on the machine where ``rlinf doctor`` runs."""
TIME, IS_VISIBLE = "time", "is_visible"
"""Methods of that server: return its time; return whether a file is visible there."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
NVIDIA_SMI_TIMEOUT_S = 30.0
NUM_PINGS = 5
"""Requests whose shortest round trip is reported."""
MATRIX_SIZE, MATRIX_REPEATS = 8192, 30
"""Size and number of the matrix products whose rate is measured on a GPU."""
GPU_BYTES, CPU_BYTES, NUM_TRANSFERS = 1 << 28, 1 << 24, 5
"""Bytes of a transfer between GPUs and between CPUs, and the number of transfers."""
JOIN_TIMEOUT_S, PARTITION_TIMEOUT_S, FILES_TIMEOUT_S = 30.0, 60.0, 60.0
"""Seconds in which a process of the same job or of another job must join, and for the filesystem
also write."""
FILE_BYTES, LOCAL_FILE_BYTES, BLOCK_BYTES = 1 << 27, 1 << 26, 1 << 23
"""Bytes that are written to the run folder and to the node's disk, in blocks."""
VISIBLE_TIMEOUT_S, VISIBLE_POLL_S = 30.0, 0.01
"""Seconds in which another node must see a renamed file, and seconds between two attempts."""
DATA_FILE, RENAMED_FILE = "data", "renamed"
"""Names of the files that are written to the run folder."""


class ProbeTask(Section):
    """The task of all processes of a job."""

    folder: Path
    """Folder of this check, on the filesystem of the runs."""
    job: int
    """Index of this job among the jobs of the check."""
    num_jobs: int
    tasks_per_node: int
    nodes: int
    gpus_per_node: int
    """Number of GPUs that Slurm gave to the job, per node."""
    config: Path | None = None
    """Frozen configuration of a run whose first stages are tried; None: none."""

    @property
    def job_folder(self) -> Path:
        """The folder of this job's reports."""
        return self.folder / f"job-{self.job}"


class Link(Section):
    """A transfer between two processes."""

    peer: str = ""
    """Host of the other process."""
    backend: str = ""
    """``nccl``, or ``gloo`` if a process sees no GPU."""
    interface: str = ""
    """Network interface of the connection; "" within a node."""
    bytes_per_s: float = Field(default=0.0, ge=0)


class LocalDisk(Section):
    """A folder of a node that other nodes do not see."""

    total_bytes: int
    free_bytes: int
    write_bytes_per_s: float | None = None


class RankReport(Section):
    """The measurements of one process. A value is None, or a mapping empty, if not measured."""

    rank: int
    local_rank: int
    host: str
    python: str = ""
    versions: dict[str, str] = {}
    """Versions of Python and of packages."""
    import_s: float = 0.0
    """Seconds of the imports that every stage needs."""
    step: str = ""
    """The check that runs now; "" at the end."""
    errors: dict[str, str] = {}
    """Message of each check that failed."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that torch sees."""
    cuda: str = ""
    """CUDA version of torch; "" if torch was built without it."""
    driver: tuple[str, ...] = ()
    """Name and driver version of each GPU, from nvidia-smi."""
    matrix_flops: float | None = None
    """Rate of bfloat16 matrix products, FLOP/s."""
    server_address: str = ""
    """Address at which the machine of ``rlinf doctor`` answered."""
    server_interface: str = ""
    """Interface of this node on the way to that address."""
    round_trip_s: float | None = None
    clock_difference_s: float | None = None
    """Clock of the machine of ``rlinf doctor``, minus clock of this node."""
    links: dict[str, Link] = {}
    """Transfers by the name of their check."""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    visible_here_s: float | None = None
    """Seconds until the machine of ``rlinf doctor`` saw a renamed file."""
    visible_node_s: float | None = None
    """Seconds until the second node saw a renamed file."""
    disks: dict[str, LocalDisk] = {}
    """Local disks by path."""
    stages: dict[str, float] = {}
    """Seconds of each stage of the run."""
    engine_load_s: float | None = None
    """Seconds of these in which the rollout stage started the engine."""


def list_gpus() -> list[str]:
    """Return name and driver version of each GPU of this node; empty without GPU or driver."""
    try:
        output = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.stdout.splitlines() if line.strip()]


NODE_LINK, NODES_LINK = "two processes of a node", "two nodes"
"""Names of the links within a job."""
GPU_CHECK, SOCKET_CHECK, DISK_CHECK = "GPUs", "sockets", "local disk"
FILES_CHECK, STAGES_CHECK = "filesystem", "stages"


def partition_link(job: int) -> str:
    """Return the name of the link between the first job and another one."""
    return f"job 0 and job {job}"


@dataclass
class NodeProbe:
    """The checks of one process."""

    task: ProbeTask
    world: ProcessGroupInfo
    report: RankReport

    def run(self) -> None:
        """Run all checks. A failed check is reported, and the next one follows."""
        for name, check in self.checks():
            self.update(step=name)
            try:
                check()
            except Exception as error:
                text = str(error) if isinstance(error, RlinfError) else describe(error)
                self.update(errors={**self.report.errors, name: text})
        self.update(step="")

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the checks of this process in order. Processes that meet have the same order."""
        rank, tasks, job = self.world.rank, self.task.tasks_per_node, self.task.job
        yield GPU_CHECK, self.check_gpus
        yield SOCKET_CHECK, self.check_sockets
        if self.world.local_rank == 0:
            yield DISK_CHECK, self.check_local_disk
        if tasks > 1 and rank < 2:
            yield NODE_LINK, partial(self.check_link, NODE_LINK, rank, f"job-{job}-node")
        if self.task.nodes > 1 and rank in (0, tasks):
            file = f"job-{job}-nodes"
            yield NODES_LINK, partial(self.check_link, NODES_LINK, int(rank > 0), file)
        if rank in (0, tasks):
            yield FILES_CHECK, self.check_filesystem
        if rank == 0:
            for other in [job] if job else range(1, self.task.num_jobs):
                name, file = partition_link(other), f"jobs-{other}"
                check = partial(self.check_link, name, int(job > 0), file, PARTITION_TIMEOUT_S)
                yield name, check
        if self.task.config is not None:
            yield STAGES_CHECK, self.check_stages

    def update(self, **changes: Any) -> None:
        """Change the report and write it."""
        from rlinf.artifacts import write_atomic

        self.report = self.report.model_copy(update=changes)
        path = self.task.job_folder / f"rank-{self.report.rank}.json"
        write_atomic(path, self.report.model_dump_json())

    def check_gpus(self) -> None:
        """List the GPUs, and measure the rate of matrix products on the GPU of this process."""
        import torch

        driver = tuple(list_gpus()) if self.task.gpus_per_node else ()
        self.update(cuda=str(torch.version.cuda or torch.version.hip or ""), driver=driver)
        if not torch.cuda.is_available():
            if self.task.gpus_per_node and torch.version.cuda:
                torch.cuda.init()  # type: ignore[no-untyped-call]  # raises with the reason
            return
        count = torch.cuda.device_count()
        self.update(gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)))
        device = torch.device("cuda", self.world.local_rank % count)
        torch.cuda.set_device(device)
        self.update(matrix_flops=matrix_rate(device))

    def check_sockets(self) -> None:
        """Connect to the machine of ``rlinf doctor``, and compare clocks."""
        with self.connect_server() as (client, address):
            host = address.removeprefix("tcp://").rpartition(":")[0]
            self.update(
                server_address=address,
                server_interface=curve_sockets.interface_towards(host) or "",
            )
            best_s, difference_s = float("inf"), 0.0
            for _ in range(NUM_PINGS):
                sent = time.time()
                answer = client.request(TIME).arguments["time"]
                received = time.time()
                if received - sent < best_s:
                    # The server's clock is compared with the middle of the round trip.
                    best_s, difference_s = received - sent, answer - (sent + received) / 2
            self.update(round_trip_s=max(best_s, 0.0), clock_difference_s=difference_s)

    @contextlib.contextmanager
    def connect_server(self) -> Iterator[tuple[RequestClient, str]]:
        """Yield a client of the server of ``rlinf doctor``, and the address of the server."""
        path = self.task.folder / CHANNELS_FOLDER / SERVER_FILE
        pointer = curve_sockets.read_pointer(path)
        if pointer is None:
            raise RlinfError(f"{path} cannot be read on this node")
        address = curve_sockets.first_reachable(pointer.addresses)
        if address is None:
            raise RlinfError(f"no answer at {', '.join(pointer.addresses)}")
        client = RequestClient(path, server=(pointer, address))
        try:
            yield client, address
        finally:
            client.close()

    def check_local_disk(self) -> None:
        """Measure the temporary folder and the shared memory of this node."""
        temporary = tempfile.gettempdir()
        disks = {}
        for path in dict.fromkeys((temporary, "/dev/shm")):
            usage = shutil.disk_usage(path)
            disks[path] = LocalDisk(total_bytes=usage.total, free_bytes=usage.free)
        if disks[temporary].free_bytes > 2 * LOCAL_FILE_BYTES:
            with tempfile.TemporaryDirectory(prefix="rlinf-doctor-") as folder:
                rate = write_rate(Path(folder) / DATA_FILE, LOCAL_FILE_BYTES)
            disks[temporary] = disks[temporary].model_copy(update={"write_bytes_per_s": rate})
        self.update(disks=disks)

    def check_link(
        self, name: str, member: int, file: str, timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Measure a broadcast from member 0 to member 1, as weights are transferred.

        Args:
            name: name of the link in the report.
            member: 0 or 1.
            file: name of the rendezvous in the folder for channels.
        """
        import torch

        from stages.worker.weight_transfer import GLOO, NCCL, backend_device, create_process_group

        with self.join_peer(file, member, timeout_s) as (store, address):
            has_gpu = torch.cuda.is_available()
            store.set(f"member/{member}", f"{socket.gethostname()} {has_gpu}")
            peer, peer_has_gpu = store.get(f"member/{1 - member}").decode().split()
            backend = NCCL if has_gpu and peer_has_gpu == "True" else GLOO
            interface = curve_sockets.interface_towards(address) or ""
            link = Link(
                peer=peer,
                backend=backend,
                interface="" if peer == socket.gethostname() else interface,
            )
            self.update(links={**self.report.links, name: link})
            group = create_process_group(backend, store, member, 2)
            try:
                rate = transfer_rate(group, backend_device(backend))
                store.set(f"measured/{member}", "")
                store.wait([f"measured/{1 - member}"])
            finally:
                group.abort()
            link = link.model_copy(update={"bytes_per_s": rate})
            self.update(links={**self.report.links, name: link})

    @contextlib.contextmanager
    def join_peer(
        self, file: str, member: int, timeout_s: float = JOIN_TIMEOUT_S
    ) -> Iterator[tuple[Any, str]]:
        """Yield a store that two processes share, and an address of the first one."""
        from rlinf.channels.rendezvous import join_rendezvous

        path = self.task.folder / CHANNELS_FOLDER / f"{file}.json"
        store, address = join_rendezvous(path, member, 2, timeout_s)
        try:
            yield store, address
            # Member 0 serves the store, so it leaves last.
            if member:
                store.set("left", "")
            else:
                store.wait(["left"])
        finally:
            store.close()

    def check_filesystem(self) -> None:
        """Measure writing, reading and the visibility of a rename in the folder of the runs.

        The second node reads what the first one wrote, because a node caches its own files.
        """
        folder = self.task.job_folder
        path, renamed = folder / DATA_FILE, folder / RENAMED_FILE
        if self.task.nodes > 1:
            file = f"job-{self.task.job}-files"
            member = int(self.world.rank > 0)
            with self.join_peer(file, member, FILES_TIMEOUT_S) as (store, _):
                if member == 0:
                    self.update(write_bytes_per_s=write_rate(path, FILE_BYTES))
                    store.set("written", "")
                    store.wait(["ready"])
                    try:
                        self.rename(path, renamed, lambda: store.set("renamed", ""))
                    finally:
                        store.set("renamed", "")
                    return
                store.wait(["written"])
                self.update(read_bytes_per_s=read_rate(path))
                renamed.exists()  # a network filesystem remembers for a while that it is missing
                store.set("ready", "")
                store.wait(["renamed"])
                delay_s = wait_until_visible(renamed.exists)
                self.update(visible_node_s=delay_s)
            return
        if self.world.rank == 0:
            self.update(write_bytes_per_s=write_rate(path, FILE_BYTES))
            self.update(read_bytes_per_s=read_rate(path))
            self.rename(path, renamed)

    def rename(
        self, path: Path, target: Path, on_renamed: Callable[[], None] = lambda: None
    ) -> None:
        """Rename a file, and measure when the machine of ``rlinf doctor`` sees it."""
        name = target.relative_to(self.task.folder).as_posix()
        try:
            with self.connect_server() as (client, _):

                def is_visible() -> bool:
                    return bool(client.request(IS_VISIBLE, {"name": name}).arguments["visible"])

                is_visible()
                path.rename(target)
                on_renamed()
                self.update(visible_here_s=wait_until_visible(is_visible))
        finally:
            if path.exists():
                path.rename(target)

    def check_stages(self) -> None:
        """Run the stages of the first iteration up to the training stage, each for itself."""
        from pipeline.graph import Graph, StageNode
        from pipeline.planning.profile.stage_bench import span_seconds
        from stages.runner import StageCall, load_config, run_stage

        assert self.task.config is not None
        run, config = self.task.config.parent, load_config(self.task.config)
        graph = Graph(config)
        for stage in graph.flow.all_stages:
            if stage not in graph.flow.setup_stages and stage not in graph.flow.stages:
                continue
            node = StageNode(stage, 0)
            inputs = {name: graph.output_folder(run, n) for name, n in graph.inputs(node).items()}
            self.update(step=f"{STAGES_CHECK}: {stage}")
            call = StageCall(stage, self.task.config, graph.output_folder(run, node), inputs=inputs)
            start = time.time()
            manifest = run_stage(call, config=config)
            self.update(stages={**self.report.stages, stage: time.time() - start})
            if stage == graph.flow.rollout_stage:
                self.update(engine_load_s=span_seconds(manifest).get("load"))
            if stage == graph.flow.train_stage:
                return


def matrix_rate(device: Any) -> float:
    """Return the rate of square bfloat16 matrix products on a GPU, FLOP/s."""
    import torch

    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).bfloat16()
    right = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).bfloat16()
    for _ in range(MATRIX_REPEATS // 3):  # the clock of the GPU rises first
        left @ right
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(MATRIX_REPEATS):
        left @ right
    torch.cuda.synchronize(device)
    # 2 n^3 operations for each product.
    return 2.0 * MATRIX_SIZE**3 * MATRIX_REPEATS / (time.perf_counter() - start)


def transfer_rate(group: Any, device: Any) -> float:
    """Return the bytes per second of broadcasts in a group of two; the first one is a warm-up."""
    import torch

    num_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(NUM_TRANSFERS + 1):
        start = time.perf_counter()
        group.broadcast(tensor, 0).wait()
        # The answer of member 1 shows that everything has arrived.
        group.broadcast(answer, 1).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return float(num_bytes / min(seconds[1:]))


def write_rate(path: Path, num_bytes: int) -> float:
    """Write a file and return the bytes per second, until they are on the disk or server."""
    block = os.urandom(BLOCK_BYTES)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(num_bytes // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes / (time.perf_counter() - start)


def read_rate(path: Path) -> float:
    """Return the bytes per second of reading a file, without this node's cache of it."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        num_bytes, start = 0, time.perf_counter()
        while block := file.read(BLOCK_BYTES):
            num_bytes += len(block)
    return num_bytes / (time.perf_counter() - start)


def wait_until_visible(is_visible: Callable[[], bool]) -> float:
    """Return the seconds until ``is_visible`` returns True.

    Raises:
        RlinfError: it does not within ``VISIBLE_TIMEOUT_S``.
    """
    start = time.perf_counter()
    while not is_visible():
        if time.perf_counter() - start > VISIBLE_TIMEOUT_S:
            raise RlinfError(f"a renamed file is not visible after {VISIBLE_TIMEOUT_S:.0f} s")
        time.sleep(VISIBLE_POLL_S)
    return time.perf_counter() - start


def describe(error: Exception) -> str:
    """Return type and first line of an error that is not one of this program."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def main(argv: list[str]) -> int:
    """Run the checks of a task file on this process."""
    from rlinf import process_tuning
    from rlinf.artifacts import MANIFEST, write_atomic

    process_tuning.tune_process()
    # The modules that every stage imports.
    import stages.rollout
    import stages.runner
    import stages.train  # noqa: F401

    import_s = time.time() - FIRST_LINE
    from pipeline.run import collect_provenance

    task = ProbeTask.model_validate_json(Path(argv[0]).read_text())
    world = ProcessGroupInfo.from_environment(task.folder / CHANNELS_FOLDER)
    report = RankReport(
        rank=world.rank,
        local_rank=world.local_rank,
        host=socket.gethostname(),
        python=sys.executable,
        versions=collect_provenance()["versions"],
        import_s=import_s,
    )
    NodeProbe(task, world, report).run()
    if world.rank == 0:
        write_atomic(task.job_folder / MANIFEST, "{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
