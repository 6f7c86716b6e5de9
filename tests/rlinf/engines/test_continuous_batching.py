"""Which rows are computed together: as many as the memory allows, and long prompts in chunks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.channels.channel import LocalChannel
from rlinf.data.record import Record
from rlinf.engines.base import RolloutHooks
from rlinf.engines.cache_limit import KV_CACHE_SHARE, host_memory_bytes
from rlinf.engines.transformers import TransformersEngine
from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM
from tests.rlinf.engines.test_transformers import (
    CONFIG,
    engine,
    expected_logprobs,
    request,
    rows,
)
from tests.rlinf.models import tiny
from tests.rlinf.models.tiny_families import tiny_settings

BYTES_PER_TOKEN = 2 * 2 * 1 * 16 * 4
"""Keys and values of 2 layers with one head of 16 float32 numbers."""
LENGTHS = [3, 17, 5, 4, 6, 29, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, path)
    return path


def gib(tokens: int) -> float:
    return tokens * BYTES_PER_TOKEN / (1 << 30)


def watch(made: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return a list that will have, for each forward pass, rows and columns of the tokens, and the
    size of the KV cache after it, in tokens."""
    passes = list[tuple[int, int, int]]()
    forward = made.forward

    def watched(tokens: torch.Tensor, positions: Any, mask: Any, cache: Any, *rest: Any) -> Any:
        logits = forward(tokens, positions, mask, cache, *rest)
        buffer = cache.layers[0][0]
        passes.append((*tokens.shape, buffer.shape[0] * buffer.shape[2]))
        return logits

    monkeypatch.setattr(made, "forward", watched)
    return passes


def assert_same(found: dict[int, Any], expected: dict[int, Any]) -> None:
    assert found.keys() == expected.keys()
    for number, row in expected.items():
        length = int(row["length"])
        assert found[number]["length"] == length
        np.testing.assert_array_equal(
            found[number]["tokens"][:length], row["tokens"][:length], err_msg=f"sample {number}"
        )
        np.testing.assert_allclose(
            found[number]["logprobs"][:length], row["logprobs"][:length], atol=2e-6
        )


@pytest.mark.parametrize("tokens", [49, 120, 200, 400])
@pytest.mark.parametrize("chunk", [8, 64])
def test_rows_join_when_the_tokens_that_they_may_need_fit_into_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int
) -> None:
    wanted = request(LENGTHS, horizon=20)
    plain = rows(engine(folder), wanted)
    made = engine(folder, kv_cache_gib=gib(tokens), max_num_seqs=8, max_num_batched_tokens=chunk)
    passes = watch(made, monkeypatch)
    assert_same(rows(made, wanted), plain)
    sizes = [size for *_, size in passes]
    assert max(sizes) <= tokens
    if tokens >= 120:
        assert max(sizes) > tokens / 2, "the memory is used"
        assert max(num_rows for num_rows, *_ in passes) > 1


def test_equal_limits_give_equal_bytes(folder: Path) -> None:
    wanted, options = request(LENGTHS, horizon=20), {"max_num_seqs": 8}
    first, again = (
        rows(engine(folder, kv_cache_gib=gib(200), max_num_batched_tokens=8, **options), wanted)
        for _ in range(2)
    )
    for number, row in first.items():
        for name, values in row.items():
            np.testing.assert_array_equal(again[number][name], values)


def test_a_sample_that_never_fits_is_refused(folder: Path) -> None:
    made = engine(folder, kv_cache_gib=gib(48))
    with pytest.raises(DataError) as error:
        rows(made, request([3, 29], horizon=20))
    assert str(error.value) == (
        "sample 2: a prompt of 29 tokens and a response of up to 20 do not fit into the KV cache "
        "of 48 tokens (1.14e-05 GiB, engine.kv_cache_gib); raise engine.kv_cache_gib or give the "
        "stage more memory, or shorten rollout.horizon or the prompts"
    )
    assert made.max_model_len == 48
    assert len(rows(made, request([28], horizon=20))) == 2


def test_the_log_says_once_how_many_samples_fit_and_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(folder, kv_cache_gib=gib(100))
    made.required_context = 30
    with caplog.at_level(logging.INFO, "rlinf"):
        for _ in range(2):
            rows(made, request([3]))
    (line,) = [line for line in caplog.messages if "KV cache" in line]
    assert line == (
        "KV cache: 100 tokens (2.38e-05 GiB, engine.kv_cache_gib), 3 samples of 30 tokens; "
        "engine.max_num_seqs is 256"
    )


@pytest.mark.parametrize("chunk", [4, 16, 60])
def test_a_chunk_has_a_limited_number_of_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    wanted = request(LENGTHS)
    made = engine(folder, max_num_seqs=4, max_num_batched_tokens=chunk)
    passes = watch(made, monkeypatch)
    assert_same(rows(made, wanted), rows(engine(folder), wanted))
    assert max(num_rows * columns for num_rows, columns, _ in passes) in range(
        chunk // 2, chunk + 1
    )


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "qwen3", "mamba"])
def test_chunks_and_memory_change_no_sample_of_any_kind_of_network(
    tmp_path: Path, family: str
) -> None:
    """With sliding windows, learned positions, fused steps, and without padding."""
    made = tiny_settings(family, len(tiny.ALPHABET) + 2)
    config = tiny.write(tmp_path / "model", family, made=made)
    wanted = tiny.requests([3, 9, 5, 19], horizon=14, group=2)
    plain, limited = tiny.engine(config), tiny.engine(config, **limits_of(tiny.engine(config)))
    found = tiny.generate(limited, wanted)
    for number, (tokens, logprobs) in tiny.generate(plain, wanted).items():
        np.testing.assert_array_equal(found[number][0], tokens)
        np.testing.assert_allclose(found[number][1], logprobs, atol=2e-5)


def limits_of(plain: TransformersEngine) -> dict[str, Any]:
    """Return options with room for 80 tokens."""
    tokens = plain.max_model_len
    assert tokens is not None
    size = KV_CACHE_SHARE * host_memory_bytes() / tokens * 81
    return {"max_num_seqs": 4, "max_num_batched_tokens": 8, "kv_cache_gib": size / (1 << 30)}


def test_running_rows_get_a_token_between_two_chunks_of_a_long_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = request([3, 4], horizon=12), request([41], horizon=4)
    long.steps["sample"] += 4
    made = engine(folder, max_num_batched_tokens=8, max_num_seqs=8, ignore_eos=True)
    passes = watch(made, monkeypatch)
    channel = LocalChannel()
    channel.put(short)
    hooks = arrival_after(3, channel, long)
    replies = list(made.generate(channel, seed=7, stage="rollout", hooks=hooks))
    shapes = [shape for *shape, _ in passes]
    assert shapes[:4] == [[2, 4], *[[4, 1]] * 3]
    assert shapes[4:15] == [[1, 8], [4, 1]] * 5 + [[1, 1]]
    assert shapes[15] == [6, 1]
    found = {int(n) for reply in replies for n in reply.steps["sample"]}
    assert found == set(range(6))


def arrival_after(
    steps: int, channel: LocalChannel, late: Record, newer_weights: Any = None
) -> RolloutHooks:
    """Put a request into the channel after so many tokens, and close it."""
    count = 0

    def should_abort(left: int, of: int) -> bool:
        nonlocal count
        count += 1
        if count == steps:
            channel.put(late)
            channel.close()
        return False

    return RolloutHooks(should_abort=should_abort, newer_weights=newer_weights)


@pytest.mark.parametrize("change", [2, 4, 7, 8])
def test_rows_that_are_joining_when_newer_weights_arrive_start_with_them(
    folder: Path, tmp_path: Path, change: int
) -> None:
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 1, tmp_path)
    count = 0

    def newer() -> tuple[Path, int] | None:
        nonlocal count
        count += 1
        return (tmp_path, 4) if count == change else None

    wanted = request([3, 4, 41], horizon=12)
    early, late = (
        Record(
            wanted.identity,
            {name: column[part] for name, column in wanted.steps.items()},
            info=wanted.info,
        )
        for part in (slice(0, 4), slice(4, 6))
    )
    made = engine(folder, ignore_eos=True, max_num_seqs=8, max_num_batched_tokens=8)
    channel, got = LocalChannel(), {}
    channel.put(early)
    hooks = arrival_after(3, channel, late, newer)
    for reply in made.generate(channel, seed=7, stage="rollout", hooks=hooks):
        for i, number in enumerate(reply.steps["sample"]):
            got[int(number)] = {name: array[i] for name, array in reply.steps.items()}
            assert reply.info["version"] == got[int(number)]["version"][0]
    for number, row in got.items():
        old_tokens = change if number < 4 else 0
        assert row["version"].tolist() == [3] * old_tokens + [4] * (12 - old_tokens)
    old, new = (expected_logprobs(where, wanted, got, 1.0) for where in (folder, tmp_path))
    for number, row in got.items():
        expected = np.where(row["version"] == 3, old[number], new[number])
        np.testing.assert_allclose(expected, row["logprobs"], atol=2e-5)
