"""Wake, the event that ends the daemon's wait: no signal is lost, even if another thread gets the signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kprobefs.daemon.wake import Wake


@pytest.fixture
def wake() -> Iterator[Wake]:
    made = Wake()
    before = signal.signal(signal.SIGUSR1, lambda *_: made.set())
    yield made
    signal.signal(signal.SIGUSR1, before)
    signal.set_wakeup_fd(-1)


def test_a_signal_before_the_wait(wake: Wake) -> None:
    signal.raise_signal(signal.SIGUSR1)
    wake.wait()
    assert wake.is_set()


def test_a_signal_that_another_thread_gets(wake: Wake) -> None:
    """The main thread's wait ends even if the signal interrupts only another thread."""

    def get_one() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        done.wait()

    done = threading.Event()
    other = threading.Thread(target=get_one)
    other.start()
    wake.wait()
    done.set()
    other.join()
    assert wake.is_set()


def test_another_thread_sets_it(wake: Wake) -> None:
    other = threading.Timer(0.05, wake.set)
    other.start()
    wake.wait()
    other.join()
