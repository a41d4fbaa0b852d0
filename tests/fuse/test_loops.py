"""The request loops: how many threads there are, and that a blocked one costs nobody a turn."""

from __future__ import annotations

import threading

from kprobefs.loops import FREE_LOOPS, Loops


def test_all_loops_have_ended_when_run_returns() -> None:
    ended = []
    Loops(lambda: ended.append(threading.get_ident())).run()
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
                release.wait(5)
        else:
            release.wait(5)

    loops_left = [True] * blockers
    loops = Loops(loop)
    runner = threading.Thread(target=loops.run)
    runner.start()
    for _ in range(FREE_LOOPS + blockers):
        assert started.acquire(timeout=5)
    assert not started.acquire(timeout=0.05)
    release.set()
    runner.join(5)
    assert not runner.is_alive()
