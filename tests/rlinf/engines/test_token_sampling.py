"""What can be drawn, and stop strings across tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlinf.engines.token_sampling import (
    SamplingParams,
    completes_stop_string,
    sample_tokens,
    truncate_distribution,
)

TEXT = "stop here, stop there; naïve cafés ÜÜ <end> 你好 " * 3


def byte_level() -> Tokenizer:
    """A tokenizer whose tokens are of several bytes, or of part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>"])
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


TOKENIZER = byte_level()


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from(sorted(set(TEXT))), max_size=30),
    stops=st.lists(
        st.text(st.sampled_from(sorted(set(TEXT))), min_size=1, max_size=4), min_size=1, max_size=2
    ),
    specials=st.lists(st.integers(0, 30), max_size=40),
)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(
    text: str, stops: list[str], specials: list[int]
) -> None:
    tokens = TOKENIZER.encode(text).ids
    for place in specials:  # they add nothing to the text
        tokens.insert(min(place, len(tokens)), TOKENIZER.token_to_id("<s>"))

    def decode(part: list[int]) -> str:
        return str(TOKENIZER.decode(part, skip_special_tokens=True))

    seen = [
        n for n in range(1, len(tokens) + 1) if completes_stop_string(tokens[:n], stops, decode)
    ]
    there = [n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)]
    assert seen[:1] == there[:1]


def test_what_a_special_token_repeats_is_no_new_end() -> None:
    tokens = [*TOKENIZER.encode("stop").ids, TOKENIZER.token_to_id("<s>")]
    assert completes_stop_string(tokens[:-1], ["op"], lambda part: str(TOKENIZER.decode(part)))
    assert not completes_stop_string(tokens, ["op"], lambda part: str(TOKENIZER.decode(part)))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_k": 2, "top_p": 0.62}, [0]),  # 0.5 of the 0.8 that are left
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 1]),
        ({"min_p": 1.0}, [0]),
    ],
)
def test_cuts_keep_the_most_likely_tokens(options: dict[str, float], kept: list[int]) -> None:
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    left = truncate_distribution(weights, SamplingParams(1, **options))  # type: ignore[arg-type]
    assert left.nonzero()[:, 1].tolist() == kept
    assert torch.equal(left[0, kept], weights[0, kept])


@given(noise=st.floats(0, 1, exclude_max=True, width=32), token=st.integers(0, 6))
def test_a_token_that_cannot_be_drawn_is_not_drawn(noise: float, token: int) -> None:
    forbidden = torch.ones(1, 7, dtype=torch.bool)
    forbidden[0, token] = False
    logits = torch.linspace(-20, 5, 7)[None]
    for temperature in (0.0, 0.3, 1.0):
        chosen, logprob = sample_tokens(
            logits, torch.tensor([noise]), SamplingParams(1, temperature), forbidden
        )
        assert int(chosen) == token
        expected = (logits / (temperature or 1)).log_softmax(-1)[0, token]
        torch.testing.assert_close(logprob[0], expected)


def test_settings_travel_in_a_request() -> None:
    request = SamplingParams(8, 0.5, top_k=3, min_tokens=2, stop=("a\n", '"b"'), seed=4)
    assert SamplingParams.from_info(request.to_info()) == request
    assert SamplingParams(8).to_info() == {"horizon": 8, "temperature": 1.0}
