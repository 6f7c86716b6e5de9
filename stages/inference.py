"""Inference: log-probabilities and values of the trajectories, as the trainer computes them."""

from __future__ import annotations

import numpy as np

from rlinf.data.trajectory import PolicyOutputs, Trajectory, masked_logprobs
from stages.context import StageContext
from stages.factory import create_algorithm, get_actor, get_reference


def run(ctx: StageContext) -> None:
    """Inputs: ``trajectories``, ``initial`` and ``weights``. Output channel: ``logprobs``."""
    algorithm = create_algorithm(ctx.config)
    output = ctx.open_writer("logprobs")
    temperature = ctx.config.rollout.temperature
    differences: list[np.ndarray] = []
    for samples in ctx.chunks():
        trajectories = ctx.read(Trajectory, "trajectories", samples)
        results = [PolicyOutputs(identity=trajectory.identity) for trajectory in trajectories]
        # Indices of the trajectories whose records this process writes.
        rows = set[int]()
        # If the rollout has computed values, advantages use those.
        has_values = any(trajectory.values is not None for trajectory in trajectories)
        needs_actor = algorithm.needs_old_logprobs or (algorithm.needs_values and not has_values)
        if needs_actor:
            trainer = get_actor(ctx)
            with ctx.span("forward"):
                for row, outputs in trainer.forward(trajectories, temperature):
                    logprobs = outputs.logprobs.numpy()
                    difference = logprobs - trajectories[row].require("logprobs")
                    differences.append(masked_logprobs(trajectories[row], difference))
                    if algorithm.needs_old_logprobs:
                        results[row].logprobs = logprobs
                    if outputs.values is not None:
                        results[row].values = outputs.values.numpy()
                    rows.add(row)
        if algorithm.needs_reference:
            reference = get_reference(ctx)
            with ctx.span("reference"):
                for row, outputs in reference.forward(trajectories, temperature):
                    results[row].reference_logprobs = outputs.logprobs.numpy()
                    rows.add(row)
        if not needs_actor and not algorithm.needs_reference and ctx.world.rank == 0:
            rows = set(range(len(trajectories)))
        for row in sorted(rows):
            output.put(results[row].to_record())
    output.close()
    if differences:
        difference = np.abs(np.concatenate(differences))
        ctx.log_metric("logprob_diff_mean", float(difference.mean()), weight=len(difference))
        ctx.log_metric("logprob_diff_max", float(difference.max()), reduction="max")
