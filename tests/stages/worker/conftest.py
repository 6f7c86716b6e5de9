"""What tests of weights between workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.stages.worker.test_weight_transfer import Make, Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Make]:
    made: list[Worker] = []

    def make(name: str, dtype: torch.dtype | None = None, behind: int = 0) -> Worker:
        made.append(Worker(tmp_path, name, dtype, behind))
        return made[-1]

    yield make
    for each in made:
        each.close()
