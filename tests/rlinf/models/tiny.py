"""Small random networks of the model library's families, in the published format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.character_tokenizer import write_character_tokenizer

ALPHABET = "0123456789+-*/=() ."
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def write(
    folder: Path,
    family: str,
    seed: int = 0,
    made: dict[str, Any] | None = None,
    kind: Any = None,
    **settings: Any,
) -> CausalLMConfig:
    """Write a checkpoint with random weights and a character tokenizer.

    Args:
        made: all settings, in place of :data:`SIZES_COLUMN`.
        kind: the library's class that makes the network; None: a causal language model.
        settings: further ones, as in ``config.json``.

    Returns:
        The configuration of its policy.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    words = write_character_tokenizer(ALPHABET, folder)
    made = AutoConfig.for_model(
        family, **{**(SIZES if made is None else made), "vocab_size": len(words), **settings}
    )
    torch.manual_seed(seed)
    module: Any = (kind or AutoModelForCausalLM).from_config(made, dtype=torch.float32)  # type: ignore[no-untyped-call]
    # Weights of the usual size say almost the same of every token.
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.dim() > 1:
                tensor.mul_(4)
    module.save_pretrained(folder)
    return CausalLMConfig(path=folder)


def requests(lengths: list[int], horizon: int, group: int = 1, seed: int = 0) -> Record:
    """Ask for ``group`` samples of each of some random prompts."""
    random = np.random.default_rng(seed)
    prompts = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, length in zip(prompts, lengths, strict=True):
        row[:length] = random.integers(2, 2 + len(ALPHABET), length)
    steps = {
        "sample": np.arange(group * len(lengths)),
        "prompt": prompts.repeat(group, axis=0),
        "prompt_length": np.array(lengths).repeat(group),
    }
    return Record(RecordId(0, 0), steps, info={"horizon": horizon, "temperature": 1.0})


def rows_of(request: Record, rows: list[int]) -> Record:
    """Return the request for some of its samples."""
    steps = {name: column[rows] for name, column in request.steps.items()}
    return Record(request.identity, steps, info=request.info)


def engine(config: CausalLMConfig, **options: Any) -> TransformersEngine:
    """Return an engine that serves a checkpoint."""
    assert config.path is not None
    made = TransformersEngine(TransformersConfig(**options), CausalLM, config)
    made.load(config.path, 0)
    return made


def generate(served: TransformersEngine, *requests: Record) -> dict[int, tuple[Any, Any]]:
    """Return tokens and log-probabilities of each sample by its number."""
    channel = LocalChannel()
    for request in requests:
        channel.put(request)
    channel.close()
    found = {}
    for reply in served.generate(channel, seed=7, stage="rollout"):
        steps = reply.steps
        for i, sample in enumerate(steps["sample"].tolist()):
            length = steps["length"][i]
            found[sample] = steps["tokens"][i, :length], steps["logprobs"][i, :length]
    return found


def trajectories(request: Record, found: dict[int, tuple[Any, Any]]) -> list[Trajectory]:
    """Return generated samples as what a trainer learns from."""
    made = []
    for i, sample in enumerate(request.steps["sample"].tolist()):
        prompt = request.steps["prompt"][i, : request.steps["prompt_length"][i]]
        tokens, logprobs = found[sample]
        identity = RecordId(0, sample)
        made.append(Trajectory(identity=identity, actions=tokens, logprobs=logprobs, prompt=prompt))
    return made


def assert_trainer_agrees(
    config: CausalLMConfig, request: Record, found: dict[int, tuple[Any, Any]]
) -> tuple[CausalLM, list[Trajectory], StepOutputs]:
    """See that the trainer gives the log-probabilities of the engine, to 1e-4 nats.

    Returns:
        The policy as the trainer loads it, the trajectories, and its outputs for them.
    """
    assert config.path is not None
    policy = CausalLM.load(config.path, config)
    records = trajectories(request, found)
    outputs = policy.evaluate(policy.collate(records), 1.0)
    for line, record in zip(outputs.logprobs, records, strict=True):
        expected = record.logprobs
        np.testing.assert_allclose(line[: len(expected)].detach(), expected, atol=1e-4)
    return policy, records, outputs
