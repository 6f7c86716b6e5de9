"""A response that another project decoded is through, or it is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rlinf.data.record import Record, RecordId
from rlinf.engines.resumable import GeneratedSegment, ParsedRequest, ResumableSample
from rlinf.engines.token_sampling import SamplingParams
from rlinf.errors import DataError


class Host:
    """Of what is asked of an engine."""

    version = 1
    stop_token_ids = frozenset({9})

    def load(self, folder: Path, version: int) -> None:
        raise AssertionError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(str, tokens))

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        return {8} if "<eight>" in texts else set()


def sample(**settings: object) -> ResumableSample:
    steps = {"sample": np.array([0]), "prompt": np.array([[1]]), "prompt_length": np.array([1])}
    info = {"horizon": 4, "temperature": 1.0, **settings}
    return ResumableSample(
        ParsedRequest(Record(RecordId(0, 0), steps, info=info), SamplingParams.from_info(info), 7),
        0,
    )


def leg(*tokens: int, end: str) -> GeneratedSegment:
    return GeneratedSegment(tokens, [-1.0] * len(tokens), end)


def test_a_response_that_the_decoder_had_no_room_for_is_an_error() -> None:
    """Shorter than it was asked for, and not ended by itself: else it would count as through."""
    with pytest.raises(DataError, match=r"room for 3 tokens of a response of up to 4: .*cache"):
        sample().append_segment(leg(1, 2, 3, end="length"), 1, Host())
    went_on = sample()
    assert not went_on.append_segment(leg(1, 2, end="abort"), 1, Host())
    with pytest.raises(DataError, match="room for 3 tokens"):
        went_on.append_segment(leg(3, end="length"), 1, Host())


@pytest.mark.parametrize(
    ("tokens", "end", "stop", "stopped"),
    [
        ((1, 2, 3, 4), "length", "[]", False),
        ((1, 2, 9), "length", "[]", True),
        ((1, 2, 3), "length", '["23"]', True),
        ((1, 2), "stop", "[]", True),
    ],
)
def test_a_response_that_is_through_is_complete(
    tokens: tuple[int, ...], end: str, stop: str, stopped: bool
) -> None:
    one = sample(stop=stop)
    assert one.append_segment(leg(*tokens, end=end), 1, Host())
    assert (one.tokens, one.stopped) == ([*tokens], stopped)


def test_a_response_ends_at_a_stop_string_that_is_a_special_token() -> None:
    stopping = sample(stop='["<eight>"]', min_tokens=2)
    assert stopping.append_segment(leg(8, 5, 8, 6, end="length"), 1, Host())
    assert (stopping.tokens, stopping.stopped) == ([8, 5, 8], True)
