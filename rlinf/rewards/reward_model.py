"""A reward model: a sequence classifier with one label, whose output is the reward.

The reward model usually has another tokenizer than the policy. Therefore it receives texts: the
prompt, and the response that the policy's tokenizer has decoded. The chat template of the reward
model, if it has one, joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.config import Section
from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import OffloadableTensors, move_to_device
from rlinf.models.base import DeviceName, local_device
from rlinf.models.chat_template import render_conversations
from rlinf.models.hf_folder import HFFolder
from rlinf.models.sequence_classifier import check_classifier, load_classifier
from rlinf.registry import PROMPTS, RunComponents
from rlinf.rewards.base import Reward, RewardResources, RewardResult, RewardValue

PATH_KEY = "reward.path"
TOO_LONG = "too_long"
"""Value of :attr:`RewardResult.failure`: the text is longer than ``max_length``."""


class RewardModelConfig(Section):
    """Settings of the reward ``scale * output + offset``."""

    path: Path
    """Folder of the model in the Hugging Face format, with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: DeviceName = "auto"
    max_tokens_per_batch: int = Field(default=16384, gt=0)
    """Maximum number of tokens per forward pass, padding included. A longer text is computed
    alone."""
    max_length: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of prompt and response together; null: the model's limit."""
    overlong_reward: float | Literal["mask"] = "mask"
    """Reward of a longer text; ``mask``: the update excludes it."""
    scale: float = 1.0
    offset: float = 0.0


class RewardModelReward(OffloadableTensors, Reward):
    """Reward of a sequence classifier."""

    Config = RewardModelConfig
    requires = frozenset({PROMPTS})
    needs_score = False
    failure_kinds = (TOO_LONG,)
    config: RewardModelConfig

    @classmethod
    def check(cls, options: RewardModelConfig, run: RunComponents) -> None:
        super().check(options, run)
        check_classifier(options.path.expanduser(), PATH_KEY, options.max_length)

    def __init__(self, config: Any, resources: RewardResources) -> None:
        super().__init__(config, resources)
        name = resources.device if config.device == "auto" else config.device
        self.device = local_device(name)
        self._hf_folder = HFFolder(config.path.expanduser())
        self._module: Any = None
        self._tokenizer: Any = None

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._module is None:
            return {}
        return {"weights": [*self._module.parameters(), *self._module.buffers()]}

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[RewardValue | RewardResult]:
        config, module = self.config, self._load_on_device()
        rows = self._rows(trajectories)
        max_length = self._hf_folder.max_model_len(config.max_length)
        fitting = [i for i, row in enumerate(rows) if max_length is None or len(row) <= max_length]
        results: list[RewardValue | RewardResult] = [self._overlong_result()] * len(rows)
        for batch in length_grouped_batches(
            [len(rows[i]) for i in fitting], config.max_tokens_per_batch
        ):
            indices = [fitting[i] for i in batch]
            outputs = score_rows(module, [rows[i] for i in indices], self.device)
            for i, output in zip(indices, outputs, strict=True):
                results[i] = config.scale * output + config.offset
        return results

    def close(self) -> None:
        self._module = None
        self.drop_host_copies()

    def _overlong_result(self) -> RewardResult:
        masked = self.config.overlong_reward == "mask"
        return RewardResult(
            0.0 if masked else float(self.config.overlong_reward), not masked, TOO_LONG
        )

    def _load_on_device(self) -> Any:
        """Return the network on its device; the first call loads it."""
        residency = self.resources.residency
        if self._module is None:
            folder = self._hf_folder.folder
            self._tokenizer = check_classifier(folder, PATH_KEY, self.config.max_length)
            dtype = getattr(torch, self.config.dtype)
            if residency is not None:
                residency.offload_all()
            module = load_classifier(folder, dtype, PATH_KEY, self.config.max_length)
            self._module = move_to_device(module, self.device)
        if residency is not None:
            residency.acquire(self)
        return self._module

    def _rows(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Return the token ids of prompt and response, one row for each trajectory."""
        pairs = [(t.require("prompt_text"), t.require("text")) for t in trajectories]
        template = self._tokenizer.chat_template
        if template is None:
            texts = [prompt + response for prompt, response in pairs]
        else:
            texts = render_conversations(
                template,
                [
                    [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                    for prompt, text in pairs
                ],
                {str(k): str(v) for k, v in self._tokenizer.special_tokens_map.items()},
                PATH_KEY,
                add_generation_prompt=False,
            )
        # A chat template adds the special tokens itself.
        ids = self._tokenizer(texts, add_special_tokens=template is None)["input_ids"]
        rows: list[list[int]] = [list(map(int, row)) for row in ids]
        return [row or self._placeholder() for row in rows]

    def _placeholder(self) -> list[int]:
        """Return one token in place of an empty text, because the network needs at least one."""
        tokenizer = self._tokenizer
        candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return [next((token for token in candidates if token is not None), 0)]


def length_grouped_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Group rows of similar length into batches, so that there is little padding.

    Args:
        lengths: lengths of the rows.
        max_tokens: maximum number of tokens of a batch, padding included. A longer row is a batch
            of its own.

    Yields:
        Indices of the rows of a batch; each row is in one batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    batch: list[int] = []
    for row in order:
        # Lengths ascend, so the new row is the longest of its batch.
        if batch and lengths[row] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def score_rows(module: Any, rows: Sequence[Sequence[int]], device: torch.device) -> list[float]:
    """Return the classifier's output for each row of token ids, independent of the other rows.
    ``transformers`` reads the output of a decoder at the last token that is not the padding token,
    and rejects several rows if the model has no padding token. In that case, a token that is not
    the last token of any row is used for padding."""
    settings = module.config.get_text_config()
    pad_token, has_pad_token = settings.pad_token_id, settings.pad_token_id is not None
    if not has_pad_token:
        last_tokens = {row[-1] for row in rows}
        pad_token = next(t for t in range(len(last_tokens) + 1) if t not in last_tokens)
    length = max(map(len, rows))
    tokens = pad_right([np.asarray(row, np.int64) for row in rows], length)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    tokens = torch.where(mask.bool(), tokens, pad_token)
    try:
        settings.pad_token_id = pad_token if has_pad_token or len(rows) > 1 else None
        out = module(input_ids=tokens.to(device), attention_mask=mask.to(device))
    finally:
        settings.pad_token_id = pad_token if has_pad_token else None
    scores: list[float] = out.logits[:, 0].float().tolist()
    return scores
