"""Inference: log-probabilities (and values) of the trajectories under the training stack."""

from __future__ import annotations

import numpy as np

from rlinf.data.record import Record
from stages.context import Context
from stages.parts import held_trainer, make_algorithm, new_trainer


def run(ctx: Context) -> None:
    """Inputs ``trajectories``, ``initial`` and ``checkpoint``; output channel ``logprobs``."""
    algorithm = make_algorithm(ctx.config)
    trajectories = list(ctx.reader("trajectories", "trajectories"))
    output = ctx.writer("logprobs")
    recompute = algorithm.config.old_logprobs == "recompute" or algorithm.needs_values
    if not recompute and not algorithm.needs_reference:
        if ctx.world.rank == 0:
            for trajectory in trajectories:
                output.put(Record(trajectory.identity))
        output.close()
        return
    temperature = ctx.config.rollout.temperature
    columns: dict[int, dict[str, np.ndarray]] = {}
    gaps: list[np.ndarray] = []
    if recompute:
        trainer = held_trainer(ctx)
        with ctx.span("forward"):
            for row, outputs in trainer.forward(trajectories, temperature):
                column = columns.setdefault(row, {})
                logprobs = outputs.logprobs.numpy()
                gaps.append(logprobs - trajectories[row].steps["logprobs"])
                if algorithm.config.old_logprobs == "recompute":
                    column["logprobs"] = logprobs
                if outputs.values is not None:
                    column["values"] = outputs.values.numpy()
    if algorithm.needs_reference:
        reference = ctx.keep(
            "reference", "one", lambda: new_trainer(ctx, ctx.verified("initial") / "weights")
        )
        with ctx.span("reference"):
            for row, outputs in reference.forward(trajectories, temperature):
                columns.setdefault(row, {})["reference_logprobs"] = outputs.logprobs.numpy()
    for row in sorted(columns):
        output.put(Record(trajectories[row].identity, columns[row]))
    output.close()
    if gaps:
        gap = np.abs(np.concatenate(gaps))
        ctx.metric("logprob_gap_mean", float(gap.mean()), weight=len(gap))
        ctx.metric("logprob_gap_max", float(gap.max()), weight=len(gap))
