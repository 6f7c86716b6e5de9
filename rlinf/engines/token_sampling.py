"""Sampling of tokens from logits, and detection of stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.data.record import Scalar
from rlinf.errors import DataError


def sample_tokens(
    logits: Tensor, noise: Tensor, sampling: SamplingParams, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: ``[B, V]`` float32.
        noise: Uniform random numbers in [0, 1), ``[B]``.
        sampling: Sampling parameters of all rows.
        forbidden: bool ``[B, V]``, tokens that must not be sampled.

    Returns:
        Tokens ``[B]`` int64 and their log-probabilities ``[B]`` under the policy, as
        :class:`SamplingParams` defines the policy.
    """
    logprobs = F.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    allowed = logprobs if forbidden is None else logprobs.masked_fill(forbidden, -torch.inf)
    if sampling.temperature == 0:
        chosen = allowed.argmax(-1)
    else:
        weights = allowed.exp()
        cumulative = (
            truncate_distribution(weights, sampling) if sampling.truncates_distribution else weights
        ).cumsum(-1)
        total = cumulative[:, -1:]
        # A threshold rounded up to the total would be beyond the last token.
        threshold = torch.minimum(
            noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
        )
        chosen = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def truncate_distribution(weights: Tensor, sampling: SamplingParams) -> Tensor:
    """Return unnormalized probabilities ``[B, V]`` after top_k, top_p and min_p truncation."""
    size = weights.shape[-1]
    remaining = weights
    if 0 < sampling.top_k < size:
        remaining = remaining.where(remaining >= remaining.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1:
        ordered, indices = remaining.sort(dim=-1, descending=True, stable=True)
        preceding = ordered.cumsum(-1) - ordered
        ordered = ordered.where(preceding < sampling.top_p * remaining.sum(-1, keepdim=True), 0.0)
        remaining = torch.zeros_like(remaining).scatter_(-1, indices, ordered)
    if sampling.min_p > 0:
        remaining = remaining.where(weights >= sampling.min_p * weights.amax(-1, keepdim=True), 0.0)
    return remaining


def completes_stop_string(
    tokens: Sequence[int],
    stops: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    stop_ids: Collection[int] = (),
) -> bool:
    """Return whether a stop string ends in the last token of a sample.

    Only as many of the last tokens are decoded as a stop string can span: a token has at least one
    byte, unless it is special.

    Args:
        tokens: The tokens of the sample.
        stops: The stop strings.
        decode: Returns the text of tokens.
        stop_ids: Ids of stop strings that are special tokens, which ``decode`` omits.
    """
    if tokens[-1] in stop_ids:
        return True
    max_bytes = max(len(stop.encode()) for stop in stops)
    window = max_bytes + 8  # a few more, because special tokens have no text
    while True:
        tail = tokens[-window:]
        text, old_text = decode(tail), decode(tail[:-1])
        # Find the first changed character, because an incomplete character may change, too.
        pairs = enumerate(zip(old_text, text, strict=False))
        first_change = next((i for i, (old, new) in pairs if old != new), len(old_text))
        if any(0 <= text.rfind(stop) > first_change - len(stop) for stop in stops):
            return True
        if window >= len(tokens) or len(old_text) >= max_bytes:
            return False
        window *= 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, stored under these names in its ``info``.

    With logits ``z`` the policy is ``softmax(z / temperature)``. Engine and trainer compute
    log-probabilities under this policy. ``min_tokens``, ``top_k``, ``top_p`` and ``min_p`` then
    restrict the tokens that can be drawn, in this order, without changing the recorded
    log-probability. Such samples follow a narrower distribution than the policy, and importance
    ratios do not correct for that.
    """

    horizon: int
    """Maximum number of tokens of the response."""
    temperature: float = 1.0
    """0: always the most likely token; its log-probability is that at temperature 1."""
    top_k: int = 0
    """Draw among the ``top_k`` most likely tokens (more where they tie); 0: among all."""
    top_p: float = 1.0
    """Draw among the most likely tokens with this total probability, after ``top_k``."""
    min_p: float = 0.0
    """Draw among tokens with at least this fraction of the highest probability."""
    min_tokens: int = 0
    """Minimum length: before it, stop tokens cannot be drawn and stop strings are ignored."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample, wherever token boundaries fall. The token that completes one is
    the last of the sample, so its text may extend beyond the stop string."""
    seed: int | None = None
    """Seed of the randomness, in place of the run's."""

    @property
    def truncates_distribution(self) -> bool:
        """True if some tokens that the policy could choose cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def to_info(self) -> dict[str, Scalar]:
        """Return values for a request's ``info``: horizon, temperature, and non-default others."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)[2:]}
        changed = {name: v for name, v in values.items() if defaults.get(name, ...) != v}
        return changed | ({"stop": json.dumps(self.stop)} if self.stop else {})

    @classmethod
    def from_info(cls, info: Mapping[str, Scalar]) -> SamplingParams:
        """Read the parameters from a request's ``info``.

        Raises:
            DataError: a value is missing or out of range.
        """
        try:
            values: dict[str, Any] = {f.name: info[f.name] for f in fields(cls) if f.name in info}
            if "stop" in values:
                values["stop"] = tuple(map(str, json.loads(values["stop"])))
            params = cls(**values)
            valid = params.horizon > 0 and params.temperature >= 0 and 0 <= params.min_p <= 1
            valid = valid and 0 < params.top_p <= 1 and params.top_k >= 0 and params.min_tokens >= 0
        except (TypeError, ValueError) as error:
            raise DataError(f"a request's sampling settings cannot be read: {error}") from None
        if not valid or "" in params.stop:
            raise DataError(f"a request asks for impossible sampling: {asdict(params)}")
        return params
