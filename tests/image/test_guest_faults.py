"""Faults in the guest kernel: oopses, warnings, tasks that are killed, and a log that keeps the newest
messages.
"""

from __future__ import annotations

from emulated_kernel.util.abi import Vector

from .guest import USER_BUFFER, Guest

NONCANONICAL = 0x1234_5678_9ABC_DEF0


def test_a_null_dereference_is_an_oops_and_a_dead_task(guest: Guest, task: int) -> None:
    assert guest.host_call(task, "strlen", 0) is None
    assert guest.exited == [(1234, 11)]
    log = guest.log()
    assert "BUG: kernel NULL pointer dereference, address: 0000000000000000" in log
    assert any(line.startswith("RIP: 0010:strlen+0x") for line in log)
    assert "Call Trace:" in log
    assert any(" ? do_syscall_64+0x" in line for line in log)
    assert guest.syscall(guest.adopt(5), 39) == 5


def test_a_wild_address_is_named(guest: Guest, task: int) -> None:
    guest.host_call(task, "strlen", 0xFFFF_C900_0000_1000)
    assert "BUG: unable to handle page fault for address: ffffc90000001000" in guest.log()


def test_a_non_canonical_address_is_a_general_protection_fault(guest: Guest, task: int) -> None:
    guest.host_call(task, "strlen", NONCANONICAL)
    assert guest.exited == [(1234, 11)]
    assert any(line.startswith("general protection fault, probably") for line in guest.log())


def test_a_jump_to_null_is_an_oops(guest: Guest, task: int) -> None:
    guest.write(USER_BUFFER, bytes(32))
    guest.host_call(task, "process_one_work", USER_BUFFER)
    assert guest.exited == [(1234, 11)]
    assert any(line.startswith("Code: Unable to access opcode bytes") for line in guest.log())


def test_division_by_zero(guest: Guest, task: int) -> None:
    """A division by zero in the guest is logged as a `divide error`.

    Here kmem_cache_create() divides by the size of an object, which is rounded up to 0.
    """
    assert guest.host_call(task, "kmem_cache_create", USER_BUFFER, (1 << 32) - 1, 0, 0, 0) is None
    assert any(line.startswith("divide error: 0000 [#1]") for line in guest.log())


def test_a_warning_goes_on(guest: Guest, task: int) -> None:
    guest.host_call(task, "mutex_init", USER_BUFFER)
    assert guest.host_call(task, "mutex_unlock", USER_BUFFER) is not None
    log = guest.log()
    assert any(line.startswith("WARNING: CPU: 0 PID: 1234 at kernel/mutex.c:") for line in log)
    count = len(log)
    assert guest.host_call(task, "mutex_unlock", USER_BUFFER) is not None
    assert len(guest.log()) == count


def test_a_fault_with_preemption_off_is_repaired(guest: Guest, task: int) -> None:
    lock = USER_BUFFER + 64
    guest.host_call(task, "_raw_spin_lock", lock)
    assert guest.host_call(task, "strlen", 0) is None
    assert "note: bash[1234] exited with preempt_count 1" in guest.log()
    assert guest.u32(guest.percpu + guest.abi["percpu.preempt_count"]) == 1
    assert guest.syscall(guest.adopt(6), 39) == 6


def test_a_bad_format_argument_leaves_the_log_usable(guest: Guest, task: int) -> None:
    guest.write(USER_BUFFER, b"%s\n\0")
    assert guest.host_call(task, "_printk", USER_BUFFER, 0xFFFF_C900_0000_0000) is None
    guest.write(USER_BUFFER, b"\x013it is %d and %pS\n\0")
    other = guest.adopt(7)
    guest.host_call(other, "_printk", USER_BUFFER, 42, guest.symbol("vfs_read") + 4)
    size = guest.image.kallsyms.by_name("vfs_read")[0].size
    assert guest.log()[-1] == f"it is 42 and vfs_read+0x4/{size:#x}"


def test_the_log_wraps_and_keeps_the_newest(guest: Guest, task: int) -> None:
    guest.write(USER_BUFFER, b"%0500d\n\0")
    for number in range(400):
        guest.host_call(task, "_printk", USER_BUFFER, number)
    log = guest.log()
    assert [int(line) for line in log] == list(range(400 - len(log), 400))
    assert len(log) * 528 > guest.abi["log_buf.size"] - 2000


def test_watchdog_in_a_kernel_loop(guest: Guest, task: int) -> None:
    """The watchdog kills a task that spins on a lock which nobody releases."""
    lock = USER_BUFFER + 64
    guest.write(lock, b"\1\0\0\0")
    arguments = lock.to_bytes(8, "little") + bytes(40)
    guest.start_syscall(task, guest.abi["nr.host_call"], guest.symbol("_raw_spin_lock"), arguments)
    guest.run_for(5000)
    guest.deliver(Vector.WATCHDOG)
    guest.to_idle()
    assert guest.exited == [(1234, 9)]
    assert any(line.startswith("RIP: 0010:queued_spin_lock_slowpath+0x") for line in guest.log())
