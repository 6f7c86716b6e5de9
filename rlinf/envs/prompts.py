"""Text tasks: an episode is one prompt and one response."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.channels.base import Channel
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Environment, Episodes


@dataclass(frozen=True)
class Prompt:
    """A question and its reference answer."""

    text: str
    answer: str


class PromptEnvironment(Environment):
    """Asks prompts, collects responses. A task says which prompts and how a response is scored."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.config = config
        self.tokenizer = processor

    @abstractmethod
    def prompts(self, episodes: Episodes) -> list[Prompt]:
        """The prompts of ``episodes.starts``; equal arguments give equal prompts."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of texts, int64; a task may format them for the model first."""
        if not texts:
            return []
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in ids]

    def simulate(
        self, episodes: Episodes, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        prompts = self.prompts(episodes)
        encoded = self.encode([prompt.text for prompt in prompts])
        samples = episodes.samples()
        row_of = {number: i // episodes.group_size for i, number in enumerate(samples.tolist())}
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        padded = np.zeros((len(encoded), int(lengths.max(initial=1))), dtype=np.int64)
        for line, ids in zip(padded, encoded, strict=True):
            line[: len(ids)] = ids
        observations.put(
            Record(
                Identity(episodes.iteration, int(samples[0]) if len(samples) else 0),
                steps={
                    "sample": samples,
                    "prompt": padded.repeat(episodes.group_size, axis=0),
                    "prompt_length": lengths.repeat(episodes.group_size),
                },
                info={"horizon": episodes.horizon, "temperature": episodes.temperature},
            ),
            weight=max(1, len(samples)),
        )
        observations.close()
        for reply in actions:
            texts = self.tokenizer.batch_decode(
                [
                    tokens[:length]
                    for tokens, length in zip(
                        reply.steps["tokens"], reply.steps["length"], strict=True
                    )
                ],
                skip_special_tokens=True,
            )
            for i, sample in enumerate(reply.steps["sample"]):
                row, length = row_of[int(sample)], int(reply.steps["length"][i])
                steps = {
                    "actions": reply.steps["tokens"][i, :length],
                    "logprobs": reply.steps["logprobs"][i, :length],
                }
                if "version" in reply.steps:
                    steps["versions"] = reply.steps["version"][i, :length]
                yield Record(
                    Identity(episodes.iteration, int(sample)),
                    steps=steps,
                    context={"prompt": encoded[row]},
                    info={
                        "group": int(episodes.starts[row]),
                        "policy_version": reply.info["version"],
                        "stop_reason": "stop" if reply.steps["stopped"][i] else "length",
                        "prompt_text": prompts[row].text,
                        "text": texts[i],
                        "answer": prompts[row].answer,
                    },
                )

    def score(self, trajectories: Sequence[Record]) -> list[float]:
        return [float(self.grade(str(t.info["text"]), str(t.info["answer"]))) for t in trajectories]

    @abstractmethod
    def grade(self, response: str, answer: str) -> float:
        """1 for a right response, 0 for a wrong one, or something between."""
