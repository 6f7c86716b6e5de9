"""Supervised fine-tuning (SFT): create the initial policy and fine-tune it on demonstrations."""

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

import torch

from rlinf.algorithms.losses import sft_loss, token_weights
from rlinf.artifacts import FileEntry, check_files, describe_files, write_atomic
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection, RunConfig
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import Environment
from rlinf.errors import ConfigError, StageError
from rlinf.models.base import Policy
from rlinf.seeding import generator, torch_seed
from rlinf.trainers.base import Trainer
from stages.context import StageContext
from stages.dialogue_failures import mean_eval_score
from stages.evaluate import eval_policy_runner, run_eval_episodes
from stages.factory import (
    create_trainer,
    environment_class,
    get_environment,
    get_or_create_engine,
    policy_class,
    save_weights,
)
from stages.timeout_retries import PROGRESS_FOLDER

log = logging.getLogger(__name__)

CurveRow = dict[str, float | None]
"""A row of the learning curve: step, loss and :data:`EVAL_METRICS` (None: not evaluated)."""
EVAL_METRICS = ("score", "eval_loss")
"""Score on held-out starts, and loss on held-out demonstrations."""
NORMALIZER_STEPS = 32
"""Number of batches for fitting the observation normalizer."""


def run(ctx: StageContext) -> None:
    """Create the initial weights and fine-tune them.

    Output: policy folder ``weights``. The manifest's ``extra["curve"]`` has a :data:`CurveRow` for
    each step.
    """
    initial_folder = ctx.data_folder / "start"
    if ctx.world.rank == 0:
        create_initial_policy(ctx, initial_folder)
    trainer = None
    settings = ctx.config.sft
    if settings.max_steps:
        while not initial_folder.is_dir():
            time.sleep(0.05)
        optimizer = OptimizerSection(lr=settings.lr, weight_decay=settings.weight_decay)
        with ctx.span("load"):
            trainer = create_trainer(ctx, initial_folder, optimizer)
        with ctx.span("fine-tune"):
            ctx.manifest_extra["curve"] = fine_tune(ctx, trainer, initial_folder)
        save_weights(ctx, trainer, ctx.data_folder / "weights")
    if ctx.world.rank:
        return
    if trainer is None:
        initial_folder.rename(ctx.data_folder / "weights")
    else:
        trainer.close()
        shutil.rmtree(initial_folder)
        last = ctx.manifest_extra["curve"][-1]
        ctx.log_metric("steps", last["step"])
        ctx.log_metric("loss", last["loss"])
        for name in EVAL_METRICS:
            if (value := last.get(name)) is not None:
                ctx.log_metric(name, value)


def create_initial_policy(ctx: StageContext, folder: Path) -> None:
    """Write the initial policy for this task into a new folder."""
    environment_cls, environment_options = environment_class(ctx.config)
    policy_cls, options = policy_class(ctx.config)
    spec = environment_cls.model_spec(environment_options)
    environment_cls.verify_spec(environment_options)
    # The folder is renamed when it is complete, because other ranks wait for its name.
    with tempfile.TemporaryDirectory(dir=ctx.data_folder) as name:
        temporary = Path(name) / "policy"
        temporary.mkdir()
        policy_cls.create(options, spec, torch_seed(ctx.config.seed, "warm_start"), temporary)
        temporary.rename(folder)


def fine_tune(ctx: StageContext, trainer: Trainer, initial_folder: Path) -> list[CurveRow]:
    """Train until the held-out score reaches ``sft.target_score``, or for ``sft.max_steps`` steps.

    Returns the learning curve.

    The loss is :func:`rlinf.algorithms.losses.sft_loss`.

    Raises:
        ConfigError: the task has no demonstrations, or no held-out demonstrations.
    """
    settings = ctx.config.sft
    environment = get_environment(ctx, lambda: initial_folder)
    if not environment.demonstrations(ctx.config.seed, 0, 1):
        raise ConfigError("sft.max_steps: this task has no demonstrations; set sft.max_steps=0")
    count = settings.eval_samples
    demonstrations = environment.test_demonstrations(count) if count else []
    held_out = [trainer.policy.prepare_demonstration(d, ctx.config.seed) for d in demonstrations]
    if settings.eval_samples and not held_out:
        raise ConfigError("sft.eval_samples: this task has no held-out demonstrations; set it to 0")
    engine = get_or_create_engine(ctx, ProcessGroupInfo()) if settings.eval_generation else None
    schedule = OptimizerSection(
        lr=settings.lr,
        lr_scheduler_type=settings.lr_scheduler_type,
        lr_warmup_iterations=settings.lr_warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
    )
    curve = load_progress(ctx, trainer)
    scores = [row["score"] for row in curve if row["score"] is not None]
    if not curve and trainer.policy.tracks_observations:
        # Fit before the first step, because the policy keeps these statistics.
        fit_obs_normalizer(ctx, trainer, environment)
    for step in range(len(curve), settings.max_steps):
        if curve and is_target_reached(curve[-1], settings.target_score):
            break
        examples = prepare_demonstrations(
            ctx.config, environment, trainer.policy, step, settings.batch_size
        )
        learning_rate = schedule.learning_rate(step, settings.max_steps)
        # After an overflow of float16 the step is repeated with a smaller loss scale.
        while (metrics := trainer.step(examples, sft_loss(examples), lr=learning_rate)).get(
            "skipped_steps"
        ):
            pass
        is_eval = (step + 1) % settings.eval_every == 0 or step + 1 == settings.max_steps
        score = evaluate_weights(ctx, trainer, environment, engine) if is_eval and engine else None
        test_loss = eval_loss(ctx, trainer, held_out) if is_eval and held_out else None
        row = {"step": step + 1, "loss": metrics["loss"], "score": score, "eval_loss": test_loss}
        curve.append(row)
        if is_eval:
            save_progress(ctx, trainer, curve)
        scores += [] if score is None else [score]
        score_text = f", held-out score {scores[-1]:.3f}" if scores else ""
        note = f"loss {metrics['loss']:.4g}{score_text}"
        if test_loss is not None:
            log.info("sft: step %d, held-out loss %.4f nats", step + 1, test_loss)
        ctx.report_progress(step + 1, settings.max_steps, "steps", note)
    return curve


def prepare_demonstrations(
    config: RunConfig, environment: Environment, policy: Policy, step: int, count: int
) -> list[Trajectory]:
    """Return a batch of demonstrations, prepared for the policy; none if the task has none.

    Args:
        step: index of the batch, which determines the demonstrations together with the seed.
    """
    seed, length = config.seed, config.sft.demonstration_steps
    demonstrations = environment.demonstrations(seed, step, count)
    prepared = [policy.prepare_demonstration(each, seed) for each in demonstrations]
    if length is None:
        return prepared
    windows = []
    for index, trajectory in enumerate(prepared):
        last = max(0, len(trajectory) - length)
        start = int(generator(seed, "demonstration_steps", step, index).integers(last + 1))
        windows.append(trajectory.slice_steps(start, min(start + length, len(trajectory))))
    return windows


def is_target_reached(row: CurveRow, target: float) -> bool:
    """Return whether the held-out score of a step has reached the target."""
    return row["score"] is not None and row["score"] >= target


def fit_obs_normalizer(ctx: StageContext, trainer: Trainer, environment: Any) -> None:
    """Fit the policy's observation normalizer to the first :data:`NORMALIZER_STEPS` batches."""
    settings = ctx.config.sft
    trainer.policy.update_observation_stats(
        [
            demonstration
            for step in range(min(NORMALIZER_STEPS, settings.max_steps))
            for demonstration in environment.demonstrations(
                ctx.config.seed, step, settings.batch_size
            )
        ]
    )


def save_progress(ctx: StageContext, trainer: Trainer, curve: list[CurveRow]) -> None:
    """Save the state of the fine-tuning, from which a requeued job continues."""
    folder = ctx.output_folder / PROGRESS_FOLDER
    step_folder = folder / f"step-{len(curve)}"
    trainer.save(step_folder)
    if ctx.world.size > 1:
        torch.distributed.barrier()
    if ctx.world.rank == 0:
        old = [path for path in folder.glob("step-*") if path != step_folder]
        files = {name: asdict(entry) for name, entry in describe_files(step_folder).items()}
        # The curve is written last. Its length names the checkpoint; other checkpoints are ignored.
        progress = {"key": ctx.key, "curve": curve, "files": files}
        write_atomic(folder / "curve.json", json.dumps(progress))
        for path in old:
            shutil.rmtree(path, ignore_errors=True)


def load_progress(ctx: StageContext, trainer: Trainer) -> list[CurveRow]:
    """Load the state of an interrupted attempt; return its curve, empty if there is none.

    A damaged state is ignored, so its steps are repeated.
    """
    folder = ctx.output_folder / PROGRESS_FOLDER
    try:
        progress = json.loads((folder / "curve.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    if progress["key"] != ctx.key:
        return []
    curve: list[CurveRow] = progress["curve"]
    step_folder = folder / f"step-{len(curve)}"
    files = {name: FileEntry(**entry) for name, entry in progress["files"].items()}
    try:
        check_files(step_folder, files, checksums=True)
    except (OSError, ValueError) as error:
        log.warning(
            "the saved state of the fine-tuning cannot be used, so it starts again: %s", error
        )
        return []
    trainer.load(step_folder)
    try:
        # There is no manifest, so check that the files did not change while they were loaded.
        check_files(step_folder, files, checksums=True)
    except (OSError, ValueError) as error:
        raise StageError(f"{error}, while it was read; the fine-tuning starts again") from None
    return curve


def evaluate_weights(ctx: StageContext, trainer: Trainer, environment: Any, engine: Any) -> float:
    """Return the held-out score of the current weights; rank 0 computes it for all ranks."""
    folder = ctx.data_folder / "candidate"
    if ctx.world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    save_weights(ctx, trainer, folder)
    score = torch.zeros((), device=trainer.device)
    if ctx.world.rank == 0:
        engine.load(folder, 0)
        starts, policy = range(ctx.config.evaluate.samples), eval_policy_runner(engine)
        score += mean_eval_score(
            ctx.config, *run_eval_episodes(ctx, environment, policy, starts, Counter())
        )
        shutil.rmtree(folder)
    if ctx.world.size > 1:
        torch.distributed.broadcast(score, 0)
    return float(score)


def eval_loss(ctx: StageContext, trainer: Trainer, examples: Sequence[Trajectory]) -> float:
    """Return the mean of ``-log p`` over unmasked tokens, in nats; equal on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    for row, outputs in trainer.forward(examples, 1.0):
        weights = torch.from_numpy(token_weights(examples[row]))
        total[0] -= float((weights * outputs.logprobs).double().sum())
        total[1] += float(weights.sum())
    if ctx.world.size > 1:
        # Ranks of one model replica add the same numerator and denominator, which cancels out.
        torch.distributed.all_reduce(total)
    loss, count = total.tolist()
    return loss / count
