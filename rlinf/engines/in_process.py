"""Engines that run vLLM or SGLang inside the stage's process.

The *backend* is vLLM or SGLang (the external engine of :mod:`rlinf.engines.resumable`). Its
interpreter (``engine.python``) runs the stage's process.

The thread that iterates over the replies also steps the backend, so the composition of batches is
reproducible. All weights, also the first ones, are copied tensor by tensor into the memory of
the backend. Process-wide changes made at start-up are undone; see :func:`restore_process_state`.
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
    """An engine whose backend runs in the stage's process; subclasses adapt one backend each."""

    Config = ExternalConfig

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self.backend: Any = None
        """The engine object of vLLM or SGLang; None if no model is loaded."""
        self._files: dict[str, bytes] = {}
        """Contents of the loaded model's files except weights, by name."""
        self._is_asleep = self._owns_process_group = False

    # Implemented by subclasses.

    @abstractmethod
    def create_backend(self, model: Path) -> None:
        """Create :attr:`backend` with arbitrary weights.

        Args:
            model: A folder with the model's files without weights; it is deleted afterwards.
        """

    @abstractmethod
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, by their names in Hugging Face checkpoints, into the backend and clear its
        caches. After an error the weights are undefined."""

    @abstractmethod
    def shut_down(self, backend: Any) -> None:
        """Shut down the object that :meth:`create_backend` created."""

    @abstractmethod
    def sleep(self) -> None:
        """Move the weights to host memory and free the KV cache."""

    @abstractmethod
    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    @abstractmethod
    def create_decoder(self) -> SegmentDecoder:
        """Return the segment decoder for one :meth:`generate` call."""

    @contextlib.contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Run a block without torch.compile on CPUs. After an error, close the engine, because
        requests may be half processed."""
        try:
            with force_eager_on_cpu(self.device):
                yield
        except BaseException:
            self.close()
            raise

    # The Engine interface.

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        files = {name: bytes(read_bytes(folder / name)) for name in non_weight_files(folder)}
        if self.backend is None or files != self._files:
            self.close()  # free the old weights first
            self._read_model(folder)
            try:
                with verified_temporary_copy(folder, non_weight_files(folder)) as model:
                    self._start(model)
            except BaseException:
                self.close()  # the backend may be partly initialized
                self._files = {}
                raise
            finally:
                gc.unfreeze()  # some backends freeze all objects of the process
            self._files = files
        module, context = load_meta_module(folder, self._policy_config), f"model.path: {folder}"
        tensors = iter_weights(module, folder, context)
        # If module is None, the tensors already have the names of the checkpoint.
        self._load_tensors(tensors if module is None else self._export(tensors))
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.backend is None:
            raise DataError("no model is loaded; call load with a policy folder first")
        self.version = -1
        self._load_tensors(self._export(tensors))
        self.version = version

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        max_concurrent = self._config.max_num_seqs
        return ResumableGeneration(
            self, self.create_decoder(), requests, seed, stage, hooks, max_concurrent
        ).iter_replies()

    def group_sizes(self) -> dict[str, MemorySize]:
        if not self.can_sleep or self.backend is None:
            return {}
        size = self.device_bytes()
        return {"engine": MemorySize(0, size, 0) if self._is_asleep else MemorySize(size, 0, 0)}

    def offload(self, group: str, min_bytes: int) -> int:
        freed = self.group_sizes()[group].on_device
        if freed:
            self.sleep()
            self._is_asleep = True
        return freed

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        if groups and copy_data:
            self._ensure_awake()
        # Otherwise new weights follow, and loading them wakes the backend.

    def close(self) -> None:
        backend, self.backend, self._is_asleep, self.version = self.backend, None, False, -1
        if backend is not None:
            with preserve_process_group():
                self.shut_down(backend)
            del backend
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self._owns_process_group:
            dist.destroy_process_group()
            self._owns_process_group = False

    def _start(self, model: Path) -> None:
        is_distributed = self.world.size > 1
        if is_distributed and dist.is_initialized():
            name = self._name()
            raise ConfigError(
                f"engine.name: {name} cannot share a process with a trainer of "
                f"{dist.get_world_size()} processes; give rollout a pool of its own in the plan, "
                f"or set engine={name.removesuffix('_in_process')}"
            )
        # The group has only this process. With one rank, a trainer in this process may use it, too.
        ProcessGroupInfo().init_process_group(self.device.type)
        self._owns_process_group = is_distributed
        torch.set_num_threads(self._config.threads)
        try:
            with preserve_process_group():
                self.create_backend(model)
        except SystemExit:  # the argument parser has printed the reason
            raise ConfigError(
                f"engine.extra_args: {self._name()} does not accept all of "
                f"{list(self._config.extra_args)}; its arguments are printed above"
            ) from None

    def _export(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert the network's tensors to the names and shapes of Hugging Face checkpoints."""
        # Copies, because the backend keeps some tensors until it can concatenate them with others.
        return self._exporter.export(tensors, self.device, copy=True)

    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights of the loaded model and clear the caches.

        Args:
            tensors: By their names in Hugging Face checkpoints.

        Raises:
            DataError: The tensors do not fit; the engine is then closed.
        """
        self._ensure_awake()
        with self.close_on_error():
            self.update_weights(tensors)

    def _ensure_awake(self) -> None:
        if self._is_asleep:
            self.wake()
            self._is_asleep = False

    @classmethod
    def _name(cls) -> str:
        """Return the registered name of the engine."""
        return f"{cls.__module__.rpartition('.')[2]}_in_process"


@contextlib.contextmanager
def restore_process_state(
    device: torch.device, variables: Mapping[str, str], persistent_prefix: str
) -> Iterator[None]:
    """Undo the process-wide changes that a backend makes during its start-up.

    This restores environment variables, which other processes would inherit; torch.set_num_threads,
    which vLLM disables on CPUs; and logging handlers, which SGLang closes.

    Args:
        variables: Environment variables for the start-up.
        persistent_prefix: Variables with this prefix stay set, because they are read later.
    """
    set_threads, old_env = torch.set_num_threads, dict(os.environ)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # so that the backend cannot close them
    os.environ.update(variables)
    try:
        with force_eager_on_cpu(device):
            yield
    finally:
        torch.set_num_threads = set_threads
        root.handlers[:] = handlers
        root.setLevel(level)
        changed = [name for name, value in os.environ.items() if old_env.get(name) != value]
        for name in {*changed, *old_env} - {n for n in changed if n.startswith(persistent_prefix)}:
            if name in old_env:
                os.environ[name] = old_env[name]
            else:
                del os.environ[name]


def force_eager_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable torch.compile on CPUs, where compilation takes minutes for small functions."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def preserve_process_group() -> Iterator[None]:
    """Ignore a backend's attempts to destroy the default process group."""
    destroy = dist.destroy_process_group

    def destroy_other(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_other
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
