"""Engines that run vLLM or SGLang servers in processes with their own interpreter.

The stage's process only sends requests. A private folder in ``/dev/shm`` has copies of the model
files, which are verified while they are copied. The copies remain until the next load, so that a
server that dies can be restarted. The folder also has the servers' sockets.
"""

from __future__ import annotations

import collections
import contextlib
import filecmp
import os
import queue
import shutil
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.data.record import Record
from rlinf.device_memory import MemorySize
from rlinf.engines.base import NO_HOOKS, RequestReceiver, RolloutHooks
from rlinf.engines.engine_plugins import server_launcher
from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.replicas import Replicas
from rlinf.engines.resumable import (
    GeneratedSegment,
    ResumableGeneration,
    ResumableSample,
    SegmentRequest,
)
from rlinf.engines.server_process import ServerError, ServerProcess, ServerUnavailable
from rlinf.errors import ConfigError
from rlinf.interpreters import resolve_interpreter
from rlinf.models.hf_folder import (
    WEIGHTS_FILE,
    copy_non_weight_files,
    non_weight_files,
    weight_files,
)
from rlinf.models.loading import text_config
from rlinf.registry import RunComponents
from rlinf.safetensors_io import StreamedState, save_tensors
from rlinf.shared_memory import SHM_FOLDER, new_segment_name
from rlinf.verified_io import copy_file

DECODER_POLL_S = 0.005
"""Interval at which new requests and hooks are checked while samples are running."""
MAX_SERVER_LOSSES = 3
"""The run fails when this many servers have died while they generated the same sample."""
ABORT_INTERVAL_S = 0.05
"""Interval at which aborts are repeated, because an abort misses requests still in transit."""


class SegmentServers(Protocol):
    """The part of a server engine that :class:`ConcurrentDecoder` needs."""

    def generate_segment(self, request: SegmentRequest) -> GeneratedSegment:
        """Generate a segment; thread-safe.

        Raises:
            ServerUnavailable: The server died.
            DataError: The server rejected the request.
        """

    def abort(self) -> None:
        """Abort all running segments; each request returns the tokens that it has so far."""

    def restart_failed(self) -> None:
        """Restart servers that died. Raises ServerError if no server runs or starts."""

    def log_tail(self) -> str:
        """Return the end of the log of the server that died last."""


class ConcurrentDecoder:
    """A :class:`rlinf.engines.resumable.SegmentDecoder` with one thread per running segment."""

    def __init__(self, servers: SegmentServers) -> None:
        self._servers = servers
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls of :meth:`_decode` for the threads; each None ends one thread."""
        self._results: queue.SimpleQueue[tuple[ResumableSample, GeneratedSegment | Exception]] = (
            queue.SimpleQueue()
        )
        self._threads = self._running = 0
        """Numbers of threads and of running segments."""
        self._has_dead_server = False

    def __len__(self) -> int:
        return self._running

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        if self._has_dead_server:
            # Other segments of the dead server fail too; those of other servers continue.
            self._has_dead_server = False
            self._servers.restart_failed()
        self._running += 1
        if self._threads < self._running:
            self._threads += 1
            name = f"segment-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put(partial(self._decode, sample, request))

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        results = list[tuple[ResumableSample, GeneratedSegment | Exception]]()
        wait_s = DECODER_POLL_S
        while self._running:
            try:
                sample, segment = self._results.get(timeout=wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            results.append(self._receive(sample, segment))
        return results

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        while self._running:
            try:
                sample, segment = self._results.get(timeout=ABORT_INTERVAL_S)
            except queue.Empty:
                with contextlib.suppress(ServerUnavailable):
                    self._servers.abort()
                continue
            yield self._receive(sample, segment)

    def close(self) -> None:
        for _ in range(self._threads):
            self._calls.put(None)

    def _receive(
        self, sample: ResumableSample, segment: GeneratedSegment | Exception
    ) -> tuple[ResumableSample, GeneratedSegment | Exception]:
        """Process a thread's result: if its server died, return an empty segment instead."""
        self._running -= 1
        if not isinstance(segment, ServerUnavailable):
            return sample, segment
        self._has_dead_server = True
        sample.server_losses += 1
        if sample.server_losses < MAX_SERVER_LOSSES:
            return sample, GeneratedSegment([], [], "abort")
        return sample, ServerError(
            f"{MAX_SERVER_LOSSES} servers died while they generated the same sample ({segment}); "
            f"the end of the last log:\n{self._servers.log_tail()}"
        )

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _decode(self, sample: ResumableSample, request: SegmentRequest) -> None:
        try:
            self._results.put((sample, self._servers.generate_segment(request)))
        except Exception as error:  # raised again in the thread that reads the replies
            self._results.put((sample, error))


PLUGIN_FOLDER = Path(server_launcher.__file__).parent
"""Folder of the modules that servers import; it is on their module search path."""


class ServerConfig(ExternalConfig):
    """Options of engines with servers; each option holds for each server."""

    server_python: str
    """Python interpreter of the server: a path, or an environment of ``make env``."""
    replicas: int = Field(default=1, gt=0)
    """Number of servers with equal weights per model replica; each has GPUs of its own."""
    max_load_imbalance: int = Field(default=32, ge=0)
    """A request goes to the server that has cached its prefix, unless that server has more than
    this many requests above the least loaded one."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """Longest start-up time of a server, seconds."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time of a response, seconds; after it the server counts as dead."""
    heartbeat_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time without a heartbeat while samples are running, seconds. One engine step, for
    example a prefill, must be shorter."""


class ServerEngine(ExternalEngine):
    """An engine that sends requests to servers; subclasses adapt one kind of server each."""

    Config = ServerConfig
    parallel_dims = frozenset({"tp"})
    server_module: ClassVar[str]
    """The module that the server's interpreter runs."""
    health_route: ClassVar[str] = "/health"
    """The route that answers when the server is ready."""
    heartbeat_route: ClassVar[str] = "/health"
    """The route that answers as long as the decoding process is alive."""
    server_packages: ClassVar[tuple[str, ...]]
    """The packages that the server's interpreter must have."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self._folder: Path | None = None
        """Private folder in ``/dev/shm``; None before the first load."""
        self._is_asleep = False
        self._replica_group: ReplicaGroup | None = None
        self._servers = Replicas(
            config.replicas, config.max_load_imbalance, self._start_server, self._wait_ready
        )

    @classmethod
    def max_batch(cls, config: Any) -> int:
        return int(config.max_num_seqs * config.replicas)

    @classmethod
    def interpreters(cls, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {"server_python": (config.server_python, cls.server_packages)}

    @classmethod
    def check_layout(
        cls, options: Any, run: RunComponents, layout: ParallelLayout, processes: int, key: str
    ) -> None:
        super().check_layout(options, run, layout, processes, key)
        if layout.tp > 1:
            check_attention_heads(text_config(run.options["model"]), layout.tp, key)

    # Implemented by subclasses.

    @abstractmethod
    def server_args(self, model: Path, context_length: int, socket: Path) -> list[str]:
        """Return the command-line arguments of a server for a model folder, at a socket."""

    @abstractmethod
    def server_environment(self, socket: Path) -> Mapping[str, str]:
        """Return the environment variables of a server that listens at a socket."""

    @abstractmethod
    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a segment request."""

    @abstractmethod
    def parse_response(self, values: Any) -> GeneratedSegment:
        """Return the segment in the response to a request of :meth:`build_request`."""

    @abstractmethod
    def update_weights(self, process: ServerProcess, folder: Path, version: int) -> None:
        """Let a server load a folder's weights and clear its caches; no request is running."""

    @abstractmethod
    def abort_requests(self, process: ServerProcess) -> None:
        """Abort all requests of a server; each returns the tokens that it has so far."""

    def on_server_ready(self, process: ServerProcess) -> None:
        """Prepare a server that is ready, before its first request."""

    @abstractmethod
    def sleep(self, process: ServerProcess) -> None:
        """Let a server free the memory of weights and KV cache; their content is lost."""

    @abstractmethod
    def wake(self, process: ServerProcess) -> None:
        """Undo :meth:`sleep`, except for the content; :meth:`update_weights` follows."""

    # The Engine interface.

    @property
    def processes(self) -> list[ServerProcess]:
        """The running servers."""
        return self._servers.running

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        if not self.world.is_primary:
            self._read_model(folder)
            self._serve(version, update=False)
            return
        model = self._shm_folder() / "model"
        self._servers.wait_ready()  # a starting server reads the old files
        is_same_model = bool(self._servers.running) and _same_files(folder, model)
        if not is_same_model:
            self._servers.close()
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            copy_non_weight_files(folder, model)
        for path in model.glob("*.safetensors*"):
            path.unlink()
        # One file at a time, so that old and new weights are never in memory together.
        for path in weight_files(folder):
            copy_file(path, model / path.name)
        if not is_same_model:
            self._read_model(model)
        self._serve(version, update=is_same_model)

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        if not self.world.is_primary:
            # Other ranks may take part in a collective operation of the iterator.
            collections.deque(self._exporter.export(tensors), maxlen=0)
            self._serve(version, update=False)
            return
        model = self._shm_folder() / "model"
        self._servers.wait_ready()
        for path in model.glob("*.safetensors*"):
            path.unlink()
        state = StreamedState(self._exporter.meta_tensors, self._exporter.export(tensors))
        save_tensors(model / WEIGHTS_FILE, state, state.templates.keys(), {"format": "pt"})
        self._serve(version, update=True)

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        try:
            max_concurrent = self.max_batch(self._config)
            yield from ResumableGeneration(
                self, ConcurrentDecoder(self), requests, seed, stage, hooks, max_concurrent
            ).iter_replies()
        finally:
            self._finish_batch()

    def run_follower(self, *, seed: int, stage: str) -> None:
        self._finish_batch()

    def _finish_batch(self) -> None:
        """Free the GPUs for the replica's ranks after a :meth:`generate` call."""
        if self.world.layout.tp == 1:
            return
        if self.can_sleep:
            self.offload("server", 0)
        self._replica_barrier()

    def _replica_barrier(self) -> None:
        """Wait for the other ranks of the model replica, if there are any."""
        if self.world.layout.tp > 1:
            self._replica_group = self._replica_group or ReplicaGroup(self.world, self.device.type)
            self._replica_group.barrier()

    def group_sizes(self) -> dict[str, MemorySize]:
        """Return the memory of weights and KV cache on one GPU of a server."""
        if not self.can_sleep or self.version < 0:
            return {}
        size = self.device_bytes()
        return {"server": MemorySize(0, size, 0) if self._is_asleep else MemorySize(size, 0, 0)}

    def offload(self, group: str, min_bytes: int) -> int:
        freed = self.group_sizes()[group].on_device
        if freed:
            self._servers.wait_ready()
            self._servers.for_each(self.sleep)
            self._is_asleep = True
        return freed

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Load the weights from the folder again; a sleeping server has no copy of them."""
        if not self._is_asleep or not groups:
            return
        if copy_data:
            self._serve(self.version, update=True)
        # Otherwise new weights follow, and loading them wakes the servers.

    def close(self) -> None:
        self._servers.close()
        self._is_asleep = False
        self.version = -1
        if self._folder is not None:
            self._remove()
            self._folder = None

    # The SegmentServers interface.

    def generate_segment(self, request: SegmentRequest) -> GeneratedSegment:
        self.check_length(request)
        route, body = self.build_request(request)
        response = self._servers.request(
            request.context_tokens, route, body, lambda values: self.parse_response(values).tokens
        )
        return self.parse_response(response)

    def abort(self) -> None:
        self._servers.for_each(self.abort_requests)

    def restart_failed(self) -> None:
        self._servers.restart_failed()

    def log_tail(self) -> str:
        return self._servers.log_tail()

    def _read_model(self, model: Path) -> None:
        super()._read_model(model)
        check_attention_heads(self._text_config, self.world.layout.tp)

    def _serve(self, version: int, *, update: bool) -> None:
        """Serve the weights in the private folder; only the primary rank has servers.

        Args:
            update: If true, running servers load the weights; if false, all servers restart.
        """
        was_asleep, self._is_asleep = self._is_asleep, False
        self._replica_barrier()  # until the other ranks have freed their GPUs
        if not self.world.is_primary:
            self.version = version
            return
        self.version = -1
        model = self._shm_folder() / "model"

        def update_server(process: ServerProcess) -> None:
            if was_asleep:
                self.wake(process)
            self.update_weights(process, model, version)

        self._servers.start(update_server if update else None)
        self.version = version

    def _start_server(self, server_index: int) -> ServerProcess:
        """Start a server process.

        Args:
            server_index: Index of the server within the model replica.
        """
        folder, config = self._shm_folder(), self._config
        model, socket = folder / "model", folder / f"http-{server_index}"
        socket.unlink(missing_ok=True)
        logs = self.log_folder or folder
        log_suffix = f"-{server_index}" if config.replicas > 1 else ""
        gpu_environment = {}
        if self.device.type == "cuda":
            world = self.world
            gpu_environment = {
                CUDA_VISIBLE_DEVICES: server_gpus(
                    world.local_rank,
                    int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                    server_index,
                    config.replicas,
                    world.layout.tp,
                )
            }
        return ServerProcess(
            resolve_interpreter(config.server_python, "engine.server_python"),
            self.server_module,
            [*self.server_args(model, self._max_model_len, socket), *config.extra_args],
            {
                "TMPDIR": str(folder),
                "PYTHONPATH": str(PLUGIN_FOLDER),
                "OMP_NUM_THREADS": str(config.threads),
                "HF_HUB_OFFLINE": "1",
                # All processes are on this node. NCCL takes a name without "=" as a prefix.
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "=lo",
                **gpu_environment,
                **self.server_environment(socket),
            },
            socket,
            logs / f"{type(self).__name__}-{os.uname().nodename}-{os.getpid()}{log_suffix}.log",
            config.request_timeout_s,
            self.heartbeat_route,
            config.heartbeat_timeout_s,
        )

    def _wait_ready(self, process: ServerProcess) -> None:
        process.wait_ready(self.health_route, self._config.startup_timeout_s)
        try:
            self.on_server_ready(process)
        except ServerUnavailable as error:
            raise ServerError(
                f"a server died during start-up ({error}); end of its log:\n{process.log_tail()}"
            ) from None

    def _shm_folder(self) -> Path:
        if self._folder is None:
            self._folder = SHM_FOLDER / new_segment_name()
            self._folder.mkdir(mode=0o700)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _same_files(folder: Path, other_folder: Path) -> bool:
    """Return whether two folders have equal files, except for the weights."""
    names = non_weight_files(folder)
    return names == non_weight_files(other_folder) and all(
        filecmp.cmp(folder / name, other_folder / name, shallow=False) for name in names
    )


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BARRIER_TIMEOUT = timedelta(days=30)
"""Maximum duration of a generate call. The wait ends earlier if a rank fails and disconnects."""


class ReplicaGroup:
    """The ranks of one model replica. (``engine.replicas`` counts its servers.)"""

    def __init__(self, world: ProcessGroupInfo, device_type: str) -> None:
        """Create the process group; a collective operation of all ranks of the stage."""
        world.init_process_group(device_type)
        size = world.layout.tp
        groups = [
            dist.new_group([*range(first, first + size)], timeout=BARRIER_TIMEOUT, backend="gloo")
            for first in range(0, world.size, size)
        ]
        self._group = groups[world.rank // size]

    def barrier(self) -> None:
        """Wait until all ranks of the replica have called this."""
        dist.barrier(self._group)


def check_attention_heads(
    settings: Any, size: int, key: str = "plan.stages.rollout.layout"
) -> None:
    """Check that the attention heads can be divided over a number of ranks.

    All ranks have the same number of query heads. Key-value heads are divided too. If there are
    fewer of them than ranks, each is replicated the same number of times.

    Args:
        settings: The text config of the model, with the field names of transformers.
        size: The number of ranks.
        key: The configuration key of the layout, for the error message.

    Raises:
        ConfigError: The number of ranks is not possible; the message lists possible numbers.
    """
    if size == 1:
        return
    heads = settings.num_attention_heads
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads

    def can_divide(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not can_divide(size):
        choices = ", ".join(str(n) for n in range(1, heads + 1) if can_divide(n))
        raise ConfigError(
            f"{key}.tp: {size} processes cannot divide the {heads} attention heads of the model, "
            f"{kv_heads} of keys and values; choose one of {choices}"
        )


def server_gpus(
    local_rank: int, num_ranks: int, server_index: int, num_servers: int, gpus_per_server: int
) -> str:
    """Return the GPUs of one server in the format of CUDA_VISIBLE_DEVICES.

    Launchers show each process either all GPUs of its job on the node or only its own.

    Args:
        local_rank: Local rank of the starting process; the ranks of a model replica are adjacent.
        num_ranks: Number of processes of the job on this node.
        server_index: Index of the server within the model replica.
        num_servers: Number of servers of the model replica, and of GPUs of each of its ranks.
        gpus_per_server: Number of GPUs of a server, and of ranks of the model replica.

    Raises:
        ConfigError: This process does not see enough GPUs.
    """
    visible = os.environ.get(CUDA_VISIBLE_DEVICES)
    gpus = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    sees_only_own = num_ranks > 1 and len(gpus) == num_servers
    first = (0 if sees_only_own else local_rank * num_servers) + server_index * gpus_per_server
    if first + gpus_per_server > len(gpus):
        raise ConfigError(
            f"engine.replicas: {num_ranks} processes on this node with {num_servers} servers of "
            f"{gpus_per_server} GPUs each need {num_ranks * num_servers} GPUs, and this process "
            f"sees {len(gpus)}; give the stage more GPUs on a node, or lower engine.replicas or "
            "the layout's tp"
        )
    return ",".join(gpus[first : first + gpus_per_server])
