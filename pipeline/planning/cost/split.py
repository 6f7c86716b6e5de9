"""Uneven shares on unlike GPUs: layers of pipeline stages, samples of data-parallel replicas.

Both are exact: no other division makes the slowest part quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planning.cost.device import GIB, Device
from pipeline.planning.cost.layout import Layout, cut
from pipeline.planning.cost.memory import training_stages
from pipeline.planning.cost.model import ModelShape
from pipeline.planning.cost.times import TRAINING_PASSES, micro_batch
from pipeline.planning.cost.work import Training
from rlinf.errors import PlanError

Array = np.ndarray


@dataclass(frozen=True)
class PipelineCosts:
    """What consecutive layers cost on each pipeline stage; a stage has GPUs of one kind."""

    layer_s: Array
    """Seconds of a micro-batch in each layer on each stage, float64 ``[stages, layers]``."""
    layer_bytes: Array
    """Memory per GPU that each layer takes on each stage, ``[stages, layers]``: earlier stages keep
    the activations of more micro-batches."""
    room_bytes: Array
    """Memory per GPU for layers, ``[stages]``."""

    def __post_init__(self) -> None:
        stages, layers = np.shape(self.layer_s)
        if np.shape(self.layer_bytes) != (stages, layers):
            raise PlanError(f"layer_bytes must have the shape of layer_s, {stages} x {layers}")
        if np.shape(self.room_bytes) != (stages,):
            raise PlanError(f"room_bytes must have one number for each of {stages} stages")
        for name in ("layer_s", "layer_bytes"):
            value = getattr(self, name)
            if not np.all(np.isfinite(value)) or np.any(value < 0):
                raise PlanError(f"{name} holds a number below 0 or not finite")
        if not 1 <= stages <= layers:
            raise PlanError(f"{layers} layers cannot fill {stages} pipeline stages")


def pipeline_costs(
    shape: ModelShape, layout: Layout, work: Training, devices: Sequence[Device]
) -> PipelineCosts:
    """What the layers of a model cost on pipeline stages of unlike GPUs.

    The embedding counts to the first layer, the last norm and the head to the last one.

    Args:
        layout: one layout; each of its ``pp`` stages has ``tp * dp`` GPUs.
        devices: of each pipeline stage.

    Raises:
        PlanError: not one device for each pipeline stage.
    """
    if len(devices) != layout.pp:
        raise PlanError(f"{len(devices)} kinds of GPUs for {layout.pp} pipeline stages")
    each = cut(shape, shape.layers, merge=False)
    zeros = np.zeros(shape.layers)
    # What a stage holds beside its layers: buffers for the layer at work.
    bare = replace(each, layers=0, shared=zeros, routed=zeros, head=zeros, activation_bytes=zeros)
    passes = TRAINING_PASSES[layout.recompute]
    layer_s, layer_bytes, room = [], [], []
    for s, device in enumerate(devices):
        number = np.full(shape.layers, s)
        held, buffers = (
            np.asarray(training_stages(shape, replace(part, number=number), layout, work).total)
            for part in (each, bare)
        )
        layer_s.append(micro_batch(shape, each, layout, work.tokens, device, passes).total)
        layer_bytes.append(held - buffers)
        room.append(device.usable_bytes - buffers.max())
    return PipelineCosts(np.array(layer_s), np.array(layer_bytes), np.array(room))


def split_layers(costs: PipelineCosts) -> tuple[int, ...]:
    """Consecutive layers for each pipeline stage, at least one, so that the slowest is quickest.

    By dynamic programming over stages and layers: with ``s`` stages for the first ``b`` layers the
    best is the least over ``a`` of the larger of the best of ``s - 1`` stages for ``a`` layers and
    stage ``s`` with layers ``a`` to ``b``. Takes ``stages * layers^2`` steps, vectorised.

    Raises:
        PlanError: the layers do not fit; says how many do.
    """
    stages, layers = costs.layer_s.shape
    reach = np.full(layers + 1, np.inf)
    reach[0] = 0.0
    cuts = np.zeros((stages, layers + 1), dtype=np.int64)
    first, last = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None]
    for s in range(stages):
        time, size = _running(costs.layer_s[s]), _running(costs.layer_bytes[s])
        allowed = (first < last) & (size[None] - size[:, None] <= costs.room_bytes[s])
        alone = np.where(allowed, time[None] - time[:, None], np.inf)
        slowest = np.maximum(reach[:, None], alone)
        cuts[s] = slowest.argmin(0)
        reach = slowest.min(0)
    if not np.isfinite(reach[-1]):
        raise PlanError(_why_not(costs))
    ends = [layers]
    for s in reversed(range(stages)):
        ends.append(int(cuts[s, ends[-1]]))
    return tuple(int(count) for count in np.diff(ends[::-1]))


def split_samples(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole samples for each data-parallel replica, so that the slowest ends soonest.

    Each gets its share in proportion to its speed, rounded down; the rest go one by one to who
    would end first with one more. Whoever gives out equal samples greedily, as the trainer does
    (:func:`rlinf.data.packing.balance`), arrives at the same division.

    Args:
        samples: 0 or more.
        speeds: samples per second of each replica; one of speed 0 gets none.

    Raises:
        PlanError: a speed is below 0 or not finite, or all are 0.
    """
    speed = np.asarray(speeds, dtype=np.float64)
    if not np.all(np.isfinite(speed)) or np.any(speed < 0) or not np.any(speed > 0):
        raise PlanError(f"speeds of replicas must be 0 or more and one above 0, got {list(speeds)}")
    if samples < 0:
        raise PlanError(f"{samples} samples cannot be shared out")
    shares = np.floor(samples * speed / speed.sum()).astype(np.int64)
    with np.errstate(divide="ignore"):
        for _ in range(samples - int(shares.sum())):
            shares[np.argmin((shares + 1) / speed)] += 1
    return tuple(int(share) for share in shares)


def _running(values: Array) -> Array:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _why_not(costs: PipelineCosts) -> str:
    """How many layers fit, filling stage after stage, and by how much the next one does not."""
    stages, layers = costs.layer_s.shape
    at, taken, lacking = 0, [], 0.0
    for s in range(stages):
        size = _running(costs.layer_bytes[s])
        end = int(np.searchsorted(size, size[at] + costs.room_bytes[s], side="right")) - 1
        # Each of the stages behind needs a layer too.
        end = max(at, min(end, layers - (stages - 1 - s)))
        taken.append(end - at)
        lacking = float(size[-1] - size[end])
        at = end
    return (
        f"at most {', '.join(map(str, taken))} of {layers} layers fit on the pipeline stages; the "
        f"last one lacks {lacking / GIB:.1f} GiB per GPU; use more stages, more GPUs for each, or "
        "kinds with more memory"
    )
