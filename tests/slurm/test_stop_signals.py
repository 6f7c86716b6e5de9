"""Warnings and interrupts that must not be lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from slurm.stop_signals import StopFlag


class Freed:
    """Python drops what is raised while it is freed."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever started the tests in the background had interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_python_drops_is_raised_at_the_next_look() -> None:
    with StopFlag() as flag:
        assert not flag.is_set()
        made = Freed()
        del made
        with pytest.raises(KeyboardInterrupt):
            flag.is_set()
        assert not flag.is_set(), "once"


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_warning_sets_the_flag_and_raises_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopFlag() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), number)
        assert flag.is_set()
    assert signal.getsignal(number) is before
