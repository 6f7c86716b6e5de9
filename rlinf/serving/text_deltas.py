"""The texts of streamed responses, part by part, while their tokens are generated.

A part is sent as soon as no later token can change or hide it. So incomplete characters wait, and
what may be the beginning of a stop string.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from rlinf.models.chat_format import ChatFormat


class TextDeltas:
    """An asynchronous iterator over new text: pairs of the index of a choice, and its next part."""

    def __init__(self, chat_format: ChatFormat, stops: Sequence[str]) -> None:
        self._chat_format = chat_format
        self._num_withheld = max(map(len, stops), default=1) - 1
        """Characters at the end of a text that may belong to a stop string."""
        self._loop = asyncio.get_running_loop()
        self._received = asyncio.Queue[tuple[int, int] | None]()
        self._tokens = defaultdict[int, list[int]](list)
        self.sent_text = defaultdict[int, str](str)

    def add_token(self, first_index: int, number: int, token: int) -> None:
        """Add a token to the choice ``first_index + number``; thread-safe."""
        with suppress(RuntimeError):  # the server has stopped
            item = (first_index + number, token)
            self._loop.call_soon_threadsafe(self._received.put_nowait, item)

    def close(self) -> None:
        """End the iteration."""
        self._received.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[tuple[int, str]]:
        while True:
            # If decoding is slower than the engine, several tokens become one delta.
            items = [await self._received.get()]
            while not self._received.empty():
                items.append(self._received.get_nowait())
            received = [item for item in items if item is not None]
            if len(received) < len(items):
                return
            for index, token in received:
                self._tokens[index].append(token)
            for index in dict.fromkeys(index for index, _ in received):
                if delta := self._take_delta(index):
                    yield index, delta

    def _take_delta(self, index: int) -> str:
        text = self._chat_format.decode_stable(self._tokens[index])
        delta = text[len(self.sent_text[index]) : max(0, len(text) - self._num_withheld)]
        self.sent_text[index] += delta
        return delta
