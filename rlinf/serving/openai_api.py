"""The HTTP routes of an OpenAI-compatible endpoint: models, completions and chat completions.

The shapes of requests and responses are those of OpenAI's API reference
(https://platform.openai.com/docs/api-reference). Every field that is accepted has an effect; other
fields are an error. ``top_k``, ``min_p`` and ``min_tokens`` are additions, named as in vLLM. The
``system_fingerprint`` of a response names the version of the weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlinf.engines.base import TokenScores
from rlinf.engines.token_sampling import SamplingParams
from rlinf.errors import DataError, RlinfError, did_you_mean
from rlinf.models.chat_format import ChatFormat
from rlinf.serving.engine_service import Completion, EngineService
from rlinf.serving.text_deltas import TextDeltas

log = logging.getLogger("rlinf")
MAX_BODY_BYTES = 32 << 20
"""Largest size of a request."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default of ``max_tokens`` of completions, as in OpenAI's API."""
DEFAULT_CHAT_TOKENS = 1024
"""Default of ``max_tokens`` of chat completions, if the context has room for it."""
MIN_LOGPROB = -9999.0
"""Lowest log-probability in responses, because JSON has no infinity."""
Text = Annotated[str, Field(min_length=1)]
R = TypeVar("R", bound="_Request")


class StreamOptions(BaseModel):
    """Options of streamed responses."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class _Request(BaseModel):
    """The fields that both kinds of completions have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int = Field(default=1, ge=1, le=1024)
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A name for the client; it has no effect in OpenAI's API either."""
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    """Penalties are not supported, so only 0 is accepted."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            horizon=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens,
            stop=self.stop_strings,
            seed=self.seed,
        )


class CompletionRequest(_Request):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """One or several texts, or their token ids."""
    echo: bool = False
    """Whether the response begins with the prompt, and its ``logprobs`` with those of it."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Number of most likely tokens to return for each position; None: no log-probabilities."""
    best_of: int | None = None
    suffix: None = None


class ChatMessagePart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatRequestMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[ChatMessagePart]

    def to_message(self) -> dict[str, str]:
        """Return role and content, the latter as one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatCompletionRequest(_Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[ChatRequestMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)


class BadRequest(Exception):
    """A request that cannot be answered; the message is for its client."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class ServedModel:
    """The model behind an endpoint."""

    name: str
    """The name in requests and responses."""
    chat_format: ChatFormat
    """The tokenizer with its chat template."""
    max_model_len: int | None
    """Largest number of tokens of prompt and response together; None: no limit."""
    version: int
    """Version of the loaded weights."""
    _token_texts: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def tokenizer(self) -> Any:
        return self.chat_format.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, after the special tokens that begin a text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        prefix = self.chat_format.bos_token_ids.tolist()
        return ids if prefix and ids[: len(prefix)] == prefix else [*prefix, *ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token; of a part of a character, its name in the vocabulary."""
        if token not in self._token_texts:
            text, name = self.decode([token]), str(self.tokenizer.convert_ids_to_tokens(token))
            if "\ufffd" in text:
                text = name
            elif name.startswith("\u2581") and not text.startswith(" "):
                text = f" {text}"  # SentencePiece marks the space before a word in the name only
            self._token_texts[token] = text
        return self._token_texts[token]


@dataclass(frozen=True)
class ScoredToken:
    """A token in the ``logprobs`` of a response."""

    text: str
    logprob: float | None
    """None: the first token of a text, which nothing predicts."""
    top: dict[str, float] | None
    """The most likely tokens and the chosen one; None: they were not requested."""


@dataclass(frozen=True)
class Choice:
    """One answer to a request."""

    text: str
    finish_reason: str | None
    """None: the choice is a part of the answer, and more follows."""
    tokens: list[ScoredToken] | None
    """None: no log-probabilities were requested."""


def create_app(service: EngineService, model: ServedModel, api_key: str) -> Starlette:
    """Return the web application.

    Args:
        api_key: the key that every request must have in its ``Authorization`` header.
    """
    api = OpenAIRoutes(service, model)

    def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def authorized(request: Request) -> Response:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            is_valid = secrets.compare_digest(key.strip().encode(), api_key.encode())
            if scheme.lower() != "bearer" or not is_valid:
                return error_response("missing or wrong API key", 401, code="invalid_api_key")
            try:
                return await answer(request)
            except Exception as error:
                return response_to_error(error)

        return Route(path, authorized, methods=[method])

    return Starlette(
        routes=[
            route("/v1/models", api.list_models, "GET"),
            route("/v1/completions", api.create_completion, "POST"),
            route("/v1/chat/completions", api.create_chat_completion, "POST"),
        ]
    )


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error in the format of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def response_to_error(error: Exception) -> JSONResponse:
    """Return the response to a request that failed."""
    if isinstance(error, BadRequest):
        return error_response(str(error), error.status, error.param)
    if isinstance(error, DataError):
        return error_response(str(error), 400)
    # The engine failed or is stopping.
    if not isinstance(error, RlinfError):
        log.error("a request failed", exc_info=error)
    return error_response(f"the server cannot answer: {error}", 503)


class OpenAIRoutes:
    """Answers the requests of an endpoint."""

    def __init__(self, service: EngineService, model: ServedModel) -> None:
        self._service, self._model = service, model
        self._created = int(time.time())

    async def list_models(self, request: Request) -> Response:
        entry = {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rlinf",
            "max_model_len": self._model.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def create_completion(self, http_request: Request) -> Response:
        request = await _parse_body(http_request, CompletionRequest)
        if request.best_of not in (None, request.n):
            raise BadRequest("best_of: must be equal to n, or left out", "best_of")
        prompts, texts = self._prompts(request.prompt)
        max_tokens = request.max_tokens
        max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
        if max_tokens == 0 and not request.echo:
            raise BadRequest("max_tokens: 0 is only useful with echo", "max_tokens")
        for prompt in prompts:
            self._check(prompt, request, max_tokens)
        num_top = request.logprobs

        def to_choice(index: int, choice: Choice) -> dict[str, Any]:
            return {
                "index": index,
                "text": choice.text,
                "logprobs": None if choice.tokens is None else _completion_logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }

        async def answer(deltas: TextDeltas | None) -> list[Answer]:
            return await asyncio.gather(
                *(
                    self._answer(
                        prompt,
                        request,
                        max_tokens,
                        num_top,
                        prompt_text=text if request.echo else None,
                        deltas=deltas,
                        first_index=index * request.n,
                    )
                    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
                )
            )

        body = self._body("cmpl", "text_completion")
        return await self._respond(request, body, answer, to_choice)

    async def create_chat_completion(self, http_request: Request) -> Response:
        request = await _parse_body(http_request, ChatCompletionRequest)
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs: needs logprobs=true", "top_logprobs")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise BadRequest("max_tokens: is the old name of max_completion_tokens", "max_tokens")
        if self._model.chat_format.template is None:
            raise BadRequest("the tokenizer has no chat template; use /v1/completions", "messages")
        messages = [message.to_message() for message in request.messages]
        (text,) = await asyncio.to_thread(self._model.chat_format.render_prompts, [messages])
        prompt = self._model.tokenizer(text, add_special_tokens=False)["input_ids"]
        max_tokens = request.max_completion_tokens
        max_tokens = request.max_tokens if max_tokens is None else max_tokens
        if max_tokens is None:
            limit = self._model.max_model_len
            room = DEFAULT_CHAT_TOKENS if limit is None else limit - len(prompt)
            max_tokens = max(1, min(DEFAULT_CHAT_TOKENS, room))
        self._check(prompt, request, max_tokens)
        num_top = request.top_logprobs if request.logprobs else None
        kind = "delta" if request.stream else "message"
        started = set[int]()
        """Choices whose role was sent."""

        def to_choice(index: int, choice: Choice) -> dict[str, Any]:
            role = {} if index in started else {"role": "assistant"}
            started.add(index)
            return {
                "index": index,
                kind: {**role, "content": choice.text},
                "logprobs": None if choice.tokens is None else _chat_logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }

        async def answer(deltas: TextDeltas | None) -> list[Answer]:
            return [await self._answer(prompt, request, max_tokens, num_top, deltas=deltas)]

        body = self._body("chatcmpl", "chat.completion" + ".chunk" * request.stream)
        return await self._respond(request, body, answer, to_choice)

    async def _respond(
        self,
        request: _Request,
        body: dict[str, Any],
        answer: Callable[[TextDeltas | None], Coroutine[Any, Any, list[Answer]]],
        to_choice: Callable[[int, Choice], dict[str, Any]],
    ) -> Response:
        """Return the response to a request: one object, or server-sent events.

        Args:
            body: the fields that the object and all events have.
            answer: returns the answers to all prompts; passes tokens on while they are generated.
            to_choice: returns a choice in the format of the route.
        """
        if not request.stream:
            answers = await answer(None)
            choices = [to_choice(*item) for item in enumerate(_choices(answers))]
            return JSONResponse({**body, "choices": choices, "usage": _usage(answers)})
        deltas = TextDeltas(self._model.chat_format, request.stop_strings)
        with_usage = request.stream_options is not None and request.stream_options.include_usage

        async def events() -> AsyncIterator[dict[str, Any]]:
            task = asyncio.create_task(answer(deltas))
            task.add_done_callback(lambda _: deltas.close())
            try:
                async for index, text in deltas:
                    yield {**body, "choices": [to_choice(index, Choice(text, None, None))]}
                answers = await task
            finally:
                task.cancel()
            for index, choice in enumerate(_choices(answers)):
                rest = replace(choice, text=choice.text[len(deltas.sent_text[index]) :])
                yield {**body, "choices": [to_choice(index, rest)]}
            if with_usage:
                yield {**body, "choices": [], "usage": _usage(answers)}

        stream = events()
        first = await anext(stream)  # errors before it are the response
        return StreamingResponse(_event_lines(first, stream), media_type="text/event-stream")

    def _prompts(
        self, prompt: str | list[int] | list[str] | list[list[int]]
    ) -> tuple[list[list[int]], list[str]]:
        """Return token ids and text of each prompt of a request."""
        several: list[Any] = (
            [prompt]
            if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
            else list(prompt)
        )
        if not several:
            raise BadRequest("prompt: the list is empty", "prompt")
        ids, texts = list[list[int]](), list[str]()
        for item in several:
            tokens = self._model.encode(item) if isinstance(item, str) else item
            vocabulary = len(self._model.tokenizer)
            wrong = [token for token in tokens if not 0 <= token < vocabulary]
            if wrong:
                raise BadRequest(
                    f"prompt: {wrong[0]} is no token id; they are below {vocabulary}", "prompt"
                )
            ids.append(tokens)
            texts.append(item if isinstance(item, str) else self._model.decode(tokens))
        return ids, texts

    async def _answer(
        self,
        prompt: list[int],
        request: _Request,
        max_tokens: int,
        num_top: int | None,
        *,
        prompt_text: str | None = None,
        deltas: TextDeltas | None = None,
        first_index: int = 0,
    ) -> Answer:
        """Return the choices for one prompt.

        Args:
            num_top: number of most likely tokens for each position; None: no log-probabilities.
            prompt_text: text with which each choice begins; None: choices do not echo the prompt.
            deltas: receives the tokens while they are generated, unless the request needs more
                than their text.
            first_index: index of the first choice in the response.
        """
        sampling = request.sampling_params(max_tokens)
        completions = [Completion([], [], stopped=False)] * request.n
        if max_tokens:
            on_token = None
            if deltas is not None and num_top is None and prompt_text is None:
                on_token = partial(deltas.add_token, first_index)
            future = self._service.complete(prompt, sampling, request.n, on_token)
            completions = await asyncio.wrap_future(future)
        scores: list[TokenScores | None] = [None] * len(completions)
        if num_top is not None and (num_top or prompt_text is not None):
            futures = [
                self._service.score([*prompt, *c.tokens], sampling.temperature, num_top)
                for c in completions
            ]
            scores = [*await asyncio.gather(*map(asyncio.wrap_future, futures))]
        choices = []
        for completion, score in zip(completions, scores, strict=True):
            text, count = self._visible_text(completion, sampling.stop)
            tokens = None
            if num_top is not None:
                tokens = self._scored_tokens(prompt, completion, count, score, num_top)
                tokens = tokens if prompt_text is not None else tokens[len(prompt) :]
            reason = "stop" if completion.stopped else "length"
            choices.append(Choice((prompt_text or "") + text, reason, tokens))
        return Answer(choices, completions, len(prompt))

    def _check(self, prompt: Sequence[int], request: _Request, max_tokens: int) -> None:
        """Check that a request can be answered.

        Raises:
            BadRequest: the prompt is empty or too long, another model is requested, or a stop
                string would never match.
        """
        model = self._model
        if request.model not in (None, model.name):
            hint = did_you_mean(str(request.model), [model.name])
            raise BadRequest(f"model: no model {request.model!r}{hint}", "model", 404)
        if not prompt:
            raise BadRequest("prompt: it has no tokens", "prompt")
        if model.max_model_len is not None and len(prompt) + max_tokens > model.max_model_len:
            raise BadRequest(
                f"max_tokens: {len(prompt)} tokens of the prompt and {max_tokens} new ones do not "
                f"fit into the context of {model.max_model_len} tokens; shorten one of them",
                "max_tokens",
            )
        for text in request.stop_strings:
            if (token := model.chat_format.undecoded_token_in(text)) is not None:
                raise BadRequest(
                    f"stop: {text!r} has the special token {token!r} and more text, so it would "
                    f"never match; use {token!r} alone",
                    "stop",
                )

    def _visible_text(self, completion: Completion, stops: Sequence[str]) -> tuple[str, int]:
        """Return the text of a completion before its stop string, and the number of its tokens."""
        decode, tokens = self._model.chat_format.decode, completion.tokens
        text = decode(tokens)
        if not (completion.stopped and stops):
            return text, len(tokens)
        # The stop string ends in the last token; with min_tokens, others may precede it.
        start = len(decode(tokens[:-1]))
        found = (text.find(stop, max(0, start - len(stop) + 1)) for stop in stops)
        ends = [position for position in found if position >= 0]
        if not ends:
            return text, len(tokens)
        text, count = text[: min(ends)], len(tokens)
        while count and len(decode(tokens[: count - 1])) >= len(text):
            count -= 1
        return text, count

    def _scored_tokens(
        self,
        prompt: Sequence[int],
        completion: Completion,
        count: int,
        scores: TokenScores | None,
        num_top: int,
    ) -> list[ScoredToken]:
        """Return the tokens of the prompt and the first ``count`` tokens of the completion.

        Args:
            scores: those of prompt and completion; None: only the completion has log-probabilities.
        """
        text_of = self._model.token_text
        tokens = [*prompt, *completion.tokens[:count]]
        scored = list[ScoredToken]()
        for position, token in enumerate(tokens):
            text, index = text_of(token), position - len(prompt)
            if index >= 0:
                logprob = completion.logprobs[index]
            elif scores is None or position == 0:
                scored.append(ScoredToken(text, None, None))
                continue
            else:
                logprob = float(scores.logprobs[position - 1])
            logprob = max(logprob, MIN_LOGPROB)
            top: dict[str, float] | None = None
            if num_top and scores is not None:
                row = position - 1
                pairs = zip(scores.top_tokens[row], scores.top_logprobs[row], strict=True)
                top = {}
                for other, value in [*pairs, (token, logprob)]:
                    # Tokens with equal texts are rare; the more likely one is shown.
                    top.setdefault(text_of(int(other)), max(float(value), MIN_LOGPROB))
            scored.append(ScoredToken(text, logprob, top))
        return scored

    def _body(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the fields of a response that do not depend on the answers."""
        return {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model.name,
            "system_fingerprint": f"weights-{self._model.version}",
        }


@dataclass(frozen=True)
class Answer:
    """The choices for one prompt, and what they were made from."""

    choices: list[Choice]
    completions: list[Completion]
    num_prompt_tokens: int


async def _parse_body(http_request: Request, cls: type[R]) -> R:
    """Return the body of a request; raises BadRequest if it is invalid."""
    body = bytearray()
    async for chunk in http_request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the request is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    try:
        return cls.model_validate_json(bytes(body))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = [str(part) for part in problem["loc"]]
        key = path[0] if path else None
        message = problem["msg"]
        if problem["type"] == "extra_forbidden":
            message = f"not supported{did_you_mean(path[-1], cls.model_fields)}"
        where = f"{'.'.join(path)}: " if path else ""
        raise BadRequest(f"{where}{message}", key) from None


async def _event_lines(
    first: dict[str, Any], others: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[str]:
    """Yield the lines of server-sent events."""
    yield f"data: {json.dumps(first)}\n\n"
    try:
        async for event in others:
            yield f"data: {json.dumps(event)}\n\n"
    except Exception as error:
        yield f"data: {bytes(response_to_error(error).body).decode()}\n\n"
        return
    yield "data: [DONE]\n\n"


def _choices(answers: Sequence[Answer]) -> list[Choice]:
    return [choice for answer in answers for choice in answer.choices]


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    num_new = sum(len(c.tokens) for answer in answers for c in answer.completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def _completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion."""
    lengths = [len(token.text) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [token.top for token in tokens],
        "text_offset": (np.cumsum(lengths) - lengths).tolist(),
    }


def _chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion."""

    def entry(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(token.text, token.logprob),
                "top_logprobs": [entry(*pair) for pair in (token.top or {}).items()],
            }
            for token in tokens
        ]
    }
