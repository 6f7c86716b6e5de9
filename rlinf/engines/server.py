"""Engines that are servers in processes of their own, under their own interpreter.

The stage's process stays under its usual one and only asks. What the server reads are copies in a
private folder in memory (``/dev/shm``): checked as they are copied, and there for as long as they
are served, so that a server that dies can be started again. The folder also holds their sockets.
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
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor

from rlinf.channels.process_group import ParallelLayout
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
from rlinf.engines.tensor_parallel import (
    CUDA_VISIBLE_DEVICES,
    ReplicaGroup,
    check_attention_heads,
    server_gpus,
)
from rlinf.interpreters import resolve_interpreter
from rlinf.models.hf_folder import (
    WEIGHTS_FILE,
    copy_non_weight_files,
    non_weight_files,
    weight_files,
)
from rlinf.models.loading import text_config
from rlinf.safetensors_io import StreamedState, save_tensors
from rlinf.shared_memory import SHM_FOLDER, new_segment_name
from rlinf.verified_io import copy_file

DECODER_POLL_S = 0.005
"""How often newer requests, and hooks, are looked for while samples are under way."""
MAX_SERVER_LOSSES = 3
"""Servers that may die, one after the other, with the same sample under way."""
ABORT_INTERVAL_S = 0.05
"""How often what is under way is told to end: a request on its way in hears nothing of it."""


class SegmentServers(Protocol):
    """What is asked of an engine with servers."""

    def generate_segment(self, request: SegmentRequest) -> GeneratedSegment:
        """Decode; in any thread. Raises Gone where the server died, DataError where it refuses."""

    def abort(self) -> None:
        """End all legs under way; each is answered with what there is of it."""

    def restart_failed(self) -> None:
        """Replace what died; raises ServerError where nothing is left and nothing comes up."""

    def log_tail(self) -> str:
        """The end of a log."""


class ConcurrentDecoder:
    """See :class:`rlinf.engines.resumable.SegmentDecoder`."""

    def __init__(self, servers: SegmentServers) -> None:
        self._servers = servers
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[tuple[ResumableSample, GeneratedSegment | Exception]] = (
            queue.SimpleQueue()
        )
        self._threads = self._running = 0
        self._died = False

    def __len__(self) -> int:
        return self._running

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        if self._died:
            # Others of what died come back by themselves; what is under way elsewhere goes on.
            self._died = False
            self._servers.restart_failed()
        self._running += 1
        if self._threads < self._running:
            self._threads += 1
            name = f"leg-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._orders.put(partial(self._decode, sample, request))

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        found, wait_s = list[tuple[ResumableSample, GeneratedSegment | Exception]](), DECODER_POLL_S
        while self._running:
            try:
                sample, leg = self._back.get(timeout=wait_s)
            except queue.Empty:
                break
            wait_s = 0.0
            found.append(self._came(sample, leg))
        return found

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        while self._running:
            try:
                sample, leg = self._back.get(timeout=ABORT_INTERVAL_S)
            except queue.Empty:
                with contextlib.suppress(ServerUnavailable):
                    self._servers.abort()
                continue
            yield self._came(sample, leg)

    def close(self) -> None:
        for _ in range(self._threads):
            self._orders.put(None)

    def _came(
        self, sample: ResumableSample, leg: GeneratedSegment | Exception
    ) -> tuple[ResumableSample, GeneratedSegment | Exception]:
        """What a thread brought back; of what a dying server took with it there is nothing."""
        self._running -= 1
        if not isinstance(leg, ServerUnavailable):
            return sample, leg
        self._died = True
        sample.server_losses += 1
        if sample.server_losses < MAX_SERVER_LOSSES:
            return sample, GeneratedSegment([], [], "abort")
        return sample, ServerError(
            f"{MAX_SERVER_LOSSES} servers died with the same sample under way ({leg}); the end of the last "
            f"one's log:\n{self._servers.log_tail()}"
        )

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _decode(self, sample: ResumableSample, ask: SegmentRequest) -> None:
        try:
            self._back.put((sample, self._servers.generate_segment(ask)))
        except Exception as error:  # raised where replies are asked for
            self._back.put((sample, error))


PLUGIN_FOLDER = Path(server_launcher.__file__).parent
"""What servers import of this package; its folder is on their module search path."""


class ServerConfig(ExternalConfig):
    """What engines with a server have in common; what is said of one holds for each server."""

    server_python: str
    """The interpreter of the server: a path, or an environment of ``make env``."""
    replicas: int = Field(default=1, gt=0)
    """Servers with the same weights, of each copy of the model; on GPUs each has its own."""
    max_load_imbalance: int = Field(default=32, ge=0)
    """Requests go to the server that has read their prefix, unless so many more are under way there
    than at the least loaded one."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """The longest that a server takes to come up."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """The longest that it takes to answer; then it counts as dead."""
    heartbeat_timeout_s: float = Field(default=300.0, gt=0)
    """The longest that it may not even say that it is alive while samples are under way. A step,
    of prompts say, must be through within it."""


class ServerEngine(ExternalEngine):
    """See the module. A subclass says how its server is started and asked."""

    Config = ServerConfig
    supported_layouts = frozenset({"tp"})
    server_module: ClassVar[str]
    """What its interpreter runs."""
    health_route: ClassVar[str] = "/health"
    """The route that answers once it is up."""
    heartbeat_route: ClassVar[str] = "/health"
    """The route that answers as long as it decodes, or could."""
    server_package: ClassVar[str]
    """What that interpreter must have."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self._folder: Path | None = None
        self._asleep = False
        self._copy: ReplicaGroup | None = None
        self._servers = Replicas(
            config.replicas, config.max_load_imbalance, self._begin, self._ready
        )

    @classmethod
    def max_batch(cls, config: Any) -> int:
        return int(config.max_num_seqs * config.replicas)

    @classmethod
    def interpreters(cls, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {"server_python": (config.server_python, (cls.server_package,))}

    @classmethod
    def check_layout(cls, config: Any, policy: Any, layout: ParallelLayout, key: str) -> None:
        check_attention_heads(text_config(policy), layout.tp, key)

    # What a subclass says.

    @abstractmethod
    def server_args(self, model: Path, context: int, socket: Path) -> list[str]:
        """Arguments of a server that listens at a socket."""

    @abstractmethod
    def server_environment(self, socket: Path) -> Mapping[str, str]:
        """Of the environment of the server that listens there."""

    @abstractmethod
    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        """Route and body of a request."""

    @abstractmethod
    def parse_response(self, values: Any) -> GeneratedSegment:
        """What the server answered to :meth:`body`."""

    @abstractmethod
    def update_weights(self, process: ServerProcess, folder: Path, version: int) -> None:
        """Have a server read the weights of a folder into the loaded network, nothing under way,
        and forget what it cached under the old ones."""

    @abstractmethod
    def abort_requests(self, process: ServerProcess) -> None:
        """End what is under way at a server; each request is answered with what there is of it."""

    def on_server_ready(self, process: ServerProcess) -> None:
        """A server is up, and nothing was asked yet."""

    @abstractmethod
    def sleep(self, process: ServerProcess) -> None:
        """Have a server free weights and cache; what was in them is lost."""

    @abstractmethod
    def wake(self, process: ServerProcess) -> None:
        """Have a server take memory for both again; :meth:`update` follows."""

    # The engine.

    @property
    def processes(self) -> list[ServerProcess]:
        """The servers that are up."""
        return self._servers.running

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        if not self.world.is_primary:
            self._known(folder)
            self._serve(version, update=False)
            return
        model = self._own_folder() / "model"
        self._servers.wait_ready()  # one that is being started reads what is there
        same = bool(self._servers.running) and _same_files(folder, model)
        if not same:
            self._servers.close()
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            copy_non_weight_files(folder, model)
        for path in model.glob("*.safetensors*"):
            path.unlink()
        # One at a time: the old and the new ones need not be there together.
        for path in weight_files(folder):
            copy_file(path, model / path.name)
        if not same:
            self._known(model)
        self._serve(version, update=same)

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        if not self.world.is_primary:
            # The others may need it to take part.
            collections.deque(self._published.export(tensors), maxlen=0)
            self._serve(version, update=False)
            return
        model = self._own_folder() / "model"
        self._servers.wait_ready()
        for path in model.glob("*.safetensors*"):
            path.unlink()
        state = StreamedState(self._published.meta_tensors, self._published.export(tensors))
        save_tensors(model / WEIGHTS_FILE, state, state.templates.keys(), {"format": "pt"})
        self._serve(version, update=True)

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        try:
            most = self.max_batch(self._config)
            yield from ResumableGeneration(
                self, ConcurrentDecoder(self), requests, seed, stage, hooks, most
            ).iter_replies()
        finally:
            self._through()

    def run_follower(self, *, seed: int, stage: str) -> None:
        self._through()

    def _through(self) -> None:
        """A batch is generated: processes that share the server may have their GPUs back."""
        if self.world.layout.tp == 1:
            return
        if self.can_sleep:
            self.offload("server", 0)
        self._together()

    def _together(self) -> None:
        """Wait for the processes that share the server, where there are some."""
        if self.world.layout.tp > 1:
            self._copy = self._copy or ReplicaGroup(self.world, self.device.type)
            self._copy.barrier()

    def group_sizes(self) -> dict[str, MemorySize]:
        """Weights and cache of one server, on a GPU of it: others have GPUs of their own."""
        if not self.can_sleep or self.version < 0:
            return {}
        whole = self._device_bytes()
        return {"server": MemorySize(0, whole, 0) if self._asleep else MemorySize(whole, 0, 0)}

    def offload(self, group: str, min_bytes: int) -> int:
        freed = self.group_sizes()[group].on_device
        if freed:
            self._servers.wait_ready()
            self._servers.for_each(self.sleep)
            self._asleep = True
        return freed

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """The weights come from the folder, where they are anyway: no server keeps them twice."""
        if not self._asleep or not groups:
            return
        if copy_data:
            self._serve(self.version, update=True)
        # Else weights come next: the servers wake for these.

    def close(self) -> None:
        self._servers.close()
        self._asleep = False
        self.version = -1
        if self._folder is not None:
            self._remove()
            self._folder = None

    # What a call of generate asks for.

    def generate_segment(self, request: SegmentRequest) -> GeneratedSegment:
        self.check_length(request)
        route, body = self.build_request(request)
        said = self._servers.request(
            request.context_tokens, route, body, lambda values: self.parse_response(values).tokens
        )
        return self.parse_response(said)

    def abort(self) -> None:
        self._servers.for_each(self.abort_requests)

    def restart_failed(self) -> None:
        self._servers.restart_failed()

    def log_tail(self) -> str:
        return self._servers.log_tail()

    def _known(self, model: Path) -> None:
        super()._known(model)
        check_attention_heads(self._settings, self.world.layout.tp)

    def _serve(self, version: int, *, update: bool) -> None:
        """Have the weights that are in the folder served.

        Args:
            update: servers that are up read them; else all are started anew.
        """
        asleep, self._asleep = self._asleep, False
        self._together()  # the others have made room on their GPUs
        self.version = version
        if not self.world.is_primary:
            return
        self.version = -1
        model = self._own_folder() / "model"

        def read(process: ServerProcess) -> None:
            if asleep:
                self.wake(process)
            self.update_weights(process, model, version)

        self._servers.start(read if update else None)
        self.version = version

    def _begin(self, number: int) -> ServerProcess:
        """Start the server of a number."""
        folder, config = self._own_folder(), self._config
        model, socket = folder / "model", folder / f"http-{number}"
        socket.unlink(missing_ok=True)
        logs, several = self.log_folder or folder, f"-{number}" if config.replicas > 1 else ""
        own = {}
        if self.device.type == "cuda":
            world = self.world
            own = {
                CUDA_VISIBLE_DEVICES: server_gpus(
                    world.local_rank, number, config.replicas, world.layout.tp
                )
            }
        return ServerProcess(
            resolve_interpreter(config.server_python, "engine.server_python"),
            self.server_module,
            [*self.server_args(model, self._context, socket), *config.extra_args],
            {
                "TMPDIR": str(folder),
                "PYTHONPATH": str(PLUGIN_FOLDER),
                "OMP_NUM_THREADS": str(config.threads),
                "HF_HUB_OFFLINE": "1",
                # All of its processes are on this node. Of NCCL "lo" alone is how a name begins.
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "=lo",
                **own,
                **self.server_environment(socket),
            },
            socket,
            logs / f"{type(self).__name__}-{os.uname().nodename}-{os.getpid()}{several}.log",
            config.request_timeout_s,
            self.heartbeat_route,
            config.heartbeat_timeout_s,
        )

    def _ready(self, process: ServerProcess) -> None:
        """Wait until a server is up."""
        process.wait_ready(self.health_route, self._config.startup_timeout_s)
        try:
            self.on_server_ready(process)
        except ServerUnavailable as error:
            raise ServerError(
                f"a server died as it came up ({error}); the end of its log:\n{process.log_tail()}"
            ) from None

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = SHM_FOLDER / new_segment_name()
            self._folder.mkdir(mode=0o700)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _same_files(folder: Path, other: Path) -> bool:
    """Whether two folders have the same network and tokenizer: the files beside the weights."""
    names = non_weight_files(folder)
    return names == non_weight_files(other) and all(
        filecmp.cmp(folder / name, other / name, shallow=False) for name in names
    )
