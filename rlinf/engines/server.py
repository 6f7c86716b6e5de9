"""Engines that are servers in processes of their own, under their own interpreter.

The stage's process stays under its usual one and only asks. What the server reads are copies in a
private folder in memory (``/dev/shm``): checked as they are copied, and there for as long as they
are served, so that a server that dies can be started again. The folder also holds their sockets.
"""

from __future__ import annotations

import collections
import filecmp
import os
import shutil
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlinf.channels.world import ParallelLayout
from rlinf.checked import copy_file
from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Hooks, Requests
from rlinf.engines.concurrent import Concurrent
from rlinf.engines.divided import GPUS, Copy, check_heads, own_gpus
from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.inside import start
from rlinf.engines.legs import Ask, Leg, Legs
from rlinf.engines.process import Gone, ServerError, ServerProcess
from rlinf.engines.replicas import Replicas
from rlinf.interpreters import interpreter
from rlinf.models.loading import text_settings
from rlinf.models.published_folder import WEIGHTS, companions, copy_companions, weight_files
from rlinf.residency import Size
from rlinf.segments import SHM, segment_name
from rlinf.tensors import State, save_tensors

INSIDE = Path(start.__file__).parent
"""What servers import of this package; its folder is on their module search path."""


class ServerConfig(ExternalConfig):
    """What engines with a server have in common; what is said of one holds for each server."""

    server_python: str
    """The interpreter of the server: a path, or an environment of ``make env``."""
    replicas: int = Field(default=1, gt=0)
    """Servers with the same weights, of each copy of the model; on GPUs each has its own."""
    imbalance: int = Field(default=32, ge=0)
    """Requests go to the server that has read their prefix, unless so many more are under way there
    than at the least loaded one."""
    start_s: float = Field(default=600.0, gt=0)
    """The longest that a server takes to come up."""
    answer_s: float = Field(default=3600.0, gt=0)
    """The longest that it takes to answer; then it counts as dead."""
    silent_s: float = Field(default=300.0, gt=0)
    """The longest that it may not even say that it is alive while samples are under way. A step,
    of prompts say, must be through within it."""


class ServerEngine(ExternalEngine):
    """See the module. A subclass says how its server is started and asked."""

    Config = ServerConfig
    layouts = frozenset({"tp"})
    module: ClassVar[str]
    """What its interpreter runs."""
    health: ClassVar[str] = "/health"
    """The route that answers once it is up."""
    pulse: ClassVar[str] = "/health"
    """The route that answers as long as it decodes, or could."""
    package: ClassVar[str]
    """What that interpreter must have."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self._folder: Path | None = None
        self._asleep = False
        self._copy: Copy | None = None
        self._servers = Replicas(config.replicas, config.imbalance, self._begin, self._ready)

    @classmethod
    def rows(cls, config: Any) -> int:
        return int(config.max_rows * config.replicas)

    @classmethod
    def interpreters(cls, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {"server_python": (config.server_python, (cls.package,))}

    @classmethod
    def check_layout(cls, config: Any, policy: Any, layout: ParallelLayout, key: str) -> None:
        check_heads(text_settings(policy), layout.tp, key)

    # What a subclass says.

    @abstractmethod
    def command(self, model: Path, context: int, socket: Path) -> list[str]:
        """Arguments of a server that listens at a socket."""

    @abstractmethod
    def variables(self, socket: Path) -> Mapping[str, str]:
        """Of the environment of the server that listens there."""

    @abstractmethod
    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Route and body of a request."""

    @abstractmethod
    def answer(self, values: Any) -> Leg:
        """What the server answered to :meth:`body`."""

    @abstractmethod
    def update(self, process: ServerProcess, folder: Path, version: int) -> None:
        """Have a server read the weights of a folder into the loaded network, nothing under way,
        and forget what it cached under the old ones."""

    @abstractmethod
    def stop(self, process: ServerProcess) -> None:
        """End what is under way at a server; each request is answered with what there is of it."""

    def started(self, process: ServerProcess) -> None:
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
        return self._servers.up

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        if not self.world.speaks:
            self._known(folder)
            self._serve(version, update=False)
            return
        model = self._own_folder() / "model"
        self._servers.settle()  # one that is being started reads what is there
        same = bool(self._servers.up) and _same_files(folder, model)
        if not same:
            self._servers.close()
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            copy_companions(folder, model)
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
        if not self.world.speaks:
            # The others may need it to take part.
            collections.deque(self._published.of(tensors), maxlen=0)
            self._serve(version, update=False)
            return
        model = self._own_folder() / "model"
        self._servers.settle()
        for path in model.glob("*.safetensors*"):
            path.unlink()
        state = State(self._published.like, self._published.of(tensors))
        save_tensors(model / WEIGHTS, state, state.like.keys(), {"format": "pt"})
        self._serve(version, update=True)

    def generate(
        self, requests: Requests, *, seed: int, stage: str, hooks: Hooks = NO_HOOKS
    ) -> Iterator[Record]:
        try:
            most = self.rows(self._config)
            yield from Legs(self, Concurrent(self), requests, seed, stage, hooks, most).replies()
        finally:
            self._through()

    def assist(self, *, seed: int, stage: str) -> None:
        self._through()

    def _through(self) -> None:
        """A batch is generated: processes that share the server may have their GPUs back."""
        if self.world.layout.tp == 1:
            return
        if self.sleeps:
            self.offload("server", 0)
        self._together()

    def _together(self) -> None:
        """Wait for the processes that share the server, where there are some."""
        if self.world.layout.tp > 1:
            self._copy = self._copy or Copy(self.world, self.device.type)
            self._copy.meet()

    def size(self) -> dict[str, Size]:
        """Weights and cache of one server, on a GPU of it: others have GPUs of their own."""
        if not self.sleeps or self.version < 0:
            return {}
        whole = self._device_bytes()
        return {"server": Size(0, whole, 0) if self._asleep else Size(whole, 0, 0)}

    def offload(self, group: str, least: int) -> int:
        freed = self.size()[group].here
        if freed:
            self._servers.settle()
            self._servers.each(self.sleep)
            self._asleep = True
        return freed

    def onload(self, groups: Collection[str], *, filled: bool) -> None:
        """The weights come from the folder, where they are anyway: no server keeps them twice."""
        if not self._asleep or not groups:
            return
        if filled:
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

    def leg(self, ask: Ask) -> Leg:
        self.check_room(ask)
        route, body = self.body(ask)
        said = self._servers.ask(ask.tokens, route, body, lambda values: self.answer(values).tokens)
        return self.answer(said)

    def abort(self) -> None:
        self._servers.each(self.stop)

    def revive(self) -> None:
        self._servers.revive()

    def tail(self) -> str:
        return self._servers.tail()

    def _known(self, model: Path) -> None:
        super()._known(model)
        check_heads(self._settings, self.world.layout.tp)

    def _serve(self, version: int, *, update: bool) -> None:
        """Have the weights that are in the folder served.

        Args:
            update: servers that are up read them; else all are started anew.
        """
        asleep, self._asleep = self._asleep, False
        self._together()  # the others have made room on their GPUs
        self.version = version
        if not self.world.speaks:
            return
        self.version = -1
        model = self._own_folder() / "model"

        def read(process: ServerProcess) -> None:
            if asleep:
                self.wake(process)
            self.update(process, model, version)

        self._servers.start(read if update else None)
        self.version = version

    def _begin(self, number: int) -> ServerProcess:
        """Start the server of a number."""
        folder, config = self._own_folder(), self._config
        model, socket = folder / "model", folder / f"http-{number}"
        socket.unlink(missing_ok=True)
        logs, several = self.logs or folder, f"-{number}" if config.replicas > 1 else ""
        own = {}
        if self.device.type == "cuda":
            world = self.world
            own = {GPUS: own_gpus(world.local_rank, number, config.replicas, world.layout.tp)}
        return ServerProcess(
            interpreter(config.server_python, "engine.server_python"),
            self.module,
            [*self.command(model, self._context, socket), *config.arguments],
            {
                "TMPDIR": str(folder),
                "PYTHONPATH": str(INSIDE),
                "OMP_NUM_THREADS": str(config.threads),
                "HF_HUB_OFFLINE": "1",
                # All of its processes are on this node. Of NCCL "lo" alone is how a name begins.
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "=lo",
                **own,
                **self.variables(socket),
            },
            socket,
            logs / f"{type(self).__name__}-{os.uname().nodename}-{os.getpid()}{several}.log",
            config.answer_s,
            self.pulse,
            config.silent_s,
        )

    def _ready(self, process: ServerProcess) -> None:
        """Wait until a server is up."""
        process.wait(self.health, self._config.start_s)
        try:
            self.started(process)
        except Gone as error:
            raise ServerError(
                f"a server died as it came up ({error}); the end of its log:\n{process.tail()}"
            ) from None

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = SHM / segment_name()
            self._folder.mkdir(mode=0o700)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _same_files(folder: Path, other: Path) -> bool:
    """Whether two folders have the same network and tokenizer: the files beside the weights."""
    names = companions(folder)
    return names == companions(other) and all(
        filecmp.cmp(folder / name, other / name, shallow=False) for name in names
    )
