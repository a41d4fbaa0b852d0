"""The guest kernel's tasks: boot, adoption, fork, exit, sleeping, preemption."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.util.abi import ERESTARTSYS, HostfsOp, Hypercall, Vector

from .guest import USER_BUFFER, Guest, GuestPanic

NR_OPEN, NR_READ, NR_WRITE, NR_CLOSE, NR_NANOSLEEP, NR_GETPID = 2, 0, 1, 3, 35, 39
NR_FORK, NR_EXIT, NR_GETPPID, NR_GETUID, NR_YIELD = 57, 60, 110, 102, 24


def test_boot_leaves_the_usual_tasks(guest: Guest) -> None:
    names = [(guest.task_u32(task, "pid"), guest.comm(task)) for task in guest.tasks()]
    assert names == [(1, "init"), (2, "kthreadd"), (3, "kworker/0:0")]
    assert guest.comm(guest.current) == "swapper/0"


def test_boot_logs_the_banner(guest: Guest) -> None:
    assert guest.log()[0] + "\n" == guest.image.version


def test_an_adopted_task_mirrors_the_process(guest: Guest) -> None:
    task = guest.adopt(77, "a-very-long-name-indeed", uid=1000, gid=100)
    assert guest.comm(task) == "a-very-long-nam"
    assert guest.syscall(task, NR_GETPID) == 77
    assert guest.syscall(task, NR_GETPPID) == 1
    assert guest.syscall(task, NR_GETUID) == 1000


def test_adoption_takes_a_kernel_threads_pid_but_no_process_twice(guest: Guest) -> None:
    assert guest.comm(guest.adopt(2, "tini")) == "tini"
    assert guest.adopt(2) == -17


def test_comm_can_be_changed(guest: Guest, task: int) -> None:
    assert guest.syscall(task, guest.abi["nr.host_set_comm"], 0, b"vim\0") == 0
    assert guest.comm(task) == "vim"
    assert guest.syscall(task, guest.abi["nr.host_set_comm"], 4711, b"vim\0") == -3


def test_fork_gives_the_wished_pid_and_exit_reaps(guest: Guest, task: int) -> None:
    guest.write(task + guest.abi["task_struct.host_clone_pid"], struct.pack("<i", 4000))
    assert guest.syscall(task, NR_FORK) == 4000
    child = guest.task_of(4000)
    assert guest.comm(child) == "bash"
    assert guest.syscall(child, NR_GETPPID) == 1234
    assert guest.syscall(child, NR_EXIT, 3) is None
    assert guest.exited == [(4000, 3 << 8)]
    assert 4000 not in [guest.task_u32(t, "pid") for t in guest.tasks()]


def test_orphans_go_to_init(guest: Guest, task: int) -> None:
    child_pid = guest.syscall(task, NR_FORK)
    assert child_pid is not None
    guest.syscall(task, NR_EXIT, 0)
    assert guest.syscall(guest.task_of(child_pid), NR_GETPPID) == 1


def test_fork_and_exit_keep_memory_flat(guest: Guest, task: int) -> None:
    def cycle() -> None:
        guest.syscall(guest.task_of(guest.syscall(task, NR_FORK) or 0), NR_EXIT, 0)
        guest.syscall(guest.adopt(9999), NR_EXIT, 0)

    cycle()
    before = guest.free_pages
    for _ in range(30):
        cycle()
    assert guest.free_pages == before


def test_sleeping_ends_by_the_timer(guest: Guest, task: int) -> None:
    assert guest.syscall(task, NR_NANOSLEEP, struct.pack("<qq", 0, 20_000_000), 0) is None
    assert guest.task_u32(task, "state") == 1
    jiffies = guest.u64(guest.symbol("jiffies"))
    guest.idle_until(lambda: guest.u64(guest.symbol("hrtimer_base")) == guest.symbol("hrtimer_base"))
    assert guest.u64(guest.symbol("jiffies")) - jiffies == 5


def test_idle_says_when_the_next_timer_is(guest: Guest, task: int) -> None:
    guest.tick()
    assert guest.run().args[0] == (1 << 64) - 1
    guest.syscall(task, NR_NANOSLEEP, struct.pack("<qq", 1, 0), 0)
    guest.tick()
    assert 10**9 - 1000 < guest.run().args[0] < 10**9


def test_parking_hands_over_to_another_task(guest: Guest, task: int) -> None:
    other = guest.adopt(55, "other")
    guest.wake(task)
    assert guest.run().reason is Hypercall.USER
    guest.park(other)
    assert guest.run().reason is Hypercall.USER
    assert guest.current == other


@pytest.mark.parametrize("behind", [True, False])
def test_an_interrupted_user_stop_asks_again(guest: Guest, task: int, behind: bool) -> None:
    guest.wake(task)
    first = guest.run()
    if not behind:
        guest.set_ip(guest.abi["host_user_hlt"])
    guest.tick()
    assert guest.run() == first
    assert guest.current == task


def test_a_woken_task_preempts_user_mode(guest: Guest, task: int) -> None:
    other = guest.adopt(55)
    guest.wake(task)
    guest.run()
    guest.wake(other)
    assert guest.run().reason is Hypercall.USER
    assert guest.current == other


def test_two_busy_tasks_take_turns(guest: Guest, task: int) -> None:
    """Two tasks that call sched_yield repeatedly run in turn."""
    other = guest.adopt(55)
    guest.wake(task)
    guest.run()
    guest.wake(other)
    seen = []
    for _ in range(6):
        assert guest.run().reason is Hypercall.USER
        seen.append(guest.current)
        guest.answer(NR_YIELD)
    assert seen[::2] == [seen[0]] * 3
    assert seen[1::2] == [seen[1]] * 3
    assert set(seen) == {task, other}


def test_hostfs_goes_to_the_host(guest: Guest, task: int) -> None:
    calls = []

    def host_file(op: HostfsOp, file: int, a: int, b: int) -> int:
        calls.append((op, file, a, b))
        return 5 if op is HostfsOp.READ else b if op is HostfsOp.WRITE else 0

    guest.host_file = host_file
    guest.write(task + guest.abi["task_struct.host_file"], struct.pack("<Q", 42))
    assert guest.syscall(task, NR_OPEN, b"/tracing/events/enable\0", 2) == 0
    guest.write(task + guest.abi["task_struct.host_file"], struct.pack("<Q", 43))
    assert guest.syscall(task, NR_READ, 0, USER_BUFFER, 100) == 5
    assert guest.syscall(task, NR_WRITE, 0, USER_BUFFER, 7) == 7
    assert guest.syscall(task, NR_CLOSE, 0) == 0
    assert calls == [
        (HostfsOp.OPEN, 42, 2, 0),
        (HostfsOp.READ, 42, USER_BUFFER, 100),
        (HostfsOp.WRITE, 42, USER_BUFFER, 7),
    ]


def test_a_hostfs_error_is_the_results_error(guest: Guest, task: int) -> None:
    guest.host_file = lambda *_: -16
    assert guest.syscall(task, NR_OPEN, b"/tracing/trace_pipe\0", 0) == -16
    before = guest.free_pages
    for _ in range(20):
        guest.syscall(task, NR_OPEN, b"/tracing/trace_pipe\0", 0)
    assert guest.free_pages == before


def test_a_blocking_read_sleeps_until_woken(guest: Guest, task: int) -> None:
    answers = iter([0, -ERESTARTSYS, -ERESTARTSYS, 3])
    guest.host_file = lambda *_: next(answers)
    assert guest.syscall(task, NR_OPEN, b"/tracing/trace_pipe\0", 0) == 0
    assert guest.syscall(task, NR_READ, 0, USER_BUFFER, 9) is None
    assert guest.task_u32(task, "state") == 1
    guest.wake(task)
    assert guest.run().reason is Hypercall.IDLE
    guest.wake(task)
    trap = guest.run()
    assert (trap.reason, trap.args[0], guest.current) == (Hypercall.USER, 3, task)


def test_mkdir_and_rmdir_outside_scratch_ask_the_host(guest: Guest, task: int) -> None:
    calls = []

    def host_file(*call: int) -> int:
        calls.append((call[0], call[2]))
        return 0

    guest.host_file = host_file
    assert guest.syscall(task, 83, b"/tracing/instances/foo\0", 0o750) == 0
    assert guest.syscall(task, 84, b"/tracing/instances/foo\0") == 0
    assert guest.syscall(task, 87, b"/tracing/trace\0") == -1
    assert calls == [(HostfsOp.MKDIR, 0o750), (HostfsOp.RMDIR, 0)]


def test_unknown_system_calls(guest: Guest, task: int) -> None:
    assert guest.syscall(task, 400) == -38
    assert guest.syscall(task, 999) == -38
    assert guest.syscall(task, 1004) == -38


def test_init_may_not_exit(guest: Guest) -> None:
    with pytest.raises(GuestPanic, match="Attempted to kill init! exitcode=0x00000100"):
        guest.syscall(guest.task_of(1), NR_EXIT, 1)


def test_a_fault_without_a_task_is_a_panic(guest: Guest) -> None:
    with pytest.raises(GuestPanic, match="Attempted to kill the idle task!"):
        guest.call_raw("strlen", 0)


def test_watchdog_ends_the_looping_task(guest: Guest, task: int) -> None:
    guest.wake(task)
    assert guest.run().reason is Hypercall.USER
    guest.deliver(Vector.WATCHDOG)
    assert guest.run().reason is Hypercall.IDLE
    assert guest.exited == [(1234, 9)]
    assert "watchdog: BUG: soft lockup - CPU#0 stuck for 1s! [bash:1234]" in guest.log()
