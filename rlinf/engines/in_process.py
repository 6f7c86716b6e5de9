"""Engines of other projects in the process of the stage, which runs under their interpreter
(``engine.python``).

One is stepped by the thread that asks for replies, so that a batch is composed alike each time. Its
first weights come as all later ones: tensor by tensor, into the memory that they are read from as
it computes. What its start changes for the whole process is put back; see :func:`apart`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.data.record import Record
from rlinf.device_memory import MemorySize
from rlinf.engines.base import NO_HOOKS, RequestReceiver, RolloutHooks
from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.resumable import ResumableGeneration, SegmentDecoder
from rlinf.errors import ConfigError, DataError
from rlinf.models.hf_folder import non_weight_files
from rlinf.models.loading import iter_weights, load_meta_module
from rlinf.verified_io import read_bytes, verified_temporary_copy


class InProcessEngine(ExternalEngine):
    """See the module. A subclass says how the other project's engine is made and used."""

    Config = ExternalConfig

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self.backend: Any = None
        """The other project's; None where no network is loaded."""
        self._network: dict[str, bytes] = {}
        """What stands beside the weights of the network that is loaded."""
        self._asleep = self._owns_group = False

    # What a subclass says.

    @abstractmethod
    def create_backend(self, model: Path) -> None:
        """Make ``inner`` for the network of a folder without weights, which is gone afterwards;
        any weights."""

    @abstractmethod
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have weights, by their published names, in the memory that it computes with, and forget
        what was cached under others. What fails leaves anything there."""

    @abstractmethod
    def shut_down(self, inner: Any) -> None:
        """Take down what :meth:`make` made."""

    @abstractmethod
    def sleep(self) -> None:
        """Move its weights into the host's memory, and free its cache."""

    @abstractmethod
    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    @abstractmethod
    def create_decoder(self) -> SegmentDecoder:
        """Of the legs of one call of generate."""

    @contextlib.contextmanager
    def close_on_error(self) -> Iterator[None]:
        """What fails within leaves the engine closed: requests would be half done in it."""
        try:
            with force_eager_on_cpu(self.device):
                yield
        except BaseException:
            self.close()
            raise

    # The engine.

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        network = {name: bytes(read_bytes(folder / name)) for name in non_weight_files(folder)}
        if self.backend is None or network != self._network:
            self.close()  # the old ones leave the memory first
            self._known(folder)
            try:
                with verified_temporary_copy(folder, non_weight_files(folder)) as small:
                    self._start(small)
            except BaseException:
                self.close()  # it may be half made
                self._network = {}
                raise
            finally:
                gc.unfreeze()  # some freeze all that there is, of whichever part of the process
            self._network = network
        module, where = load_meta_module(folder, self._policy_config), f"model.path: {folder}"
        tensors = iter_weights(module, folder, where)
        # Else they have their published names there.
        self._take(tensors if module is None else self._own(tensors))
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.backend is None:
            raise DataError("no network is loaded that weights could be of; load a folder first")
        self.version = -1
        self._take(self._own(tensors))
        self.version = version

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        most = self._config.max_num_seqs
        return ResumableGeneration(
            self, self.create_decoder(), requests, seed, stage, hooks, most
        ).iter_replies()

    def group_sizes(self) -> dict[str, MemorySize]:
        if not self.can_sleep or self.backend is None:
            return {}
        whole = self._device_bytes()
        return {"engine": MemorySize(0, whole, 0) if self._asleep else MemorySize(whole, 0, 0)}

    def offload(self, group: str, min_bytes: int) -> int:
        freed = self.group_sizes()[group].on_device
        if freed:
            self.sleep()
            self._asleep = True
        return freed

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        if groups and copy_data:
            self._awake()
        # Else weights come next: it wakes for these.

    def close(self) -> None:
        inner, self.backend, self._asleep, self.version = self.backend, None, False, -1
        if inner is not None:
            with preserve_process_group():
                self.shut_down(inner)
            del inner
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False

    def _start(self, model: Path) -> None:
        several = self.world.size > 1
        if several and dist.is_initialized():
            name = self._name()
            raise ConfigError(
                f"engine.name: {name} cannot share a process with a trainer of "
                f"{dist.get_world_size()} processes; give rollout a pool of its own in the plan, "
                f"or set engine={name.removesuffix('_in_process')}"
            )
        # The other project takes the group that is there, and a trainer in this process finds it.
        ProcessGroupInfo().init_process_group(self.device.type)
        self._owns_group = several
        torch.set_num_threads(self._config.threads)
        try:
            with preserve_process_group():
                self.create_backend(model)
        except SystemExit:  # of a parser, which has said why
            raise ConfigError(
                f"engine.extra_args: {self._name()} does not take all of "
                f"{list(self._config.extra_args)}; what it takes is printed above"
            ) from None

    def _own(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What is published of the network's own tensors."""
        # Some are kept until others have come that they are joined with.
        return self._published.export(tensors, self.device, copy=True)

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have other weights of the network served, and forget what was cached under the old ones.

        Args:
            tensors: by their published names.

        Raises:
            DataError: they do not fit; it is closed then.
        """
        self._awake()
        with self.close_on_error():
            self.update_weights(tensors)

    def _awake(self) -> None:
        if self._asleep:
            self.wake()
            self._asleep = False

    @classmethod
    def _name(cls) -> str:
        """As configurations have it."""
        return cls.__module__.rpartition(".")[2]


@contextlib.contextmanager
def restore_process_state(
    device: torch.device, variables: Mapping[str, str], persistent_prefix: str
) -> Iterator[None]:
    """What an engine sets for the whole process as it starts is as before in the end.

    On CPUs those are variables of the environment, which other processes would inherit, and
    torch.set_num_threads, which vLLM makes do nothing; the handlers of messages, which SGLang
    closes.

    Args:
        variables: of the environment, for its start.
        kept: how the names of variables begin that stay, as they are read once, or later.
    """
    set_threads, before, root = torch.set_num_threads, dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # closed they would be of no use
    os.environ.update(variables)
    try:
        with force_eager_on_cpu(device):
            yield
    finally:
        torch.set_num_threads = set_threads
        root.handlers[:] = handlers
        root.setLevel(level)
        changed = [name for name, value in os.environ.items() if before.get(name) != value]
        for name in {*changed, *before} - {n for n in changed if n.startswith(persistent_prefix)}:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def force_eager_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On CPUs nothing is compiled: it takes minutes, and the functions are small."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def preserve_process_group() -> Iterator[None]:
    """The default process group outlives what would destroy it: it is not the engine's."""
    destroy = dist.destroy_process_group

    def others(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
