"""Finds the flag by which the kernel asks a task to reschedule: its number differs between versions.

The number is a macro, which neither symbols nor BTF contain. So the kernel sets the flag itself, once.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import WakeupThunk
from emulated_kernel.guests.linux.kernel_offsets import (
    CURRENT_TASK,
    RUN_QUEUES,
    THREAD_FLAGS,
    KernelOffsets,
)
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind
from emulated_kernel.util.code_listing import machine_code

ASK = """
    48 bf imm64:run_queue   | movabs rdi, run_queue
    e8 rel32:resched_curr   | call resched_curr
    c3                      | ret
"""
"""Code of the interrupt: resched_curr(run_queue)."""
_RETURN = b"\xc3"


def find_need_resched(machine: LinuxMachine, facts: KernelOffsets) -> int:
    """Return the bit of TIF_NEED_RESCHED in thread_info.flags of a kernel that has just booted.

    Init is at its stub. An interrupt lets the kernel set init's flag, and the return to user mode clears it.
    The wakeup thunk stays installed.
    Mirrors: kernel/sched/core.c:resched_curr (v6.1, v7.2). Raises: GuestFault (no flag was set).
    """
    structs = KernelStructs(machine, facts.offsets)
    thunk = WakeupThunk(machine, facts, structs)
    thunk.install()
    per_cpu = structs.word(facts.symbols["__per_cpu_offset"])
    task = structs.word(per_cpu + facts.per_cpu[CURRENT_TASK])
    flags = structs.member(task, THREAD_FLAGS)
    physical, entry = thunk.stub_text
    symbols = {**facts.symbols, "run_queue": per_cpu + facts.per_cpu[RUN_QUEUES]}
    code = machine_code(ASK, entry, symbols)
    structs.store_bytes(physical, code)
    found: list[int] = []

    def look() -> None:
        found.append(machine.memory.words[flags >> 3])

    machine.call_at(entry, look)
    machine.call_at(entry + len(code) - len(_RETURN), look)
    with thunk.replaced_by(entry):
        thunk.wake(0)
        machine.run()
    structs.store_bytes(physical, bytes(len(code)))
    machine.engine.flush_code()
    return single_flag(*found)


def single_flag(before: int = 0, after: int = 0) -> int:
    """Return the one bit that was set between two readings. Raises: GuestFault (not exactly one)."""
    changed = after & ~before
    if changed.bit_count() != 1:
        raise GuestFault(Trap(TrapKind.FAULT, 0), f"resched_curr() set the flags {changed:#x}, and not one")
    return changed
