"""WorkerThreads, which run the loops that take requests: their number, and the replacement of a loop that
blocks.
"""

from __future__ import annotations

import errno
import threading
from contextlib import ExitStack, suppress

import pytest

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from kprobefs.fuse.worker_threads import FAILED, FREE_LOOPS, WorkerThreads
from tests.fuse.harness import PATIENCE, eventually


def test_all_loops_have_ended_when_run_returns() -> None:
    ended = []
    WorkerThreads(lambda: ended.append(threading.get_ident())).run()
    assert len(ended) == FREE_LOOPS


def test_a_loop_that_blocks_is_replaced() -> None:
    started = threading.Semaphore(0)
    release = threading.Event()
    turn = threading.Lock()
    blockers = 2

    def loop() -> None:
        started.release()
        with turn:
            blocks = loops_left.pop() if loops_left else False
        if blocks:
            with loops.blocking():
                release.wait(PATIENCE)
        else:
            release.wait(PATIENCE)

    loops_left = [True] * blockers
    loops = WorkerThreads(loop)
    runner = threading.Thread(target=loops.run)
    runner.start()
    for _ in range(FREE_LOOPS + blockers):
        assert started.acquire(timeout=PATIENCE)
    assert not started.acquire(timeout=0.05)
    release.set()
    runner.join(PATIENCE)
    assert not runner.is_alive()


def test_the_last_thread_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host can start no more threads, a request that would block the last loop fails with ENOMEM.

    Other requests are answered.
    """
    threads = FREE_LOOPS
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        nonlocal threads
        if not threads:
            raise RuntimeError("can't start new thread")
        threads -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    loops = WorkerThreads(lambda: None)
    loops.run()
    for _ in range(2):
        with ExitStack() as blocked:
            for number in range(1, FREE_LOOPS):
                assert blocked.enter_context(loops.blocking()) == number
            with pytest.raises(KernelError) as caught:
                blocked.enter_context(loops.blocking())
            assert caught.value.errno == errno.ENOMEM


def test_who_waits_long_for_the_kernels_lock_is_replaced() -> None:
    """If a loop waits long for the control lock, a new loop is started, so that a further request is
    answered.
    """
    lock, begun, answered = ControlLock(), threading.Semaphore(0), threading.Event()

    def loop() -> None:
        begun.release()
        with turn:
            waits = loops_left.pop() if loops_left else False
        if waits:
            with lock:
                pass
        else:
            answered.set()

    turn, loops_left = threading.Lock(), [True] * FREE_LOOPS
    loops = WorkerThreads(loop)
    lock.waiting = loops.waiting
    runner = threading.Thread(target=loops.run)
    with lock:
        runner.start()
        assert answered.wait(PATIENCE)
    runner.join(PATIENCE)
    assert not runner.is_alive()


def test_the_lock_is_waited_for_without_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loops = WorkerThreads(lambda: None)
    monkeypatch.setattr(loops, "_threads", [threading.current_thread()])
    monkeypatch.setattr(threading.Thread, "start", none)
    with loops.waiting():
        assert loops._blocked == 0


def test_only_loops_are_replaced_and_not_behind_their_end() -> None:
    """A new loop is started only if the thread that blocks is a loop, and the session has not ended."""
    begun = []
    loops = WorkerThreads(lambda: begun.append(1))
    loops.run()
    with loops.waiting(), loops.waiting():
        assert len(begun) == FREE_LOOPS
    with loops.blocking():
        assert len(begun) == len(loops._threads) == FREE_LOOPS


def test_only_so_many_that_wait_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kprobefs.fuse.worker_threads.MAX_WAITING", 1)
    release = threading.Event()
    loops = WorkerThreads(lambda: release.wait(PATIENCE))
    runner = threading.Thread(target=loops.run)
    runner.start()
    try:
        eventually(lambda: len(loops._threads) == FREE_LOOPS)
        loops._threads.append(threading.current_thread())
        with loops.waiting(), loops.waiting():
            assert loops._blocked == 1
        loops._threads.remove(threading.current_thread())
    finally:
        release.set()
        runner.join(PATIENCE)
    assert not runner.is_alive()


def test_a_thread_without_a_buffer_takes_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new thread gets no buffer, the thread ends, and a request that would block the last loop is
    refused.

    Another thread is started only after some time.
    """
    release, firsts = threading.Event(), [True]

    def loop() -> int:
        if firsts:
            firsts.clear()
            release.wait(PATIENCE)
            return 0
        return FAILED

    monkeypatch.setattr("kprobefs.fuse.worker_threads.RETRY", 60)
    loops = WorkerThreads(loop, free=1)
    runner = threading.Thread(target=loops.run)
    runner.start()
    eventually(lambda: not firsts)
    started = 0
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    with suppress(KernelError), loops.blocking():
        pass
    eventually(lambda: len(loops._threads) == 1)
    for _ in range(50):
        with pytest.raises(KernelError) as caught, loops.blocking():
            pass
        assert caught.value.errno == errno.ENOMEM
    assert started == 1
    # Later, another thread is tried.
    loops._next_try = 0.0
    with suppress(KernelError), loops.blocking():
        pass
    assert started == 2
    release.set()
    runner.join(PATIENCE)
    assert not runner.is_alive()
