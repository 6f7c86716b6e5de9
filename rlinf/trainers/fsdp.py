"""Training with fully sharded data parallelism (FSDP2); one process is the trivial case.

A minibatch is a list of trajectories known to every rank. Ranks take shares of it in proportion to
their speed and cut them into micro-batches under a token budget. Because the weight of every step
is fixed for the whole minibatch beforehand, the summed gradient is the same however it was cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rlinf.channels.world import World
from rlinf.config import OptimizerSection, Section
from rlinf.data.packing import Span
from rlinf.data.record import Record
from rlinf.errors import StageError
from rlinf.models.base import Batch, Policy, StepOutputs, copy_weights, joined
from rlinf.models.device import DeviceName, local_device
from rlinf.residency import Storages, placed
from rlinf.sharded import gathered, local, memory
from rlinf.tensors import State
from rlinf.trainers import offload, shards
from rlinf.trainers.base import LossFunction, Trainer
from rlinf.trainers.cuts import Cut, cut
from rlinf.trainers.lanes import Lanes
from rlinf.trainers.optimizer import MOMENTS, choose, make_optimizer
from rlinf.trainers.recompute import recompute_blocks


class FSDPConfig(Section):
    """How a training step is executed; nothing here changes its mathematics."""

    token_budget: int = Field(default=8192, gt=0)
    """Most padded positions in one micro-batch."""
    packing: bool | None = None
    """Rows of a micro-batch side by side, without padding between them, a prompt that several
    answer once; none sees another. null: where the policy can."""
    threads: int = Field(default=1, gt=0)
    """Threads of a process on CPUs. One process lets each compute micro-batches of its own; the
    processes of a sharded model split every product. Part of the result: the order of sums."""
    python: str | None = None
    """The interpreter of the stages that compute with it; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters in forward and backward; those that are trained stay as they are."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the processes of a sharded model add up gradients."""
    replicas: int = Field(default=1, gt=0)
    """Copies of the model, each shared out over as many of the processes (hybrid sharding): those
    of a copy have neighbouring ranks, on one node where they can."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the network's blocks for the backward pass and compute the rest
    again: less memory, a third more work."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory; it comes to the device in parts."""
    reshard_after_forward: bool = True
    unit_mb: int = Field(default=32, ge=0)
    """Least size of the parameters, MiB, that several processes gather at once."""


class FSDPTrainer(Storages, Trainer):
    """Owns the sharded module and its optimizer."""

    Config = FSDPConfig

    def __init__(
        self, policy: Policy, config: FSDPConfig, optimizer: OptimizerSection, world: World
    ) -> None:
        self.policy, self.config, self.world = policy, config, world
        self._sums: dict[str, Any] | None = None
        """Metric sums of what is accumulated; None: nothing."""
        self._spare: dict[str, Tensor] = {}
        """A snapshot that was written."""
        self._root: Any = None
        self._copy, self._part = 0, (world.rank, world.size)
        """Which copy of the model it has, and which part of how many."""
        self._closed = False
        self.device = local_device(config.device)
        kind = self.device.type
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        sharded = world.size > 1 or config.param_dtype != "float32"
        self._packs = policy.packs if config.packing is None else config.packing
        if self._packs:
            policy.use_packing(self.device, getattr(torch, config.param_dtype))
        if sharded:
            world.connect(kind)
            self._shard(policy)
        else:
            placed(policy.module, self.device)
        side_by_side = kind == "cpu" and not sharded
        self._lanes = Lanes(policy, config.threads if side_by_side else 1)
        if config.activation_checkpointing:
            for lane in self._lanes.policies:
                recompute_blocks(lane)
        self._torch_threads = 1 if side_by_side else config.threads
        self._clip = optimizer.clip_grad
        self._moments = MOMENTS[optimizer.name]
        self.optimizer = make_optimizer(policy, optimizer)

    def limit(self, token_budget: int) -> None:
        self.config = self.config.model_copy(update={"token_budget": token_budget})

    def cut(
        self, records: Sequence[Record], together: Sequence[Sequence[int]] | None = None
    ) -> list[Cut]:
        """The micro-batches of each lane of this rank."""
        return cut(
            self.policy,
            records,
            together,
            budget=self.config.token_budget,
            padded=not self._packs,
            speeds=self.world.speeds,
            rank=self.world.data_rank,
            lanes=len(self._lanes),
        )

    def forward(
        self, records: Sequence[Record], temperature: float
    ) -> list[tuple[int, StepOutputs]]:
        torch.set_num_threads(self._torch_threads)

        @torch.no_grad()
        def lane(policy: Policy, cut: Cut) -> list[tuple[Span, StepOutputs]]:
            policy.module.eval()
            out: list[tuple[Span, StepOutputs]] = []
            for spans, real in zip(cut.batches, cut.real, strict=True):
                outputs = policy.evaluate(self._inputs(policy, records, spans), temperature)
                for i, span in enumerate(spans) if real else ():
                    length = span.stop - span.start
                    values = None if outputs.values is None else outputs.values[i, :length].cpu()
                    said = StepOutputs(outputs.logprobs[i, :length].cpu(), None, values)
                    out.append((span, said))
            return out

        found: dict[int, list[StepOutputs]] = defaultdict(list)
        every = (pair for part in self._lanes.map(lane, self.cut(records)) for pair in part)
        for span, outputs in sorted(every, key=lambda pair: pair[0]):
            found[span.row].append(outputs)
        return [(row, joined(parts)) for row, parts in found.items()]

    def accumulate(
        self,
        records: Sequence[Record],
        loss: LossFunction,
        *,
        together: Sequence[Sequence[int]] | None = None,
    ) -> None:
        torch.set_num_threads(self._torch_threads)
        self._sums = self._sums or {}

        def lane(policy: Policy, cut: Cut) -> dict[str, Any]:
            policy.module.train()
            sums: dict[str, Any] = {}
            for number, (spans, real) in enumerate(zip(cut.batches, cut.real, strict=True), 1):
                self._synchronise(last=number == len(cut.batches))
                value, metrics = loss(policy, self._inputs(policy, records, spans), spans)
                counted = 1.0 if real else 0.0
                # Gradients are averaged over ranks by FSDP; the loss is a sum over them.
                (value * counted * self.world.data_size).backward()  # type: ignore[no-untyped-call]
                for name, part in {"loss": value.detach(), **metrics}.items():
                    sums[name] = sums.get(name, 0.0) + part * counted
            return sums

        try:
            for part in self._lanes.map(lane, self.cut(records, together)):
                for name, value in part.items():
                    self._sums[name] = self._sums.get(name, 0.0) + value
            self._lanes.add_gradients()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        self._sums = None
        # Of every lane: an attempt that failed may have left some in any of them.
        for policy in self._lanes.policies:
            for parameter in self._parameters(policy):
                parameter.grad = None

    def update(
        self,
        *,
        lr: float | Mapping[str, float],
        scale: float = 1.0,
        only: Collection[str] | None = None,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        if not self._sums:
            raise ValueError("nothing was accumulated")
        try:
            choose(self.optimizer, self._moments, lr, only)
            return self._update(self._sums, scale, check)
        finally:
            self.discard()

    def _update(
        self,
        sums: dict[str, Any],
        scale: float,
        check: Callable[[dict[str, float]], None] | None,
    ) -> dict[str, float]:
        totals = {name: scale * value for name, value in self._sum_over_ranks(sums).items()}
        if check is not None:
            check(totals)
        norm = scale * self._gradient_norm()
        if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
            raise StageError(
                f"loss {totals['loss']}, gradient norm {norm}: not finite; the previous weights "
                "are untouched. Look at this iteration's trajectories; lower optimizer.lr or "
                "optimizer.clip_grad"
            )
        if norm > self._clip:
            scale *= self._clip / (norm + 1e-6)
        if scale != 1:
            for parameter in self._parameters(self.policy):
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        if self.config.offload_optimizer:
            offload.step(self.optimizer, self.device)
        else:
            self.optimizer.step()
        return {**totals, "grad_norm": norm}

    @torch.no_grad()
    def resident(self) -> dict[str, list[Tensor]]:
        """What it keeps on the device, of a sharded module this rank's shards.

        See :class:`rlinf.residency.Holder`. What FSDP still has gathered it gives up for that.
        """
        if self._closed:
            return {}
        weights = [local(t) for t in self.policy.module.state_dict(keep_vars=True).values()]
        gradients, moments = list[Tensor](), list[Tensor]()
        for parameter in self._parameters(self.policy):
            to_come = torch.empty_like(local(parameter), device="meta")
            gradients.append(to_come if parameter.grad is None else local(parameter.grad))
            if self.config.offload_optimizer:
                continue
            state = self.optimizer.state.get(parameter)
            moments += (
                [local(t) for t in state.values()] if state else [to_come] * len(self._moments)
            )
        return {"weights": weights, "gradients": gradients, "optimizer": moments}

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        if self._copy:
            return {}
        # New memory costs far more than the copy: every page of it is cleared first.
        spare, self._spare = self._spare, {}
        return _copied(shards.tensors(self._state()), spare)

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        # Other copies of the model have nothing that the first one has not.
        if not self._copy:
            shards.write(folder, self._state() if state is None else state, *self._part)
            self._spare = state or {}

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        shards.read(folder, state)
        set_state_dict(
            self.policy.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if self.config.offload_optimizer:
            offload.move(self.optimizer, set(self._parameters(self.policy)), offload.HOST)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # Asked for its state, the module lets go of what it gathered for the last pass.
        copy_weights(self.policy.module, tensors)

    def stream(self, *, copy: bool = False) -> State:
        named = self.policy.module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, value in named.items():
            first.setdefault(id(value), name)
        like = {
            name: torch.empty(named[name].shape, dtype=named[name].dtype, device="meta")
            for name in first.values()
        }

        def each() -> Iterator[tuple[str, Tensor]]:
            for name, full in gathered((name, named[name]) for name in first.values()):
                yield name, full.to("cpu", copy=copy and memory(full) == memory(named[name]))
                del full  # before the next one is gathered

        return State({name: like[first[id(value)]] for name, value in named.items()}, each())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.discard()
        self.forget()
        self._lanes.close()
        # FSDP's modules are in cycles: what they hold goes with the next collection.
        self.optimizer.state.clear()
        self._spare, self._root = {}, None
        del self.policy, self.optimizer, self._lanes

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.policy.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _shard(self, policy: Policy) -> None:
        # Imported by sharded trainers alone: it takes a second.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from rlinf.trainers.sharding import make_mesh, place_of, share_out

        size = self.world.size
        mesh = make_mesh(self.device, size, self.config.replicas if size > 1 else 1)
        self._copy, *part = place_of(mesh)
        self._part = (part[0], part[1])
        self._root, self._in_one = share_out(
            policy,
            mesh,
            self.device,
            MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.config.param_dtype),
                reduce_dtype=getattr(torch, self.config.reduce_dtype),
            ),
            unit_bytes=self.config.unit_mb << 20,
            reshard_after_forward=self.config.reshard_after_forward,
        )

    def _synchronise(self, *, last: bool) -> None:
        """A model that is one unit is gathered and its gradients are reduced once for them all."""
        if self._root is not None and self._in_one:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)

    def _parameters(self, policy: Policy) -> list[nn.Parameter]:
        """Those of a lane. Of a sharded module always the shards, with the gradients: after a pass
        without a backward one its own are still the gathered ones."""
        if policy is not self.policy:
            return list(policy.module.parameters())
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _inputs(self, policy: Policy, records: Sequence[Record], spans: Sequence[Span]) -> Batch:
        batch = policy.collate([records[row].part(start, stop) for row, start, stop in spans])
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _sum_over_ranks(self, sums: dict[str, Any]) -> dict[str, float]:
        names = sorted(sums)
        total = torch.stack([sums[name] for name in names])
        if self.world.size > 1:
            torch.distributed.all_reduce(total)
            # Processes of one copy of the model have the same sums.
            total /= self.world.layout.ranks
        return dict(zip(names, total.tolist(), strict=True))

    def _gradient_norm(self) -> float:
        from torch.distributed.tensor import DTensor

        gradients = [p.grad for p in self._parameters(self.policy) if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _copied(named: Iterable[tuple[str, Tensor]], spare: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, where it fits in memory of earlier ones; of tied ones, one."""
    copies: dict[str, Tensor] = {}
    known: dict[object, Tensor] = {}
    for name, tensor in named:
        own, to = tensor.detach(), spare.get(name)
        one = memory(tensor)
        if one in known:
            pass
        elif to is not None and (to.shape, to.dtype) == (own.shape, own.dtype):
            local(to).copy_(local(own))
            known[one] = to
        else:
            known[one] = own.clone() if own.device.type == "cpu" else own.cpu()
        copies[name] = known[one]
    return copies
