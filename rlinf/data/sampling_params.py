"""Sampling parameters of a generation request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rlinf.data.record import Scalar
from rlinf.errors import DataError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, stored under these names in its ``info``.

    With logits ``z`` the policy is ``softmax(z / temperature)``. The log-probability that an engine
    records is taken under it, and so is the trainer's. ``min_tokens``, ``top_k``, ``top_p`` and
    ``min_p`` then restrict the tokens that can be drawn, in this order, without changing the
    recorded log-probability. Where they restrict, samples come from a narrower distribution than
    the trained one, which importance ratios do not see.
    """

    horizon: int
    """Maximum number of tokens."""
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
        """Return the values for a request's ``info``, without defaults except the first two."""
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
