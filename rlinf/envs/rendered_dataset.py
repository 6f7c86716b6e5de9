"""Prompts or conversations that are rendered from problems when they are used."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlinf.envs.chat_problems import ChatProblem
from rlinf.errors import DataError
from rlinf.seeding import generator

log = logging.getLogger(__name__)
T = TypeVar("T")

RENDER_CHUNK, RENDER_CHUNK_CHARACTERS = 2048, 8 << 20
"""Maximum number of problems, and approximate maximum of characters, that are rendered at once."""
MEASURED_PROBLEMS = 4096
"""Number of problems whose tokens are counted before a run. It decides which problems are drawn,
so a change of it changes results."""
MAX_CACHED_PROBLEMS = 4096
"""Maximum number of rendered problems that stay in memory."""
MAX_REDRAWS = 1000
"""Maximum number of problems that are drawn instead of one whose prompt is too long."""


@dataclass(frozen=True)
class LengthLimit:
    """The maximum number of tokens of an item, and the key that sets it."""

    key: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.key}={self.tokens}"


class RenderedDataset(Generic[T]):
    """Items (prompts or whole conversations) that are rendered from problems on use.

    The tokens of the first :data:`MEASURED_PROBLEMS` problems are counted at once, and their items
    above the limit are left out. Further problems are rendered when they are drawn. If one is then
    above the limit, another is drawn instead. The last :data:`MAX_CACHED_PROBLEMS` rendered
    problems stay in memory.
    """

    def __init__(
        self,
        problems: Sequence[ChatProblem],
        key: str,
        render: Callable[[Sequence[ChatProblem]], list[tuple[int, T]]],
        num_tokens: Callable[[T], int],
        limit: LengthLimit,
    ) -> None:
        """
        Args:
            key: configuration key that names the set of problems.
            render: renders problems to items, each with the index of its problem in the argument. A
                problem may become several consecutive items.
            num_tokens: returns the number of tokens of an item.

        Raises:
            DataError: all of the first problems are above the limit.
        """
        self.problems, self.key, self.limit = problems, key, limit
        self._render, self._num_tokens = render, num_tokens
        self._cache: OrderedDict[int, list[T]] = OrderedDict()
        """Items within the limit by index of their problem."""
        self._places = list[tuple[int, int]]()
        """For each item of a measured problem within the limit: the index of its problem, and its
        index among the items of that problem."""
        self.num_measured = 0
        """Number of problems whose tokens were counted, from the first on."""
        self.num_omitted = 0
        """Number of them that have an item above the limit."""
        self.longest = 0
        """Number of tokens of the longest of their items within the limit."""
        self._has_warned = False
        first_omitted = self._measure(min(MEASURED_PROBLEMS, len(problems)))
        self._num_known, self._first_unknown = len(self._places), self.num_measured
        first = "" if self.is_measured else "first "
        if not self._places:
            raise DataError(
                f"{key}: all {first}{self.num_measured} problems, from {problems[0].location} on, "
                f"are longer than {limit}"
            )
        if first_omitted is not None:
            log.warning(
                "%s: %d of %s%d problems are left out, because they are longer than %s; the first "
                "is %s with %d tokens",
                key,
                self.num_omitted,
                first and f"the {first}",
                self.num_measured,
                limit,
                problems[first_omitted[0]].location,
                first_omitted[1],
            )

    def __len__(self) -> int:
        """Return the number of items to draw from. A problem that was not measured at first counts
        as one."""
        return self._num_known + len(self.problems) - self._first_unknown

    @property
    def is_measured(self) -> bool:
        """Whether the tokens of all problems were counted."""
        return self.num_measured == len(self.problems)

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens of an item within the limit."""
        return self.longest if self.is_measured else self.limit.tokens

    def count(self) -> int:
        """Return the number of items within the limit, after counting the tokens of all."""
        self._measure(len(self.problems))
        return len(self._places)

    def first(self, indices: Sequence[int]) -> list[T]:
        """Return items by index among those within the limit, in the order of the file. Beyond the
        last item they begin again."""
        while len(self._places) <= max(indices, default=0) and not self.is_measured:
            self._measure(self.num_measured + RENDER_CHUNK)
        places = [self._places[index % len(self._places)] for index in indices]
        items = self._items([row for row, _ in places])
        return [items[row][part] for row, part in places]

    def draw(self, indices: Mapping[int, int], seed: int) -> dict[int, T]:
        """Return the item of each draw.

        If a drawn problem has no item within the limit, others are drawn instead, at random by
        ``seed`` and the number of the draw. If it has several, the number chooses one.

        Args:
            indices: index of the item, below ``len(self)``, by number of the draw.

        Raises:
            DataError: too many problems in a row are above the limit.
        """
        found, skipped = dict[int, T](), list[int]()
        pending = dict(indices)
        for attempt in range(MAX_REDRAWS):
            places = {draw: self._place(index) for draw, index in pending.items()}
            items = self._items([row for row, _ in places.values()])
            for draw, (row, part) in places.items():
                if items[row]:
                    found[draw] = items[row][draw % len(items[row]) if part is None else part]
                else:
                    skipped.append(row)
            pending = {
                draw: int(generator(seed, "redraw", self.key, draw, attempt).integers(len(self)))
                for draw in pending
                if draw not in found
            }
            if not pending:
                self._warn_of_skipped(skipped, len(indices))
                return found
        raise DataError(
            f"{self.key}: {MAX_REDRAWS} problems were drawn one after the other, and all are longer"
            f" than {self.limit}; raise it, or remove long problems from the file"
        )

    def _place(self, index: int) -> tuple[int, int | None]:
        """Return the problem of an item, and its index among the items of that problem. None: it is
        not known before the problem is rendered."""
        if index < self._num_known:
            return self._places[index]
        return self._first_unknown + index - self._num_known, None

    def _warn_of_skipped(self, rows: Sequence[int], num_draws: int) -> None:
        """Warn of skipped problems, once."""
        if rows and not self._has_warned:
            log.warning(
                "%s: %d problems are skipped in %d draws and others drawn instead, because they are"
                " longer than %s; the first is %s. Later ones are skipped without a warning",
                self.key,
                len(rows),
                num_draws,
                self.limit,
                self.problems[rows[0]].location,
            )
            self._has_warned = True

    def _measure(self, end: int) -> tuple[int, int] | None:
        """Count the tokens of the problems before ``end``. Returns the first problem that has an
        item above the limit, and its number of tokens; None: there is none."""
        first_omitted = None
        for rows, problems in _chunks(self.problems, self.num_measured, end):
            rendered = self._render_rows(rows, problems)
            for row, items in rendered.items():
                lengths = [self._num_tokens(item) for item in items]
                fitting = [length for length in lengths if length <= self.limit.tokens]
                self._places += [(row, part) for part in range(len(fitting))]
                self.longest = max(self.longest, *fitting, 0)
                if len(fitting) < len(lengths):
                    self.num_omitted += 1
                    first_omitted = first_omitted or (row, max(lengths))
            self._add_to_cache(rendered)
            self.num_measured = rows[-1] + 1
        return first_omitted

    def _items(self, rows: Sequence[int]) -> dict[int, list[T]]:
        """Return the items within the limit of each problem."""
        cached = {row: self._cache[row] for row in rows if row in self._cache}
        missing = [row for row in dict.fromkeys(rows) if row not in cached]
        rendered = self._render_rows(missing, [self.problems[row] for row in missing])
        return cached | self._add_to_cache(rendered)

    def _render_rows(
        self, rows: Sequence[int], problems: Sequence[ChatProblem]
    ) -> dict[int, list[T]]:
        """Return all items of some problems by index of the problem."""
        rendered: dict[int, list[T]] = {row: [] for row in rows}
        for index, item in self._render(problems) if problems else ():
            rendered[rows[index]].append(item)
        return rendered

    def _add_to_cache(self, rendered: Mapping[int, Sequence[T]]) -> dict[int, list[T]]:
        """Keep the items within the limit, and return them."""
        items = {
            row: [i for i in items if self._num_tokens(i) <= self.limit.tokens]
            for row, items in rendered.items()
        }
        self._cache.update(items)
        while len(self._cache) > MAX_CACHED_PROBLEMS:
            self._cache.popitem(last=False)
        return items


def _chunks(
    problems: Sequence[ChatProblem], start: int, end: int
) -> Iterator[tuple[list[int], list[ChatProblem]]]:
    """Yield the problems from ``start`` to ``end`` in chunks, with their indices."""
    chunk, size = list[ChatProblem](), 0
    end = min(end, len(problems))
    for row, problem in enumerate(problems[start:end], start):
        chunk.append(problem)
        size += sum(len(message["content"]) for message in problem.messages)
        if len(chunk) == RENDER_CHUNK or size > RENDER_CHUNK_CHARACTERS or row + 1 == end:
            yield list(range(row + 1 - len(chunk), row + 1)), chunk
            chunk, size = [], 0
