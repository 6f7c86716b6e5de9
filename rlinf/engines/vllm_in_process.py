"""vLLM in the process of the stage, which runs under vLLM's interpreter (``engine.python``).

It is stepped by the thread that asks for replies, so that a batch is composed alike each time. Its
first weights come as all later ones: tensor by tensor, into the memory that they are read from as
it computes. What its start changes for the whole process is put back; see :func:`apart`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.checked import private_copy, read_bytes
from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Hooks, Requests
from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.legs import Ask, Leg, Legs, Sample
from rlinf.engines.vllm import VARIABLES, arguments, settings
from rlinf.errors import ConfigError, DataError
from rlinf.models.loading import companions, outline_module, stored
from rlinf.residency import Size


class VLLMInProcess(ExternalEngine):
    """See the module."""

    Config = ExternalConfig

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        super().__init__(config, policy, policy_config)
        self._llm: Any = None
        self._network: dict[str, bytes] = {}
        """What stands beside the weights of the network that is loaded."""
        self._asleep = self._shares_group = False

    @classmethod
    def packages(cls, config: Any) -> tuple[str, ...]:
        return ("vllm",)

    def load(self, folder: Path, version: int) -> None:
        self.version = -1
        network = {name: bytes(read_bytes(folder / name)) for name in companions(folder)}
        if self._llm is None or network != self._network:
            self.close()  # the old ones leave the memory first
            self._known(folder)
            try:
                with private_copy(folder, companions(folder)) as small:
                    self._start(small)
            except BaseException:
                self.close()  # it may be half made
                self._network = {}
                raise
            finally:
                gc.unfreeze()  # it freezes all that there is, of whichever part of the process
            self._network = network
        module, where = outline_module(folder, self._policy_config), f"model.path: {folder}"
        tensors = stored(module, folder, where)
        # Else they have their published names there.
        self._take(tensors if module is None else self._own(tensors))
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._llm is None:
            raise DataError("no network is loaded that weights could be of; load a folder first")
        self.version = -1
        self._take(self._own(tensors))
        self.version = version

    def generate(
        self, requests: Requests, *, seed: int, stage: str, hooks: Hooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        most = self._config.max_rows
        return Legs(self, Stepped(self), requests, seed, stage, hooks, most).replies()

    def size(self) -> dict[str, Size]:
        if not self.sleeps or self._llm is None:
            return {}
        whole = self._device_bytes()
        return {"engine": Size(0, whole, 0) if self._asleep else Size(whole, 0, 0)}

    def offload(self, group: str, least: int) -> int:
        freed = self.size()[group].here
        if freed:
            self._llm.sleep(level=1)  # keeps the weights in the host's memory
            self._asleep = True
        return freed

    def onload(self, groups: Collection[str], *, filled: bool) -> None:
        if groups and filled:
            self._wake()
        # Else weights come next: it wakes for these.

    def close(self) -> None:
        llm, self._llm, self._asleep, self.version = self._llm, None, False, -1
        if llm is not None:
            with group_kept() if self._shares_group else contextlib.nullcontext():
                llm.engine_core.shutdown()
            del llm
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _start(self, model: Path) -> None:
        """Make its engine for the network of a folder; any weights."""
        world = self.world
        if world.size == 1:
            # It takes the process group that is there, and a trainer in this process finds it.
            world.connect(self.device.type)
        elif dist.is_initialized():
            raise ConfigError(
                f"engine.name: vllm_in_process cannot share a process with a trainer of "
                f"{dist.get_world_size()} processes; give rollout a pool of its own in the plan, "
                "or set engine=vllm"
            )
        self._shares_group = dist.is_initialized()
        torch.set_num_threads(self._config.threads)
        with apart(self.device):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.utils.argparse_utils import FlexibleArgumentParser
            from vllm.v1.engine.llm_engine import LLMEngine

            parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
            words = [
                *arguments(self, model, self._context),
                *("--load-format", "dummy", "--disable-log-stats", "--no-use-tqdm-on-load"),
                *("--worker-extension-cls", "rlinf.engines.inside.rlinf_vllm.Extension"),
                *self._config.arguments,
            ]
            made = EngineArgs.from_cli_args(parser.parse_args(words))
            self._llm = LLMEngine.from_engine_args(made)
            self._llm.collective_rpc("rlinf_begin")
        # Of each update it says that layers without weights got none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)

    def _own(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What is published of the network's own tensors."""
        # Some are kept until others have come that they are joined with.
        return self._published.of(tensors, self.device, copy=True)

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have other weights of the network served, and forget what was cached under the old ones.

        Args:
            tensors: by their published names.

        Raises:
            DataError: they do not fit; it is closed then.
        """
        self._wake()
        try:
            with eager(self.device):
                self._llm.collective_rpc("rlinf_take", args=(tensors,))
        except BaseException:
            self.close()  # some of it holds anything
            raise
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps what it has cached: samples are under way")

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


@dataclass(eq=False)
class Made:
    """What there is of a leg."""

    sample: Sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Stepped:
    """See :class:`rlinf.engines.legs.Decoder`: one step of all legs at a time."""

    def __init__(self, engine: VLLMInProcess) -> None:
        self._engine = engine
        self._made: dict[str, Made] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._made)

    def begin(self, sample: Sample, ask: Ask) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine.check_room(ask)
        kind = RequestOutputKind.DELTA
        params = SamplingParams(**settings(ask, self._engine.stops), output_kind=kind)
        self._count += 1
        name = str(self._count)
        self._engine._llm.add_request(name, tokens_input(ask.tokens), params)
        self._made[name] = Made(sample)

    def ended(self) -> list[tuple[Sample, Leg | Exception]]:
        found: list[tuple[Sample, Leg | Exception]] = []
        with eager(self._engine.device):
            outputs = self._engine._llm.step()
        for output in outputs:
            made, (choice,) = self._made[output.request_id], output.outputs
            made.tokens += choice.token_ids
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            made.logprobs += [entry[token].logprob for token, entry in pairs]
            if output.finished:
                del self._made[output.request_id]
                leg = Leg(made.tokens, made.logprobs, choice.finish_reason)
                found.append((made.sample, leg))
        return found

    def cut_off(self) -> Iterator[tuple[Sample, Leg | Exception]]:
        made, self._made = self._made, {}
        if made:
            self._engine._llm.abort_request([*made])
        for one in made.values():
            yield one.sample, Leg(one.tokens, one.logprobs, "abort")

    def close(self) -> None:
        """Nothing is kept."""


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """What vLLM sets for the whole process as it starts is as before in the end.

    On CPUs those are variables of the environment, which other processes would inherit, and
    torch.set_num_threads, which it makes do nothing. What is read once stays: VLLM_*.
    """
    set_threads, before = torch.set_num_threads, dict(os.environ)
    own: Mapping[str, str] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        **VARIABLES,
    }
    os.environ.update(own)
    try:
        with eager(device):
            yield
    finally:
        torch.set_num_threads = set_threads
        changed = [name for name, value in os.environ.items() if before.get(name) != value]
        for name in {*changed, *before} - {n for n in changed if n.startswith("VLLM_")}:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def eager(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On CPUs nothing is compiled: it takes minutes, and the functions are small."""
    if device.type != "cpu":
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def group_kept() -> Iterator[None]:
    """The default process group outlives what would destroy it: it is not vLLM's."""
    destroy = dist.destroy_process_group

    def others(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
