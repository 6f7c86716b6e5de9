"""The fixture of all tests in this folder."""

from __future__ import annotations

import pytest

from tests.gpu.devices import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device on which the test computes."""
    return str(request.param)
