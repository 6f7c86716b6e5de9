"""A reward model: a sequence classifier with one label, whose output is the reward.

The reward model usually has another tokenizer than the policy. It therefore gets texts: the prompt,
and the response as decoded by the policy's tokenizer. Its chat template joins them, if it has one.
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
from rlinf.registry import PROMPTS
from rlinf.rewards.base import Reward, RewardResources, RewardResult, RewardValue

PATH_KEY = "reward.path"
TOO_LONG = "too_long"


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
    """Maximum number of tokens of prompt and response; null: the model's limit."""
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
    def check(cls, config: RewardModelConfig) -> None:
        check_classifier(config.path.expanduser(), PATH_KEY, config.max_length)

    def __init__(self, config: Any, resources: RewardResources) -> None:
        super().__init__(config, resources)
        own = resources.device if config.device == "auto" else config.device
        self.device = local_device(own)
        self._published = HFFolder(config.path.expanduser())
        self._module: Any = None
        self._tokenizer: Any = None

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._module is None:
            return {}
        return {"weights": [*self._module.parameters(), *self._module.buffers()]}

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[RewardValue | RewardResult]:
        config, module = self.config, self._ready()
        rows = self._rows(trajectories)
        most = self._published.max_model_len(config.max_length)
        fit = [i for i, row in enumerate(rows) if most is None or len(row) <= most]
        results: list[RewardValue | RewardResult] = [self._unfit()] * len(rows)
        for batch in length_grouped_batches(
            [len(rows[i]) for i in fit], config.max_tokens_per_batch
        ):
            places = [fit[number] for number in batch]
            numbers = score_rows(module, [rows[place] for place in places], self.device)
            for place, number in zip(places, numbers, strict=True):
                results[place] = config.scale * number + config.offset
        return results

    def close(self) -> None:
        self._module = None
        self.drop_host_copies()

    def _unfit(self) -> RewardResult:
        masked = self.config.overlong_reward == "mask"
        return RewardResult(
            0.0 if masked else float(self.config.overlong_reward), not masked, TOO_LONG
        )

    def _ready(self) -> Any:
        """Return the network, on its device."""
        residency = self.resources.residency
        if self._module is None:
            folder = self._published.folder
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
        return [row or self._empty() for row in rows]

    def _empty(self) -> list[int]:
        """Return one token in place of an empty text, because the network needs at least one."""
        tokenizer = self._tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return [next((token for token in known if token is not None), 0)]


def length_grouped_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group rows of similar length into batches, so that there is little padding.

    Args:
        lengths: of the rows.
        most: limit of the number of rows times the longest row of a batch. A longer row is alone in
            its batch.

    Yields:
        Numbers of rows; each row is in one batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    batch: list[int] = []
    for row in order:
        # The newest one is the longest.
        if batch and lengths[row] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def score_rows(module: Any, rows: Sequence[Sequence[int]], device: torch.device) -> list[float]:
    """Return the classifier's output for each row of token ids, as it would be for the row alone.

    ``transformers`` reads the output of a decoder at the last token that is not the padding token,
    and rejects several rows if the model has no padding token. In that case, any token that is not
    the last of a row serves.
    """
    settings = module.config.get_text_config()
    filler, named = settings.pad_token_id, settings.pad_token_id is not None
    if not named:
        ends = {row[-1] for row in rows}
        filler = next(token for token in range(len(ends) + 1) if token not in ends)
    length = max(map(len, rows))
    tokens = pad_right([np.asarray(row, np.int64) for row in rows], length)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    tokens = torch.where(mask.bool(), tokens, filler)
    try:
        settings.pad_token_id = filler if named or len(rows) > 1 else None
        out = module(input_ids=tokens.to(device), attention_mask=mask.to(device))
    finally:
        settings.pad_token_id = filler if named else None
    numbers: list[float] = out.logits[:, 0].float().tolist()
    return numbers
