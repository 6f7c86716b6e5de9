"""What tests of weights between workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stages.test_weights import Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def make(name: str) -> Worker:
        made.append(Worker(tmp_path, name))
        return made[-1]

    yield make
    for each in made:
        each.close()
