"""Text tasks: an episode is one prompt and one response."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from rlinf.channels.channel import Channel
from rlinf.data.record import Record, RecordId, Scalar
from rlinf.data.trajectory import Trajectory, context_fields, info_fields
from rlinf.envs.base import UNFINISHED, Environment, RolloutRequest
from rlinf.models.chat_format import ChatFormat
from rlinf.registry import DEMONSTRATIONS, PROMPTS, REFERENCE_ANSWERS

RESERVED_INFO_KEYS = frozenset(
    {"group", "policy_version", "stop_reason", "prompt_text", "text", "answer"}
)
"""Names that the record of every trajectory has; the ``info`` of a prompt must not use them."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its reference answer."""

    text: str
    answer: str
    info: Mapping[str, Scalar] = field(default_factory=dict, kw_only=True)
    """Extra fields for the reward; they are in ``extra`` of every trajectory."""
    sampling: Mapping[str, Scalar] | None = field(default=None, kw_only=True)
    """Sampling settings, fields of :class:`rlinf.engines.token_sampling.SamplingParams`; None:
    those of the request."""

    def extra_columns(self) -> Mapping[str, np.ndarray]:
        """Return further columns of requests and of trajectories (such as images)."""
        return {}

    @property
    def model_input(self) -> str:
        """Return the text that the model receives; a task may format the question."""
        return self.text


class TextEnvironment(Environment):
    """An environment for language models; its processor is their tokenizer."""

    uses_chat_template: ClassVar[bool] = False
    """Whether the tokenizer's chat template, if it has one, renders the prompts."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.config = config
        self.tokenizer = processor

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Return the chat template, and the token that ends an answer.

        Raises:
            DataError: the tokenizer has several chat templates, and none is the default.
        """
        return ChatFormat.from_tokenizer(self.tokenizer)

    def encode(self, texts: Sequence[str], *, literal: bool = False) -> list[np.ndarray]:
        """Return the token ids of texts, int64.

        Args:
            literal: treat special-token strings as plain text. Use it for text from outside, which
                could otherwise end the policy's turn.
        """
        if not texts:
            return []
        settings = {"split_special_tokens": True} if literal else {}
        ids = self.tokenizer(list(texts), add_special_tokens=False, **settings)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in ids]

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of prompts, int64.

        A chat template writes BOS itself. Other prompts start with the special tokens that the
        tokenizer puts before a text, unless they are present. An empty prompt becomes BOS or EOS,
        because a language model predicts no probability for the first token of a sequence.
        """
        return self.begin_prompts(self.encode(texts))

    def begin_prompts(self, encoded: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the token ids of prompts from those of their texts, int64; see
        :meth:`encode_prompts`."""
        bos = self.tokenizer.bos_token_id
        bos = self.tokenizer.eos_token_id if bos is None else bos
        empty_prompt = np.array([bos], dtype=np.int64)
        has_template = self.uses_chat_template and self.chat_format.template is not None
        prefix = empty_prompt[:0] if has_template else self.chat_format.bos_token_ids
        prompts = (_with_prefix(prefix, ids) for ids in encoded)
        return [ids if len(ids) else empty_prompt for ids in prompts]

    def append_end_token(self, ids: np.ndarray) -> np.ndarray:
        """Return the token ids of an answer, followed by the token that ends answers."""
        return np.append(ids, np.int64(self.chat_format.end_of_turn_token_id))


class PromptEnvironment(TextEnvironment):
    """Sends prompts and collects responses. A task defines the prompts and how a response is
    scored."""

    provides = frozenset({PROMPTS, REFERENCE_ANSWERS, DEMONSTRATIONS})
    supports_resume = True

    @abstractmethod
    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        """Return the prompts of ``request.group_ids``; equal arguments give equal prompts."""

    def simulate(
        self, request: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Trajectory]:
        prompts = self.prompts(request)
        encoded = self.encode_prompts([prompt.model_input for prompt in prompts])
        rows_by_group = {group: row for row, group in enumerate(request.group_ids)}
        samples = request.sample_ids()
        rows = np.array([rows_by_group[s // request.group_size] for s in samples.tolist()], int)
        columns = [prompt.extra_columns() for prompt in prompts]
        stacked = {**_pad_prompts(encoded), **_stack_columns(columns)}
        partial = request.partial_samples or {}
        for settings, positions in _positions_by_sampling(prompts, rows):
            steps = {name: column[rows[positions]] for name, column in stacked.items()}
            observations.put(_token_request(request, settings, samples[positions], steps))
        observations.close()
        for reply in actions:
            replies = zip(reply.steps["tokens"], reply.steps["length"].tolist(), strict=True)
            texts = [self.chat_format.decode(tokens[:length]) for tokens, length in replies]
            for i, sample in enumerate(reply.steps["sample"]):
                row = rows_by_group[int(sample) // request.group_size]
                length = int(reply.steps["length"][i])
                reason = "stop" if reply.steps["stopped"][i] else "length"
                if "unfinished" in reply.steps and reply.steps["unfinished"][i]:
                    reason = UNFINISHED
                version = reply.info["version"]
                if partial:
                    version = partial[int(sample)].require("policy_version")
                versions = reply.steps.get("version")
                yield Trajectory(
                    identity=RecordId(request.iteration, int(sample)),
                    actions=reply.steps["tokens"][i, :length],
                    logprobs=reply.steps["logprobs"][i, :length],
                    versions=None if versions is None else versions[i, :length],
                    prompt=encoded[row],
                    group=int(request.group_ids[row]),
                    policy_version=int(version),
                    stop_reason=reason,
                    prompt_text=prompts[row].text,
                    text=texts[i],
                    answer=prompts[row].answer,
                    **context_fields(columns[row]),
                    **info_fields(prompts[row].info),
                )

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        return [float(self.grade(str(t.text), str(t.answer))) for t in trajectories]

    def grade(self, response: str, answer: str) -> float:
        """Return 1 for a right response, 0 for a wrong one, or a value between them.

        For tasks whose score depends only on the response and the reference answer; other tasks
        override :meth:`score`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither grade nor score")


def _positions_by_sampling(
    prompts: Sequence[Prompt], rows: np.ndarray
) -> list[tuple[Mapping[str, Scalar] | None, list[int]]]:
    """Return the positions in ``rows`` of the samples with equal sampling settings.

    Args:
        rows: index of the prompt of each sample, int64 ``[N]``.
    """
    groups: list[tuple[Mapping[str, Scalar] | None, list[int]]] = []
    for position, row in enumerate(rows.tolist()):
        sampling = prompts[row].sampling
        positions = next((other for settings, other in groups if settings == sampling), None)
        if positions is None:
            groups.append((sampling, positions := []))
        positions.append(position)
    # An engine expects a request even if this process has no samples.
    return groups or [(None, [])]


def _pad_prompts(prompts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of a request for prompts: token ids padded with zeros, and lengths."""
    lengths = np.array([len(ids) for ids in prompts], dtype=np.int64)
    padded = np.zeros((len(prompts), int(lengths.max(initial=1))), dtype=np.int64)
    for padded_row, ids in zip(padded, prompts, strict=True):
        padded_row[: len(ids)] = ids
    return {"prompt": padded, "prompt_length": lengths}


def _token_request(
    request: RolloutRequest,
    sampling: Mapping[str, Scalar] | None,
    samples: np.ndarray,
    steps: Mapping[str, np.ndarray],
) -> Record:
    """Return the request for some samples.

    Args:
        sampling: their sampling settings; None: those of ``request``.
        samples: their numbers, int64 ``[N]``.
        steps: columns of their prompts, ``[N, ...]``.
    """
    partial = request.partial_samples or {}
    return Record(
        RecordId(request.iteration, int(samples[0]) if len(samples) else 0),
        steps={
            "sample": samples,
            **steps,
            **_partial_columns([partial[sample] for sample in samples.tolist() if partial]),
        },
        info=request.request_info if sampling is None else dict(sampling),
    )


def _with_prefix(prefix: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Prepend the prefix to the token ids of a prompt, unless they begin with it already."""
    has_prefix = np.array_equal(ids[: len(prefix)], prefix)
    return ids if has_prefix else np.concatenate([prefix, ids])


def _stack_columns(prompts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the columns of several prompts, padded with zeros; all prompts have the same
    columns."""
    columns: dict[str, np.ndarray] = {}
    for name in prompts[0] if prompts else ():
        arrays = [prompt_columns[name] for prompt_columns in prompts]
        first, length = arrays[0], max(map(len, arrays))
        columns[name] = np.zeros((len(arrays), length, *first.shape[1:]), first.dtype)
        for row, array in zip(columns[name], arrays, strict=True):
            row[: len(array)] = array
    return columns


def _partial_columns(partial: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Return the request columns of samples that the engine continues; empty without samples."""
    if not partial:
        return {}
    lengths = np.array([len(trajectory) for trajectory in partial])
    shape = (len(partial), int(lengths.max()))
    tokens, versions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, (trajectory, length) in enumerate(zip(partial, lengths.tolist(), strict=True)):
        tokens[row, :length] = trajectory.actions
        logprobs[row, :length] = trajectory.logprobs
        versions[row, :length] = trajectory.step_versions()
    return {
        "begun_length": lengths,
        "begun_tokens": tokens,
        "begun_logprobs": logprobs,
        "begun_version": versions,
    }
