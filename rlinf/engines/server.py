"""Engines that are servers in processes of their own, under their own interpreter.

The stage's process stays under its usual one and only asks. What the server reads are copies in a
private folder in memory (``/dev/shm``): checked as they are copied, and there for as long as they
are served, so that a server that dies can be started again. The folder also holds their sockets.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlinf.checked import copy_file
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Engine, Hooks, Requests
from rlinf.engines.inside import start
from rlinf.engines.legs import Ask, Leg, Legs
from rlinf.engines.process import Gone, ServerError, ServerProcess
from rlinf.engines.replicas import Replicas
from rlinf.errors import ConfigError, DataError
from rlinf.fit import LANGUAGE_MODEL
from rlinf.interpreters import interpreter
from rlinf.models.base import misfit
from rlinf.models.causal_lm import CausalLMConfig, load_tokenizer
from rlinf.models.device import DeviceName, local_device
from rlinf.models.headers import positions, read_settings
from rlinf.models.loading import (
    WEIGHTS,
    companions,
    copy_companions,
    load_module,
    outline_module,
    stop_tokens,
    tensor_files,
)
from rlinf.residency import Size
from rlinf.segments import SHM, segment_name
from rlinf.tensors import State, save_tensors

INSIDE = Path(start.__file__).parent
"""What servers import of this package; its folder is on their module search path."""
GPUS = "CUDA_VISIBLE_DEVICES"


class ServerConfig(Section):
    """What engines with a server have in common."""

    server_python: str
    """The interpreter of the server: a path, or an environment of ``make env``."""
    python: str | None = None
    """The interpreter of the stages that ask it; see :mod:`rlinf.interpreters`."""
    replicas: int = Field(default=1, gt=0)
    """Servers with the same weights, of each process of the stage; on GPUs each has one of its
    own."""
    imbalance: int = Field(default=32, ge=0)
    """Requests go to the server that has read their prefix, unless so many more are under way there
    than at the least loaded one."""
    max_rows: int = Field(default=256, gt=0)
    """Most samples that a server decodes at once."""
    threads: int = Field(default=1, gt=0)
    """Threads of the server's worker on a CPU."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights it generates with; null: that of the model."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Memory for cached keys and values."""
    context: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt and its response together; null: as many as the model takes."""
    start_s: float = Field(default=600.0, gt=0)
    """The longest that a server takes to come up."""
    answer_s: float = Field(default=3600.0, gt=0)
    """The longest that it takes to answer; then it counts as dead."""
    ignore_eos: bool = False
    """Decode to the horizon whatever is sampled (for benchmarks)."""
    arguments: tuple[str, ...] = ()
    """Of its command line, after those that are given anyway."""


class ServerEngine(Engine):
    """See the module. A subclass says how its server is started and asked."""

    Config = ServerConfig
    needs = frozenset({LANGUAGE_MODEL})
    module: ClassVar[str]
    """What its interpreter runs."""
    health: ClassVar[str] = "/health"
    """The route that answers once it is up."""
    package: ClassVar[str]
    """What that interpreter must have."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy_config: CausalLMConfig = policy_config
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self.stops = frozenset[int]()
        self._folder: Path | None = None
        self._asleep = False
        self._servers = Replicas(config.replicas, config.imbalance, self._begin, self._ready)

    @classmethod
    def takes_dtype(cls, config: Any) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def rows(cls, config: Any) -> int:
        return int(config.max_rows * config.replicas)

    @classmethod
    def interpreters(cls, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {"server_python": (config.server_python, (cls.package,))}

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

    @property
    def sleeps(self) -> bool:
        """Whether servers let go of their device's memory between two calls."""
        return self.device.type != "cpu"

    @abstractmethod
    def sleep(self, process: ServerProcess) -> None:
        """Have a server free weights and cache; what was in them is lost."""

    @abstractmethod
    def wake(self, process: ServerProcess) -> None:
        """Have a server take memory for both again; :meth:`update` follows."""

    def cache_bytes(self) -> int:
        """Of a server, for cached keys and values."""
        return int(self._config.cache_gib * 2**30)

    # The engine.

    @property
    def processes(self) -> list[ServerProcess]:
        """The servers that are up."""
        return self._servers.up

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
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
        for path in tensor_files(folder):
            copy_file(path, model / path.name)
        for path in folder.glob("*.safetensors.index.json"):
            copy_file(path, model / path.name)
        if not same:
            self._known(model)
        self._serve(version, update=same)

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        model = self._own_folder() / "model"
        self._servers.settle()
        for path in model.glob("*.safetensors*"):
            path.unlink()
        like = self._like
        names = [name for name in like if name not in self._tied]
        try:
            save_tensors(
                model / WEIGHTS, State(like, fitting(tensors, like)), names, {"format": "pt"}
            )
        except ValueError:
            raise misfit(names[0], len(names)) from None
        self._serve(version, update=True)

    def generate(
        self, requests: Requests, *, seed: int, stage: str, hooks: Hooks = NO_HOOKS
    ) -> Iterator[Record]:
        return Legs(self, requests, seed, stage, hooks, self.rows(self._config)).replies()

    def size(self) -> dict[str, Size]:
        """Weights and cache of one server: others have GPUs of their own."""
        if not self.sleeps or not self._servers.up:
            return {}
        weights = sum(t.nbytes for name, t in self._like.items() if name not in self._tied)
        whole = weights + self.cache_bytes()
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
        else:
            self._servers.each(self.wake)
            self._asleep = False

    def close(self) -> None:
        self._servers.close()
        self._asleep = False
        self.version = -1
        if self._folder is not None:
            self._remove()
            self._folder = None

    # What a call of generate asks for.

    def leg(self, ask: Ask) -> Leg:
        if len(ask.tokens) + ask.most > self._context:
            raise DataError(
                f"{len(ask.tokens)} tokens and up to {ask.most} more do not fit into "
                f"{self._context}; shorten prompts or rollout.horizon, or raise engine.context"
            )
        route, body = self.body(ask)
        said = self._servers.ask(ask.tokens, route, body, lambda values: self.answer(values).tokens)
        return self.answer(said)

    def abort(self) -> None:
        self._servers.each(self.stop)

    def revive(self) -> None:
        self._servers.revive()

    def tail(self) -> str:
        return self._servers.tail()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _known(self, model: Path) -> None:
        """Learn of a network what requests need."""
        config = self._policy_config
        module = outline_module(model, config) or load_module(model, config)
        text = read_settings(model)
        self._settings: dict[str, Any] = {**text, **(text.get("text_config") or {})}
        self._like: dict[str, Tensor] = module.state_dict(keep_vars=True)
        seen: dict[int, str] = {}
        self._tied = {n for n, t in self._like.items() if seen.setdefault(id(t), n) != n}
        self._tokenizer = load_tokenizer(model, config.trust_remote_code)
        ends = () if self._config.ignore_eos else stop_tokens(module, self._tokenizer)
        self.stops = frozenset(ends)

    def _serve(self, version: int, *, update: bool) -> None:
        """Have the weights that are in the folder served.

        Args:
            update: servers that are up read them; else all are started anew.
        """
        model = self._own_folder() / "model"
        self._context = self._config.context or positions(read_settings(model)) or 4096

        asleep, self._asleep = self._asleep, False

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
        if config.replicas > 1 and self.device.type == "cuda":
            own = {GPUS: own_gpu(number, config.replicas)}
        return ServerProcess(
            interpreter(config.server_python, "engine.server_python"),
            self.module,
            [*self.command(model, self._context, socket), *config.arguments],
            {
                "TMPDIR": str(folder),
                "PYTHONPATH": str(INSIDE),
                "OMP_NUM_THREADS": str(config.threads),
                "HF_HUB_OFFLINE": "1",
                **own,
                **self.variables(socket),
            },
            socket,
            logs / f"{type(self).__name__}-{os.uname().nodename}-{os.getpid()}{several}.log",
            config.answer_s,
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


def own_gpu(number: int, count: int) -> str:
    """The GPU of one of ``count`` servers, as CUDA_VISIBLE_DEVICES has it.

    Raises:
        ConfigError: this process sees fewer.
    """
    seen = os.environ.get(GPUS)
    names = seen.split(",") if seen else [str(n) for n in range(torch.cuda.device_count())]
    if len(names) < count:
        raise ConfigError(
            f"engine.replicas: {count} servers need a GPU each, and this process sees "
            f"{len(names)}; give the stage more GPUs (one process of it), or lower it"
        )
    return names[number]


def fitting(
    tensors: Iterable[tuple[str, Tensor]], like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as a network has them, on the CPU.

    Raises:
        DataError: one is not the network's by name and shape.
    """
    for name, tensor in tensors:
        if name not in like or like[name].shape != tensor.shape:
            raise misfit(name, 1)
        yield name, tensor.to("cpu", like[name].dtype)


def _same_files(folder: Path, other: Path) -> bool:
    """Whether two folders have the same network and tokenizer: the files beside the weights."""
    names = companions(folder)
    return names == companions(other) and all(
        filecmp.cmp(folder / name, other / name, shallow=False) for name in names
    )
