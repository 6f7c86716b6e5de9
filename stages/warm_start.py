"""Warm start: make the initial policy and, where asked, fine-tune it on demonstrations."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.artifacts import FileEntry, check_files, describe_files, write_atomic
from rlinf.channels.world import World
from rlinf.config import OptimizerSection
from rlinf.data.batch import taken
from rlinf.data.counted import counted
from rlinf.data.packing import Span
from rlinf.data.padding import pad
from rlinf.data.record import Record
from rlinf.errors import ConfigError, StageError
from rlinf.models.base import StepOutputs
from rlinf.seeding import torch_seed
from rlinf.trainers.base import Loss, Trainer, of_steps
from stages.context import Context
from stages.evaluate import held_out, of_held_out
from stages.lives import PROGRESS
from stages.outages import score_of_all
from stages.parts import (
    bare_engine,
    environment_class,
    held_environment,
    new_trainer,
    policy_class,
    save_weights,
)

log = logging.getLogger(__name__)

Row = dict[str, float | None]
"""Of the curve: a step, its loss, and :data:`MEASURES` where they were taken."""
MEASURES = ("score", "held_out_loss")
LOOKED_AT = 32
"""Steps whose demonstrations observations are standardised by, where they are."""


def run(ctx: Context) -> None:
    """Output: policy folder ``weights``; ``extra["curve"]`` has of each step the loss, and of those
    that were evaluated the held-out score and loss."""
    start = ctx.data / "start"
    if ctx.world.rank == 0:
        create(ctx, start)
    trainer = None
    settings = ctx.config.warm_start
    if settings.max_steps:
        while not start.is_dir():
            time.sleep(0.05)
        optimizer = OptimizerSection(lr=settings.lr, weight_decay=settings.weight_decay)
        with ctx.span("load"):
            trainer = new_trainer(ctx, start, optimizer)
        with ctx.span("fine-tune"):
            ctx.extra["curve"] = fine_tune(ctx, trainer, start)
        save_weights(ctx, trainer, ctx.data / "weights")
    if ctx.world.rank:
        return
    if trainer is None:
        start.rename(ctx.data / "weights")
    else:
        trainer.close()
        shutil.rmtree(start)
        last = ctx.extra["curve"][-1]
        ctx.metric("steps", last["step"])
        ctx.metric("loss", last["loss"])
        for name in MEASURES:
            if (value := last.get(name)) is not None:
                ctx.metric(name, value)


def create(ctx: Context, folder: Path) -> None:
    """Write the initial policy for this task into a new folder."""
    environment, environment_options = environment_class(ctx.config)
    policy, options = policy_class(ctx.config)
    spec = environment.describe(environment_options)
    environment.verify(environment_options)
    # Other ranks wait for the folder, so it appears complete.
    with tempfile.TemporaryDirectory(dir=ctx.data) as name:
        part = Path(name) / "policy"
        part.mkdir()
        policy.create(options, spec, torch_seed(ctx.config.seed, "warm_start"), part)
        part.rename(folder)


def fine_tune(ctx: Context, trainer: Trainer, start: Path) -> list[Row]:
    """Supervised steps until the held-out score reaches ``warm_start.stop_at``.

    The loss is the mean of ``-log p`` over the tokens of a batch that count, in nats.

    Raises:
        ConfigError: the task has no demonstrations, or none that are held out.
    """
    settings = ctx.config.warm_start
    environment = held_environment(ctx, lambda: start)
    if not environment.demonstrations(ctx.config.seed, 0, 1):
        raise ConfigError(
            "warm_start.max_steps: this task has no demonstrations; set warm_start.max_steps=0"
        )
    shown = environment.held_out_demonstrations(settings.held_out) if settings.held_out else []
    apart = [trainer.policy.demonstrated(record, ctx.config.seed) for record in shown]
    if settings.held_out and not apart:
        raise ConfigError(
            "warm_start.held_out: this task has no held-out demonstrations; set it to 0"
        )
    engine = bare_engine(ctx, World()) if settings.scored else None
    rates = OptimizerSection(
        lr=settings.lr,
        schedule=settings.schedule,
        lr_warmup=settings.lr_warmup,
        lr_final=settings.lr_final,
    )
    curve = load_progress(ctx, trainer)
    known = [row["score"] for row in curve if row["score"] is not None]
    if not curve and trainer.policy.observes:
        # Before the first step: the policy learns by the statistics that it goes on with.
        look_at(ctx, trainer, environment)
    for step in range(len(curve), settings.max_steps):
        if curve and reached(curve[-1], settings.stop_at):
            break
        shown = environment.demonstrations(ctx.config.seed, step, settings.batch)
        records = [trainer.policy.demonstrated(record, ctx.config.seed) for record in shown]
        length = max(len(record) for record in records)
        counts = pad([counts_of(record) for record in records], length)
        weights = counts / counts.sum().clamp(min=1)

        def loss(outputs: StepOutputs, spans: list[Span], weights: Tensor = weights) -> Loss:
            part = taken(weights, spans, outputs.logprobs.shape[1]).to(outputs.logprobs.device)
            return -(part * outputs.logprobs).sum(), {}

        rate = rates.rate(step, settings.max_steps)
        # Where float16 overflows the loss is scaled less, and no demonstration is passed over.
        while (metrics := trainer.step(records, of_steps(loss), lr=rate)).get("skipped_steps"):
            pass
        due = (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.max_steps
        score = evaluate(ctx, trainer, environment, engine) if due and engine else None
        beyond = held_out_loss(ctx, trainer, apart) if due and apart else None
        row = {"step": step + 1, "loss": metrics["loss"], "score": score, "held_out_loss": beyond}
        curve.append(row)
        if due:
            save_progress(ctx, trainer, curve)
        known += [] if score is None else [score]
        told = f", held-out score {known[-1]:.3f}" if known else ""
        if beyond is not None:
            log.info("warm start: step %d, held-out loss %.4f nats", step + 1, beyond)
        ctx.progress(step + 1, settings.max_steps, f"fine-tuning steps{told}")
    return curve


def reached(row: Row, goal: float) -> bool:
    """Whether the score that ends the fine-tuning was measured at a step."""
    return row["score"] is not None and row["score"] >= goal


def look_at(ctx: Context, trainer: Trainer, environment: Any) -> None:
    """Have the policy follow the statistics of the demonstrations of the first :data:`LOOKED_AT`
    steps."""
    settings = ctx.config.warm_start
    trainer.policy.observe(
        [
            record
            for step in range(min(LOOKED_AT, settings.max_steps))
            for record in environment.demonstrations(ctx.config.seed, step, settings.batch)
        ]
    )


def counts_of(record: Record) -> np.ndarray:
    """1 where a token counts, float32 ``[T]``, or ``[T, ...]`` where a step is several choices."""
    counts = counted(record).astype(np.float32)
    if "submask" in record.steps:
        submask = np.asarray(record.steps["submask"], np.float32)
        counts = counts.reshape(-1, *[1] * (submask.ndim - 1)) * submask
    return counts


def save_progress(ctx: Context, trainer: Trainer, curve: list[Row]) -> None:
    """Keep the state of the fine-tuning, so that a requeued job goes on from here."""
    folder = ctx.out / PROGRESS
    step = folder / f"step-{len(curve)}"
    trainer.save(step)
    if ctx.world.size > 1:
        torch.distributed.barrier()
    if ctx.world.rank == 0:
        old = [path for path in folder.glob("step-*") if path != step]
        files = {name: asdict(entry) for name, entry in describe_files(step).items()}
        # The curve is written last and names the step: without it the checkpoint does not count.
        held = {"key": ctx.key, "curve": curve, "files": files}
        write_atomic(folder / "curve.json", json.dumps(held))
        for path in old:
            shutil.rmtree(path, ignore_errors=True)


def load_progress(ctx: Context, trainer: Trainer) -> list[Row]:
    """Take up the state of an interrupted attempt; returns its curve, empty when there is none.

    A damaged one counts as none: the same steps are done again.
    """
    folder = ctx.out / PROGRESS
    try:
        held = json.loads((folder / "curve.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    if held["key"] != ctx.key:
        return []
    curve: list[Row] = held["curve"]
    step = folder / f"step-{len(curve)}"
    files = {name: FileEntry(**entry) for name, entry in held["files"].items()}
    try:
        check_files(step, files, checksums=True)
    except (OSError, ValueError) as error:
        log.warning("the state of the fine-tuning cannot be used, it begins anew: %s", error)
        return []
    trainer.load(step)
    try:
        # It has no manifest that it is read by: what was loaded is what is there still.
        check_files(step, files, checksums=True)
    except (OSError, ValueError) as error:
        raise StageError(f"{error}, while it was read; the fine-tuning begins anew") from None
    return curve


def evaluate(ctx: Context, trainer: Trainer, environment: Any, engine: Any) -> float:
    """Held-out score of the weights as they are; computed on rank 0 and told to the others."""
    folder = ctx.data / "candidate"
    if ctx.world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    save_weights(ctx, trainer, folder)
    score = torch.zeros((), device=trainer.device)
    if ctx.world.rank == 0:
        engine.load(folder, 0)
        starts, policy = range(ctx.config.evaluate.samples), of_held_out(engine)
        score += score_of_all(ctx.config, *held_out(ctx, environment, policy, starts, Counter()))
        shutil.rmtree(folder)
    if ctx.world.size > 1:
        torch.distributed.broadcast(score, 0)
    return float(score)


def held_out_loss(ctx: Context, trainer: Trainer, records: Sequence[Record]) -> float:
    """Mean of ``-log p`` over the tokens of records that count, in nats; the same on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    for row, outputs in trainer.forward(records, 1.0):
        counts = torch.from_numpy(counts_of(records[row]))
        total[0] -= float((counts * outputs.logprobs).double().sum())
        total[1] += float(counts.sum())
    if ctx.world.size > 1:
        # Processes that share a copy of the model say the same: numerator and denominator alike.
        torch.distributed.all_reduce(total)
    loss, count = total.tolist()
    return loss / count
