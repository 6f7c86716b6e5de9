"""Engines that are a server in a process of its own, under its own interpreter.

The stage's process stays under its usual one and only asks. What the server reads are copies in a
private folder in memory (``/dev/shm``): checked as they are copied, and there for as long as they
are served, so that a server that dies can be started again. The folder also holds its socket.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from rlinf.engines.process import Gone, ServerProcess
from rlinf.errors import DataError
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
from rlinf.segments import SHM, segment_name
from rlinf.tensors import State, save_tensors

INSIDE = Path(start.__file__).parent
"""What servers import of this package; its folder is on their module search path."""
CONFIGURATION = "config.json"


class ServerConfig(Section):
    """What engines with a server have in common."""

    server_python: str
    """The interpreter of the server: a path, or an environment of ``make env``."""
    python: str | None = None
    """The interpreter of the stages that ask it; see :mod:`rlinf.interpreters`."""
    max_rows: int = Field(default=256, gt=0)
    """Most samples decoded at once."""
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
        self._process: ServerProcess | None = None

    @classmethod
    def takes_dtype(cls, config: Any) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def rows(cls, config: Any) -> int:
        return int(config.max_rows)

    @classmethod
    def interpreters(cls, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        return {"server_python": (config.server_python, (cls.package,))}

    # What a subclass says.

    @abstractmethod
    def command(self, model: Path, context: int) -> list[str]:
        """Arguments of a server that listens at :attr:`socket`."""

    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Of the server's environment."""

    @abstractmethod
    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Route and body of a request."""

    @abstractmethod
    def answer(self, values: Any) -> Leg:
        """What the server answered to :meth:`body`."""

    @abstractmethod
    def update(self, folder: Path, version: int) -> None:
        """Have the server read the weights of a folder into the loaded network, nothing under way,
        and forget what it cached under the old ones."""

    @abstractmethod
    def abort(self) -> None: ...

    def started(self) -> None:
        """The server is up, and nothing was asked yet."""

    # The engine.

    @property
    def socket(self) -> Path:
        """Where the server listens."""
        return self._own_folder() / "http"

    @property
    def process(self) -> ServerProcess:
        """The server."""
        assert self._process is not None, "weights come first"
        return self._process

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        model = self._own_folder() / "model"
        same = self._process is not None and _same_files(folder, model)
        if not same:
            self._stop()
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
        self._serve(version, update=self._process is not None)

    def generate(
        self, requests: Requests, *, seed: int, stage: str, hooks: Hooks = NO_HOOKS
    ) -> Iterator[Record]:
        return Legs(self, requests, seed, stage, hooks, self._config.max_rows).replies()

    def close(self) -> None:
        self._stop()
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
        return self.answer(self.process.post(route, body))

    def revive(self) -> None:
        version = self.version
        self._stop()
        self._serve(version, update=False)

    def tail(self) -> str:
        return self.process.tail()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _known(self, model: Path) -> None:
        """Learn of a network what requests need."""
        config = self._policy_config
        module = outline_module(model, config) or load_module(model, config)
        self._like: dict[str, Tensor] = module.state_dict(keep_vars=True)
        seen: dict[int, str] = {}
        self._tied = {n for n, t in self._like.items() if seen.setdefault(id(t), n) != n}
        self._tokenizer = load_tokenizer(model, config.trust_remote_code)
        ends = () if self._config.ignore_eos else stop_tokens(module, self._tokenizer)
        self.stops = frozenset(ends)

    def _serve(self, version: int, *, update: bool) -> None:
        """Have the weights that are in the folder served."""
        model = self._own_folder() / "model"
        if update:
            try:
                self.update(model, version)
            except Gone:
                self._stop()
                update = False
        if not update:
            self._start(model)
        self.version = version

    def _start(self, model: Path) -> None:
        folder = self._own_folder()
        self.socket.unlink(missing_ok=True)
        config = self._config
        self._context = config.context or positions(read_settings(model)) or 4096
        logs = self.logs or folder
        self._process = ServerProcess(
            interpreter(config.server_python, "engine.server_python"),
            self.module,
            [*self.command(model, self._context), *config.arguments],
            {
                "TMPDIR": str(folder),
                "PYTHONPATH": str(INSIDE),
                "OMP_NUM_THREADS": str(config.threads),
                "HF_HUB_OFFLINE": "1",
                **self.variables(),
            },
            self.socket,
            logs / f"{type(self).__name__}-{os.uname().nodename}-{os.getpid()}.log",
            config.answer_s,
        )
        self._process.wait(self.health, config.start_s)
        self.started()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = SHM / segment_name()
            self._folder.mkdir(mode=0o700)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


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
