"""The watchdog of runs: budgets, unwanted runs, time in handlers, and a thread that sleeps while nothing
runs.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emulated_kernel.machine.run_watchdog import HandlerTime, Watchdog
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.util.errors import KernelError
from tests.fuse.harness import PATIENCE, eventually
from tests.machine.guests import CODE, boot


def _switches(thread_id: int) -> int:
    with open(f"/proc/self/task/{thread_id}/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["voluntary_ctxt_switches"])


def _sleeps(thread_id: int) -> bool:
    """Return True if a thread neither runs nor waits for a CPU."""
    stat = Path(f"/proc/self/task/{thread_id}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] == "S"


def _watchdog_thread(others: set[threading.Thread]) -> threading.Thread:
    (thread,) = [thread for thread in set(threading.enumerate()) - others if thread.name == "run-budget"]
    return thread


def test_idle_watchdog_never_wakes() -> None:
    others = set(threading.enumerate())
    machine = boot("again: nop; hlt; jmp again", run_budget=0.02)
    machine.run()
    time.sleep(0.2)
    thread_id = _watchdog_thread(others).native_id
    assert thread_id is not None
    # On a busy host, the watchdog's thread may not sleep yet.
    eventually(lambda: _sleeps(thread_id))
    before = _switches(thread_id)
    time.sleep(0.3)
    assert _switches(thread_id) == before
    machine.close()
    assert all(thread.name != "run-budget" for thread in set(threading.enumerate()) - others)


def busy(until: Callable[[], bool]) -> None:
    """Use the CPU until `until` returns True, for at most 5 s."""
    end = time.monotonic() + 5
    while not until() and time.monotonic() < end:
        pass


def test_a_run_kept_from_the_cpu_is_not_over_its_budget() -> None:
    stopped = threading.Event()
    watchdog = Watchdog(stopped.set, HandlerTime(), 0.02)
    watchdog.arm()
    assert not stopped.wait(0.2)
    assert not watchdog.disarm()
    watchdog.close()


def test_expired_run_is_told_from_the_next_one() -> None:
    stopped = threading.Event()
    watchdog = Watchdog(stopped.set, HandlerTime(), 0.02)
    watchdog.arm()
    busy(stopped.is_set)
    assert watchdog.disarm()
    watchdog.arm()
    assert not watchdog.disarm()
    watchdog.close()


def test_a_run_ends_with_who_wanted_it() -> None:
    """The watchdog stops a run that its client no longer wants, even if the watchdog's thread has begun a
    long sleep.
    """
    stopped = threading.Event()
    watchdog = Watchdog(stopped.set, HandlerTime(), 1000.0)
    watchdog.arm()
    time.sleep(0.2)
    watchdog.disarm()
    watchdog.ask(lambda: True)
    watchdog.arm()
    assert stopped.wait(PATIENCE)
    assert watchdog.disarm()
    assert watchdog.was_unwanted
    watchdog.ask(None)
    stopped.clear()
    watchdog.budget = 0.02
    watchdog.arm()
    busy(stopped.is_set)
    assert watchdog.disarm()
    assert not watchdog.was_unwanted
    watchdog.close()


def test_watchdog_stops_again_if_the_first_stop_was_missed() -> None:
    stops = []
    watchdog = Watchdog(lambda: stops.append(time.monotonic()), HandlerTime(), 0.02)
    watchdog.arm()
    busy(lambda: len(stops) >= 2)
    assert watchdog.disarm()
    assert len(stops) >= 2
    watchdog.close()


@pytest.mark.parametrize("fast", [True, False])
def test_runs_that_end_with_their_budget_lose_nothing(fast: bool) -> None:
    """If a run's budget ends near a hypercall, no hypercall is lost or repeated, and every loop is
    finished.
    """
    source = "again: mov rcx, rdi; inner: inc rbx; dec rcx; jnz inner; mov eax, 2; hlt; jmp again"
    machine = boot(source, fast_registers=fast, run_budget=0.001)
    kinds = dict.fromkeys(TrapKind, 0)
    expected = 0
    until = time.monotonic() + 90
    machine.regs.di = length = 400_000
    while min(kinds[TrapKind.BUDGET], kinds[TrapKind.HYPERCALL]) < 150:
        assert time.monotonic() < until, kinds
        trap = machine.run()
        kinds[trap.kind] += 1
        if trap.kind is TrapKind.BUDGET:
            continue
        expected += length
        assert (trap.number, machine.regs.bx) == (2, expected)
        # On a busy host, the watchdog's thread may be many times as late as its budget is long.
        step = length // 50
        length = max(1000, length + (step if kinds[TrapKind.BUDGET] < kinds[TrapKind.HYPERCALL] else -step))
        machine.regs.di = length


def spin(seconds: float) -> None:
    """Use `seconds` of the host's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(("hits", "seconds"), [(2, 0.1), (400, 0.0005)])
def test_handlers_take_little_time_of_the_guests(hits: int, seconds: float) -> None:
    """The time of handlers, few long ones or many short ones, does not count for the budget of a run."""
    machine = boot(f"mov ecx, {hits}; again: int3; dec ecx; jnz again; mov eax, 2; hlt", run_budget=0.15)
    machine.breakpoints[CODE + 5] = lambda _regs: spin(seconds)
    assert machine.run().kind is TrapKind.HYPERCALL
    assert not machine.handler_time.is_measured


def test_a_loop_with_handlers_ends_too() -> None:
    """A loop of breakpoints ends with the budget, although the guest itself executes almost nothing."""
    machine = boot("again: int3; jmp again", run_budget=0.02)
    machine.breakpoints[CODE] = lambda _regs: spin(0.0001)
    assert machine.run().kind is TrapKind.BUDGET


def test_a_run_is_watched_though_the_host_had_no_memory() -> None:
    """If the watchdog's thread runs out of memory once, the thread continues and stops the next run."""
    stopped = threading.Event()
    tries: list[float] = []

    def stop() -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise MemoryError
        stopped.set()

    watchdog = Watchdog(stop, HandlerTime(), 0.02)
    watchdog.arm()
    busy(lambda: bool(tries))
    # The thread may have tried a second time by now.
    watchdog.disarm()
    stopped.clear()
    watchdog.arm()
    busy(stopped.is_set)
    assert watchdog.disarm()
    watchdog.close()


def test_no_run_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watchdog = Watchdog(lambda: None, HandlerTime(), 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        for _ in range(2):
            with pytest.raises(KernelError) as caught:
                watchdog.arm()
            assert caught.value.errno == errno.ENOMEM
    watchdog.arm()
    watchdog.disarm()
    watchdog.close()
