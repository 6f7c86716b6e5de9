"""Studies: placements of models of 7B and 70B parameters on 64 to 4,096 GPUs of several kinds.

**No speed here is measured.** The cost model (:mod:`pipeline.planning.cost`) derives all speeds
from data sheets and names their sources. Further assumptions are below.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.planning.cost.data_sheet import (
    CandidateLayout,
    GenerationWorkload,
    GpuDevice,
    InferenceWorkload,
    TrainingWorkload,
    Workload,
    device_from_data_sheet,
    switch_seconds,
    sync_seconds,
)
from pipeline.planning.cost.model_shape import ModelShape
from pipeline.planning.cost.rates import RateTable, data_sheet_rates
from pipeline.planning.planner.problem import GpuKind, PlacementProblem, PlacementStage
from pipeline.planning.simulator.scenario import (
    InterruptionModel,
    LengthDistribution,
    QueueWaitModel,
    Scenario,
    StragglerModel,
)
from pipeline.planning.simulator.simulation import relative_lengths

MODELS = {
    # The published config.json of Qwen2.5-7B; and Llama 3 70B (arXiv 2407.21783, table 3).
    "7b": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
}
PRICES = {"h200-sxm": 3.5, "h100-sxm": 2.5, "a100-80gb-sxm": 1.5, "l40s": 0.8}
"""Price of a GPU-hour (assumed; only ratios matter)."""
GROUP_SIZE, PROMPT_TOKENS, MEAN_RESPONSE_TOKENS = 16, 512, 2000
"""Responses per prompt, tokens of a prompt, and mean tokens of a response (all assumed)."""
SIGMA, MAX_RELATIVE_LENGTH = 0.8, 4.0
"""Standard deviation of the logarithm of response lengths, and the maximum length as a multiple of
the mean length (all assumed)."""
MIXING = 0.95
"""Speed of several kinds together on one stage, relative to the sum of their speeds (assumed)."""
GPUS_PER_NODE = 8
WORKER_GPUS = 4
"""GPUs of a generator in the scenarios with unequal lengths (assumed)."""
CHUNK_S = 0.1
"""Seconds to pass a chunk from one pool to another, besides the work (assumed)."""
ENGINE_SETUP_S = 3.0
"""Seconds to set up an engine's KV cache and CUDA graphs whenever it is loaded (assumed)."""
PREEMPTIBLE = "a100-80gb-sxm"
"""The kind whose jobs may be preempted (a key of :data:`slurm.gpus.GPUS`)."""
GPU_FAILURES_PER_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions per GPU and hour in the training of Llama 3 (arXiv 2407.21783, section
3.3.4: 419 in 54 days on 16,384 GPUs)."""
PREEMPTIONS_PER_HOUR = 1.0
"""Preemptions per hour of each job on the preemptible kind (assumed)."""
WAIT_S = 600.0
"""Mean queue wait of a job (assumed)."""
STARTUP_S = 120.0
"""Seconds from the start of a job to its first work (assumed)."""
STRAGGLERS = StragglerModel(per_gpu_hour=0.002, factor=1.5, mean_s=600.0)
"""Slow GPUs (assumed)."""


@dataclass(frozen=True)
class PlacementStudy:
    """A model on a cluster."""

    model: str
    gpus: Mapping[str, int]
    """Number of GPUs by key of :data:`slurm.gpus.GPUS`, in nodes of eight."""
    samples: int
    """Responses of one iteration."""

    @functools.cached_property
    def problem(self) -> PlacementProblem:
        """The placement problem of the study."""
        kinds = [
            GpuKind(
                name,
                count,
                price=PRICES[name],
                waits_s=((1, WAIT_S),),
                interruptions_per_hour=GPU_FAILURES_PER_HOUR * count
                + PREEMPTIONS_PER_HOUR * (name == PREEMPTIBLE),
                per_node=GPUS_PER_NODE,
            )
            for name, count in self.gpus.items()
        ]
        stages = [
            PlacementStage(
                name,
                {kind.name: self._tables[name, kind.name].rates for kind in kinds},
                after=after,
                chunk_s=CHUNK_S,
                switch_s={kind.name: self._switch_s(name, kind.name) for kind in kinds},
            )
            for name, after in (
                ("rollout", ()),
                ("inference", ("rollout",)),
                ("train", ("inference",)),
            )
        ]
        shape, device = MODELS[self.model], self._devices
        return PlacementProblem(
            stages,
            kinds,
            chunks=(1, 2, 4, 8, 16, 32, 64),
            sync_s={
                (a, b): sync_seconds(shape, device[a], device[b])
                for a in self.gpus
                for b in self.gpus
            },
            mixing=MIXING,
            # Only generators may mix kinds; other jobs have GPUs of one kind on whole nodes.
            mixes=frozenset({"rollout"}),
        )

    def scenario(self, name: str) -> Scenario:
        """Return a scenario; see :data:`SCENARIOS`.

        Raises:
            KeyError: there is no such scenario.
        """
        disturbances = SCENARIOS[name]
        rates = {kind.name: kind.interruptions_per_hour for kind in self.problem.kinds}
        lengths = LengthDistribution(
            samples=self.samples,
            sigma=SIGMA,
            longest=MAX_RELATIVE_LENGTH,
            gpus_per_worker=WORKER_GPUS,
        )
        return Scenario(
            startup_s=STARTUP_S if "preemption" in disturbances else 0.0,
            lengths=lengths if "tails" in disturbances else None,
            stragglers=STRAGGLERS if "stragglers" in disturbances else None,
            queue=QueueWaitModel() if "preemption" in disturbances else None,
            losses=InterruptionModel(per_hour=rates) if "preemption" in disturbances else None,
        )

    @functools.cached_property
    def _devices(self) -> dict[str, GpuDevice]:
        return {name: device_from_data_sheet(name, inter_bytes_per_s=50e9) for name in self.gpus}

    @functools.cached_property
    def _work(self) -> dict[str, Workload]:
        tokens = MEAN_RESPONSE_TOKENS * relative_lengths(
            LengthDistribution(samples=1, sigma=SIGMA, longest=MAX_RELATIVE_LENGTH),
            4096,
            np.random.default_rng(0),
        )
        longest = PROMPT_TOKENS + round(MEAN_RESPONSE_TOKENS * MAX_RELATIVE_LENGTH)
        return {
            "rollout": GenerationWorkload(tokens, self.samples, PROMPT_TOKENS, GROUP_SIZE),
            "inference": InferenceWorkload(
                self.samples, PROMPT_TOKENS + MEAN_RESPONSE_TOKENS, longest
            ),
            # One optimizer step: gradients are accumulated over samples.
            "train": TrainingWorkload(self.samples, PROMPT_TOKENS + MEAN_RESPONSE_TOKENS, longest),
        }

    @functools.cached_property
    def _tables(self) -> dict[tuple[str, str], RateTable]:
        shape = MODELS[self.model]
        return {
            (stage, kind): data_sheet_rates(shape, work, device, self.gpus[kind])
            for stage, work in self._work.items()
            for kind, device in self._devices.items()
        }

    def _switch_s(self, stage: str, kind: str) -> float:
        """Return the seconds to load and offload a stage with the layout on all GPUs of a kind."""
        tp = int(self._tables[stage, kind].tp[-1])
        if not tp:
            return 0.0
        layout, work = CandidateLayout(tp, self.gpus[kind] // tp), self._work[stage]
        seconds = float(switch_seconds(MODELS[self.model], layout, work, self._devices[kind]))
        return seconds + (ENGINE_SETUP_S if stage == "rollout" else 0.0)


SCENARIOS: Mapping[str, frozenset[str]] = {
    "calm": frozenset(),
    "tails": frozenset({"tails"}),
    "stragglers": frozenset({"stragglers"}),
    "preemption": frozenset({"preemption"}),
    "all": frozenset({"tails", "stragglers", "preemption"}),
}
"""Disturbances of each scenario: ``tails``: unequal response lengths; ``stragglers``: slow GPUs;
``preemption``: jobs that wait in the queue and are interrupted."""

STUDIES: Mapping[str, PlacementStudy] = {
    "7b-64": PlacementStudy("7b", {"h100-sxm": 32, "a100-80gb-sxm": 32}, 2048),
    "7b-256": PlacementStudy("7b", {"h100-sxm": 128, "a100-80gb-sxm": 64, "l40s": 64}, 8192),
    "70b-256": PlacementStudy("70b", {"h100-sxm": 128, "a100-80gb-sxm": 128}, 2048),
    "70b-1024": PlacementStudy(
        "70b", {"h200-sxm": 256, "h100-sxm": 512, "a100-80gb-sxm": 256}, 8192
    ),
    "70b-4096": PlacementStudy(
        "70b", {"h200-sxm": 1024, "h100-sxm": 1536, "a100-80gb-sxm": 1024, "l40s": 512}, 32768
    ),
}
"""Studies by name, which is the model and the total number of GPUs."""
