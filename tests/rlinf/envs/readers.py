"""Policies that are programs: they read what they are given, search, and answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Engine, RequestReceiver, RolloutHooks, check_token_request


class Reader(Engine):
    """A policy that is a program: it reads all the tokens it is given, and says one message."""

    def __init__(self, says: Callable[[str], str], tokenizer: Any) -> None:
        self._says, self._tokenizer, self.version = says, tokenizer, 4

    def load(self, folder: Path, version: int) -> None:
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        for request in requests:
            check_token_request(request)
            self.stops = json.loads(str(request.info["stop"]))
            prompts = zip(request.steps["prompt"], request.steps["prompt_length"], strict=True)
            text = [
                self._encode(self._says(self._tokenizer.decode(ids[:length])))
                for ids, length in prompts
            ]
            horizon = int(request.info["horizon"])
            lengths = np.array([min(len(ids), horizon) for ids in text], np.int64)
            tokens = np.zeros((len(text), int(lengths.max())), np.int64)
            for line, ids, length in zip(tokens, text, lengths, strict=True):
                line[:length] = ids[:length]
            steps = {
                "sample": request.steps["sample"],
                "tokens": tokens,
                "logprobs": np.full(tokens.shape, -0.5, np.float32),
                "length": lengths,
                "stopped": np.array([len(ids) <= horizon for ids in text]),
            }
            yield Record(request.identity, steps, info={"version": self.version})

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


FACTS = {
    "capital": r"{} is a country in [^\n]*?Its capital is (.+?)\. It has",
    "currency": r"currency of {} is the (.+?) \(",
    "domain": r"domain of {} is (\S+)\. ",
}


def country_of(capital: str, read: str) -> str | None:
    found = re.search(
        rf'"\) (.+?) is a country in \S+(?: America)?\. Its capital is {capital}\. It', read
    )
    return found[1] if found else None


def expert(seen: str) -> str:
    """Looks up what it is asked, one fact after another."""
    question = seen.rpartition("Question: ")[2].partition("\n")[0]
    read = seen.rpartition("Question: ")[2].partition("\n")[2]
    fact = next((name for name in FACTS if question.startswith(f"What is the {name}")), "name")
    if question.startswith("What is the internet domain"):
        fact = "domain"
    subject = re.sub(r"^.*? of ", "", question).rstrip("?")
    if subject.startswith("the country whose capital is "):
        capital = re.escape(subject.removeprefix("the country whose capital is "))
        found = country_of(capital, read)
        if found is None:
            return f"<search>{subject.removeprefix('the country whose ')}</search>"
        if fact == "name":
            return f"<answer>{found}</answer>"
        subject = found
    known = re.search(FACTS[fact].format(re.escape(subject)), read)
    return f"<answer>{known[1]}</answer>" if known else f"<search>{subject} {fact}</search>"


def guesser(seen: str) -> str:
    """The same without a search: the most frequent answer, or the name it was asked of."""
    question = seen.rpartition("Question: ")[2].partition("\n")[0]
    subject = re.sub(r"^.*(?: of | is )", "", question).rstrip("?")
    kind = "Dollar" if "currency" in question else f".{subject[:2].lower()}"
    return f"<answer>{kind if re.search('currency|domain', question) else subject}</answer>"
