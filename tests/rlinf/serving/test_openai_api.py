"""The endpoint answers as OpenAI's API does; its clients are HTTP clients."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.models.causal_lm import CausalLM
from rlinf.models.causal_lm_config import CausalLMConfig, hf_config
from rlinf.models.chat_format import ChatFormat
from rlinf.serving.engine_service import EngineService
from tests.rlinf.models.folders import make_tokenizer

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")

CONFIG = CausalLMConfig(
    architecture="llama", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64
)
KEY = "sk-0123456789abcdef"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MAX_LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    spec = {"alphabet": alphabet, "chat_template": TEMPLATE, "special_tokens": ["<|end|>"]}
    CausalLM.create(CONFIG, spec, 0, folder)
    return folder


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes, so its text has characters of several tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(hf_config(CONFIG, len(tokenizer)))
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx2.Client]:
    with serving(folder) as (client, _):
        yield client


@contextmanager
def serving(folder: Path) -> Iterator[tuple[httpx2.Client, EngineService]]:
    from rlinf.serving.openai_api import ServedModel, create_app

    engine = TransformersEngine(TransformersConfig(max_num_seqs=4), CausalLM, CONFIG)
    engine.load(folder, 12)
    service = EngineService(engine)
    chat_format = ChatFormat.from_tokenizer(CausalLM.processor(folder, CONFIG))
    app = create_app(service, ServedModel("tiny", chat_format, MAX_LENGTH, 12), KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            yield client, service
        server.should_exit = True
        service.close()
        thread.join(20)
    engine.close()


def post(client: httpx2.Client, route: str, **body: Any) -> Any:
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def reference_logprobs(folder: Path, text: str) -> np.ndarray:
    """Log-probabilities of a text's tokens from the second on, ``[L - 1]``."""
    ids = CausalLM.processor(folder, CONFIG)(text, add_special_tokens=False)["input_ids"]
    module = CausalLM.load(folder, CONFIG).module
    with torch.no_grad():
        return (
            module(torch.tensor([ids]))
            .logits[0, :-1]
            .log_softmax(-1)
            .numpy()[np.arange(len(ids) - 1), ids[1:]]
        )


def test_the_model_is_listed(client: httpx2.Client) -> None:
    (entry,) = client.get("/models").json()["data"]
    assert entry["id"] == "tiny"
    assert entry["max_model_len"] == MAX_LENGTH


@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Basic {KEY}", f"bearer {KEY}x"])
def test_every_route_needs_the_key(client: httpx2.Client, header: str) -> None:
    headers = {"Authorization": header}
    for response in (
        client.get("/models", headers=headers),
        client.post("/completions", headers=headers, json={"prompt": "1"}),
        client.post("/chat/completions", headers=headers, content=b"{"),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_completion_has_an_id_the_version_and_the_number_of_tokens(
    client: httpx2.Client,
) -> None:
    bodies = [
        post(client, "/completions", model="tiny", prompt="1+1=", max_tokens=5, temperature=0)
        for _ in range(2)
    ]
    (choice,) = bodies[0]["choices"]
    assert bodies[0]["id"] != bodies[1]["id"]
    assert bodies[0]["system_fingerprint"] == "weights-12"
    assert bodies[0]["usage"]["prompt_tokens"] == 4
    assert bodies[0]["usage"]["completion_tokens"] <= 5
    assert choice["text"] == bodies[1]["choices"][0]["text"], "greedy"
    assert choice["logprobs"] is None


def test_several_prompts_and_samples_keep_their_order(client: httpx2.Client) -> None:
    settings = {"max_tokens": 6, "n": 2, "seed": 3}
    ids = [[30, 31], [40]]
    body = post(client, "/completions", prompt=ids, **settings)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    for number, prompt in enumerate(ids):
        single = post(client, "/completions", prompt=prompt, **settings)["choices"]
        assert [choice["text"] for choice in single] == texts[2 * number : 2 * number + 2]
    assert texts[0] != texts[1]


def test_an_echoed_prompt_is_scored(client: httpx2.Client, folder: Path) -> None:
    """The request of lm-eval for the likelihood of a text."""
    text = "What is 2+2?"
    settings = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    (choice,) = post(client, "/completions", prompt=text, **settings)["choices"]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    count = len(text)
    assert logprobs["tokens"][:count] == list(text)
    assert logprobs["text_offset"][:count] == list(range(count))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    np.testing.assert_allclose(
        logprobs["token_logprobs"][1:count], reference_logprobs(folder, text), atol=1e-4
    )
    for token, logprob, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == pytest.approx(logprob, abs=1e-5)
        assert max(top.values()) >= logprob - 1e-5
    only = post(client, "/completions", prompt=text, max_tokens=0, logprobs=0, echo=True)
    (choice,) = only["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        logprobs["token_logprobs"][1:count], abs=1e-5
    )


def test_generated_tokens_have_log_probs(client: httpx2.Client, folder: Path) -> None:
    settings = {"prompt": "abc", "max_tokens": 6, "seed": 5}
    plain, top = (
        post(client, "/completions", logprobs=number, **settings)["choices"][0] for number in (0, 3)
    )
    assert plain["logprobs"]["top_logprobs"] == [None] * len(plain["logprobs"]["tokens"])
    expected = reference_logprobs(folder, f"abc{plain['text']}")[2:]
    shown = plain["logprobs"]["token_logprobs"][: len(expected)]
    np.testing.assert_allclose(shown, expected, atol=1e-4)
    assert top["text"] == plain["text"]
    assert {3, 4} >= {len(row) for row in top["logprobs"]["top_logprobs"]}


def test_a_completion_ends_before_its_stop_string(client: httpx2.Client) -> None:
    settings = {"prompt": "abc", "max_tokens": 40, "temperature": 1.0, "seed": 2, "logprobs": 0}
    (whole,) = post(client, "/completions", **settings)["choices"]
    stop = whole["text"][5:7]
    (cut,) = post(client, "/completions", stop=[stop, "never there"], **settings)["choices"]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]
    short = {**settings, "max_tokens": 2}
    assert post(client, "/completions", **short)["choices"][0]["finish_reason"] == "length"


def test_a_chat_is_rendered_by_the_template(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": parts}]
    settings = {"max_tokens": 8, "seed": 4, "n": 2}
    body = post(client, "/chat/completions", messages=messages, **settings)
    text = "system: Add.<|end|>\nuser: 2+2?<|end|>\nassistant: "
    expected = post(client, "/completions", prompt=text, **settings)
    assert [choice["message"]["content"] for choice in body["choices"]] == [
        choice["text"] for choice in expected["choices"]
    ]
    assert body["object"] == "chat.completion"
    assert body["usage"] == expected["usage"]
    scored = post(
        client, "/chat/completions", messages=messages, logprobs=True, top_logprobs=2, **settings
    )
    for entry in scored["choices"][0]["logprobs"]["content"]:
        assert {2, 3} >= {len(entry["top_logprobs"])}
        assert entry["bytes"] == list(entry["token"].encode())


def events_of(response: httpx2.Response) -> list[Any]:
    """The events of a streamed response, without the mark of its end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("route", ["/completions", "/chat/completions"])
def test_a_streamed_text_is_the_whole_text_in_several_parts(byte_folder: Path, route: str) -> None:
    settings: dict[str, Any] = {"max_tokens": 90, "seed": 4, "n": 3}
    settings["prompt"] = ["abc", "d"]
    if "chat" in route:
        settings["messages"] = [{"role": "user", "content": settings.pop("prompt")[0]}]
    with serving(byte_folder) as (client, _):
        first = post(client, route, **settings)["choices"][0]
        text = first["message"]["content"] if "chat" in route else first["text"]
        settings["stop"] = [text[20:23], "never there"]
        whole = post(client, route, **settings)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of(client.post(route, json={**settings, **options}))
    last = events.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    parts = defaultdict[int, list[Any]](list)
    for event in events:
        (choice,) = event["choices"]
        parts[choice["index"]].append(choice)
    assert len(parts) == len(whole["choices"])
    for choice in whole["choices"]:
        *earlier, final = own = parts[choice["index"]]
        assert len(earlier) > 2
        assert [part["finish_reason"] for part in earlier] == [None] * len(earlier)
        assert final["finish_reason"] == choice["finish_reason"]
        if "chat" in route:
            assert [part["delta"].get("role") for part in own] == ["assistant"] + [None] * len(
                earlier
            )
            text = "".join(part["delta"]["content"] for part in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in own) == choice["text"]


def test_streamed_log_probs_and_echoes_come_with_the_whole_text(client: httpx2.Client) -> None:
    settings = {"prompt": "abc", "max_tokens": 6, "seed": 5, "logprobs": 2, "echo": True}
    whole = post(client, "/completions", **settings)["choices"]
    (event,) = events_of(client.post("/completions", json={**settings, "stream": True}))
    assert event["choices"] == whole


def test_an_error_ends_a_stream(folder: Path) -> None:
    body = {"prompt": "abc", "max_tokens": 150, "min_tokens": 150, "stream": True}
    with serving(folder) as (client, service):
        refused = client.post("/completions", json={**body, "max_tokens": 500})
        assert refused.status_code == 400
        with client.stream("POST", "/completions", json=body) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            service.close()
            *_, last = filter(None, lines)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "the server cannot answer: the server is stopping"
        assert client.post("/completions", json=body).status_code == 503


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "1", "max_token": 3}, 400, "max_token: not supported; did you mean 'max_token"),
        ({"prompt": "1", "logit_bias": {}}, 400, "logit_bias: not supported"),
        ({"prompt": "1", "model": "gpt-4"}, 404, "model: no model 'gpt-4'"),
        ({"prompt": "1", "n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ({"prompt": "1", "n": 2, "best_of": 4}, 400, "best_of: must be equal to n"),
        ({"prompt": "1", "temperature": "0"}, 400, "temperature: Input should be a valid number"),
        ({"prompt": "1", "presence_penalty": 0.5}, 400, "presence_penalty: "),
        ({"prompt": "1", "stop": [""]}, 400, "stop"),
        ({"prompt": "1", "logprobs": 50}, 400, "logprobs: "),
        ({"prompt": "1" * 150, "max_tokens": 51}, 400, "150 tokens of the prompt and 51 new ones"),
        ({"prompt": [5, 10**9]}, 400, "prompt: 1000000000 is no token id"),
        ({"prompt": [-1]}, 400, "prompt: -1 is no token id"),
        ({"prompt": []}, 400, "prompt: the list is empty"),
        ({"prompt": [[]]}, 400, "prompt: it has no tokens"),
        ({"prompt": "1", "max_tokens": 0}, 400, "max_tokens: 0 is only useful with echo"),
        ({}, 400, "prompt: Field required"),
    ],
)
def test_a_bad_request_names_its_field(
    client: httpx2.Client, body: dict[str, Any], status: int, message: str
) -> None:
    response = client.post("/completions", json=body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert post(client, "/completions", prompt="1", max_tokens=1)["choices"]


def test_a_body_that_is_no_json_is_refused(client: httpx2.Client) -> None:
    response = client.post("/completions", content=b'{"prompt": ')
    assert response.status_code == 400
    assert "Invalid JSON" in response.json()["error"]["message"]
    response = client.post("/completions", content=b" " * ((32 << 20) + 1))
    assert response.status_code == 413


def test_concurrent_requests_get_their_own_answers(client: httpx2.Client) -> None:
    settings = {"prompt": "abc", "max_tokens": 60, "stop": None}

    def ask(number: int, results: list[Any]) -> None:
        results.append((number, post(client, "/completions", seed=number, **settings)))

    results: list[Any] = []
    threads = [threading.Thread(target=ask, args=(number, results)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, body in sorted(results, key=lambda pair: pair[0]):
        alone = post(client, "/completions", seed=number, **settings)
        assert body["choices"][0]["text"] == alone["choices"][0]["text"]
    assert len(results) == 12
