"""Finds the bit numbers of flags in thread_info.flags, which differ between versions of the kernel.

In the kernel's sources they are macros, which neither symbols nor BTF contain. So the kernel is made to set
each flag once.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import FlagCode
from emulated_kernel.guests.linux.guest.wakeups import wakeup
from emulated_kernel.guests.linux.kernel_offsets import (
    RUN_QUEUES,
    THREAD_FLAGS,
    TRACE_SYSCALLS,
    KernelOffsets,
)
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind
from emulated_kernel.util.fast_dataclass import replace


def with_thread_flags(machine: LinuxMachine, facts: KernelOffsets) -> KernelOffsets:
    """Return `facts` with the masks of two thread flags of a kernel that has just booted.

    The flags are TIF_NEED_RESCHED and, if it is in thread_info.flags, TIF_SYSCALL_TRACEPOINT. An interrupt of
    init, which must be at its stub, makes the kernel set each flag. The change shows the flag's bit. The code
    that wakes tasks is installed for this, and stays installed.
    Mirrors: kernel/sched/core.c:resched_curr (v6.1, v7.2), kernel/tracepoint.c:syscall_regfunc (v5.10).
    Raises: GuestFault (the kernel set no flag, or several).
    """
    interrupt = _Interrupt(machine, facts)
    reschedule, trace = interrupt.flag_codes
    need_resched = interrupt.flag_set_by(reschedule)
    syscall_trace = 0
    if trace is not None and facts.symbols.keys() >= set(TRACE_SYSCALLS):
        syscall_trace = interrupt.flag_set_by(trace)
    return replace(facts, need_resched=need_resched, syscall_trace=syscall_trace)


class _Interrupt:
    """Calls kernel code in an interrupt of init, and finds which of init's thread flags the code sets."""

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets) -> None:
        self._machine = machine
        self._structs = structs = KernelStructs(machine, facts.offsets)
        self._thunk = wakeup(machine, facts, structs)
        self._thunk.install()
        self.flag_codes = self._thunk.flag_codes
        per_cpu = structs.word(facts.symbols["__per_cpu_offset"])
        task = machine.running_task(facts)()
        self._flags = structs.member(task, THREAD_FLAGS)
        self._symbols = {**facts.symbols, "run_queue": per_cpu + facts.per_cpu[RUN_QUEUES]}
        self._used = 0

    def flag_set_by(self, flag_code: FlagCode) -> int:
        """Run `flag_code` in an interrupt of init, and return the mask of the thread flag that it sets.

        The flag must be set before the last instruction of the code.
        Raises: GuestFault (the code set no flag, or several).
        """
        machine = self._machine
        physical, entry = (start + self._used for start in self._thunk.stub_text)
        code = flag_code.made(entry, self._symbols)
        # A hook stays at its address, so that each code needs its own.
        self._used += len(code)
        self._structs.store_bytes(physical, code)
        found: list[int] = []

        def look() -> None:
            found.append(machine.memory.words[self._flags >> 3])

        machine.call_at(entry, look)
        machine.call_at(entry + len(code) - flag_code.tail, look)
        with self._thunk.replaced_by(entry):
            self._thunk.wake(0)
            machine.run()
        self._structs.store_bytes(physical, bytes(len(code)))
        machine.engine.flush_code()
        return single_flag(*found)


def single_flag(before: int = 0, after: int = 0) -> int:
    """Return the mask of the one bit that is set in `after` but not in `before`.

    Raises: GuestFault (no bit or several bits).
    """
    changed = after & ~before
    if changed.bit_count() != 1:
        raise GuestFault(
            Trap(TrapKind.FAULT, 0), f"the kernel set the flags {changed:#x} of a task, and not one"
        )
    return changed
