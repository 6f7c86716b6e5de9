"""Reward functions as users of rlinf, TRL and verl write them."""

from __future__ import annotations

from typing import Any


def exact(completion: str, answer: str, **row: Any) -> float:
    return float(completion.strip() == answer)


def by_length(completion: str) -> float:
    return len(completion) / 10


def by_level(completion: str, level: float) -> float | None:
    return None if level < 2 else len(completion) / level


def trl_length(completions: list[str], **kwargs: Any) -> list[float]:
    assert sorted(kwargs) == ["answer", "completion_ids", "level", "prompts", "truncated"]
    return [float(len(text)) for text in completions]


def trl_chat(prompts: Any, completions: Any, answer: list[str]) -> list[float | None]:
    return [
        float(completion[0]["content"] == reference) if prompt[0]["role"] == "user" else None
        for prompt, completion, reference in zip(prompts, completions, answer, strict=True)
    ]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    assert extra_info is not None
    return {"score": float(solution_str == ground_truth) * extra_info["level"], "acc": 1}


def compute_indexed_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    assert data_source == "openai/gsm8k"
    return float(extra_info["index"]) + float(solution_str == ground_truth)


def needs_more(completion: str, levels: int) -> float:
    return float(levels)


def text_reward(completion: str) -> Any:
    return "good"


def nan_reward(completion: str) -> Any:
    return float("nan")


def one_too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def failing(completion: str, **row: Any) -> float:
    return float(row["no_such_field"])


def positional(completion: str, /) -> float:
    return 0.0


def any_of(completion: str, answer: list[str]) -> float:
    assert isinstance(answer, list)
    return float(completion in answer)


async def waiting(completion: str) -> float:
    return 1.0


class Scorer:
    def __init__(self, completion: str) -> None:
        """A class that a function's arguments would create."""


NOT_A_FUNCTION = 3
