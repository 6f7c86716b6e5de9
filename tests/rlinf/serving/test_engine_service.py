"""Many threads ask one engine; answers do not depend on what else runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf.engines.base import TokenScores
from rlinf.engines.token_sampling import SamplingParams
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.errors import DataError
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.serving.engine_service import EngineService, ServiceStopped

CONFIG = CausalLMConfig(
    architecture="llama", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransformersEngine]:
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, tmp_path)
    engine = TransformersEngine(TransformersConfig(max_num_seqs=3), CausalLM, CONFIG)
    engine.load(tmp_path, 5)
    yield engine
    engine.close()


@pytest.fixture
def service(engine: TransformersEngine) -> Iterator[EngineService]:
    service = EngineService(engine)
    yield service
    service.close()


def test_completions_depend_on_their_seed_and_not_on_other_requests(
    service: EngineService,
) -> None:
    def complete(number: int) -> Any:
        sampling = SamplingParams(horizon=4 + number % 5, seed=number)
        prompt = [2 + number % 7] * (1 + number % 4)
        return service.complete(prompt, sampling, 1 + number % 3).result(60)

    alone = [complete(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(complete, range(12)))
    assert [[c.tokens for c in group] for group in together] == [
        [c.tokens for c in group] for group in alone
    ]
    assert [len(group) for group in alone] == [1 + number % 3 for number in range(12)]
    assert alone[1][0].tokens != alone[1][1].tokens, "samples of one request differ"


def test_tokens_are_reported_in_their_order(service: EngineService) -> None:
    """More completions than the engine decodes at the same time, of different lengths."""
    reported: dict[tuple[int, int], list[int]] = {}

    def complete(number: int) -> Any:
        sampling = SamplingParams(horizon=4 + 3 * number, seed=number)

        def on_token(completion: int, token: int) -> None:
            reported.setdefault((number, completion), []).append(token)

        return service.complete([2 + number], sampling, 2, on_token).result(60)

    with ThreadPoolExecutor(6) as pool:
        completions = list(pool.map(complete, range(6)))
    assert reported == {
        (number, index): completion.tokens
        for number, group in enumerate(completions)
        for index, completion in enumerate(group)
    }


def test_requests_without_a_seed_differ(service: EngineService) -> None:
    sampling = SamplingParams(horizon=12)
    first, second = (service.complete([3, 4], sampling, 1).result(60) for _ in range(2))
    assert first[0].tokens != second[0].tokens


def test_texts_are_scored_while_completions_are_requested(service: EngineService) -> None:
    """Neither waits for ever for the other."""
    expected = service.score([2, 3, 4, 5], 1.0, 2).result(60)

    def ask(number: int) -> Any:
        if number % 2:
            return service.score([2, 3, 4, 5], 1.0, 2).result(60)
        return service.complete([2, 3], SamplingParams(horizon=6), 2).result(60)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    for scores in answers[1::2]:
        np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-6)
    assert [len(group) for group in answers[::2]] == [2] * 12


def test_a_closed_service_ends_running_and_new_requests(service: EngineService) -> None:
    running = service.complete([2], SamplingParams(horizon=3000), 2)
    while not service._running:
        assert not running.done()
    service.close()
    assert service.ended.is_set()
    assert service.error is None
    for future in (running, service.complete([2], SamplingParams(horizon=1), 1)):
        with pytest.raises(ServiceStopped):
            future.result(10)


class FailingEngine:
    """An engine that rejects the prompt 7, and dies of the prompt 8."""

    version = 0

    def generate(self, requests: Any, **_: Any) -> Iterator[Any]:
        for request in requests:
            token = request.steps["prompt"][0, 0]
            if token == 7:
                raise DataError("7 is refused")
            raise RuntimeError("no memory")
        yield from ()

    def score_tokens(self, texts: Any, temperature: float, num_top: int) -> list[TokenScores]:
        raise DataError("only generates")


def test_a_rejected_request_fails_alone_and_an_error_of_the_engine_ends_the_service() -> None:
    service = EngineService(FailingEngine())  # type: ignore[arg-type]
    sampling = SamplingParams(horizon=1)
    for _ in range(2):
        with pytest.raises(DataError, match="7 is refused"):
            service.complete([7], sampling, 1).result(10)
    with pytest.raises(DataError, match="only generates"):
        service.score([7], 1.0, 0).result(10)
    assert not service.ended.is_set()
    with pytest.raises(RuntimeError, match="no memory"):
        service.complete([8], sampling, 1).result(10)
    assert service.ended.wait(10)
    assert isinstance(service.error, RuntimeError)
