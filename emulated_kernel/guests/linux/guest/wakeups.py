"""Selects the code by which the host wakes guest tasks, which depends on the processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from emulated_kernel.arch.riscv.encoder import (
    jalr,
    jump_register,
    load,
    move_stack_pointer,
    set_register,
    store,
)
from emulated_kernel.arch.riscv.insn import A0, RA, SP, T1
from emulated_kernel.guests.linux.guest.irq_work_wakeup import Arm64Wakeup, RiscvWakeup
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import Wakeup, WakeupThunk
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.arm64_machine import Arm64Machine
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.fast_named_tuple import NamedTuple

RESCHEDULE = """
    48 bf imm64:run_queue   | movabs rdi, run_queue
    e8 rel32:resched_curr   | call resched_curr
    c3                      | ret
"""
"""Code that an interrupt runs to set TIF_NEED_RESCHED of init: resched_curr(run_queue)."""
TRACE = """
    e8 rel32:syscall_regfunc   | call syscall_regfunc
    e9 rel32:syscall_unregfunc | jmp syscall_unregfunc
"""
"""Code that an interrupt runs to set the flag of traced system calls in all tasks, and clear it again.

The code calls syscall_regfunc(), then syscall_unregfunc().
"""
_RET_SIZE = 1
_JMP_SIZE = 5


_RISCV_RET_SIZE = 4
ARM64_RESCHEDULE = """
    fd 7b bf a9   | stp x29, x30, [sp, #-16]!
    a0 00 00 58   | ldr x0, queue_at
    d0 00 00 58   | ldr x16, function_at
    00 02 3f d6   | blr x16
    fd 7b c1 a8   | ldp x29, x30, [sp], #16
    c0 03 5f d6   | ret
    imm64:run_queue    | queue_at: .quad run_queue
    imm64:resched_curr | function_at: .quad resched_curr
"""
ARM64_TRACE = """
    fd 7b bf a9   | stp x29, x30, [sp, #-16]!
    b0 00 00 58   | ldr x16, first_at
    00 02 3f d6   | blr x16
    fd 7b c1 a8   | ldp x29, x30, [sp], #16
    90 00 00 58   | ldr x16, second_at
    00 02 1f d6   | br x16
    imm64:syscall_regfunc   | first_at: .quad syscall_regfunc
    imm64:syscall_unregfunc | second_at: .quad syscall_unregfunc
"""
_ARM64_TAIL = 20
"""Size in bytes of the last instruction of an arm64 code and the two 8-byte constants after it."""


def _riscv_reschedule(_at: int, symbols: Mapping[str, int]) -> bytes:
    """Return the code of an irq_work: resched_curr(run_queue)."""
    return b"".join((
        move_stack_pointer(-16), store(SP, 8, RA, 8),
        set_register(A0, symbols["run_queue"]), set_register(T1, symbols["resched_curr"]), jalr(RA, T1, 0),
        load(RA, SP, 8, 8), move_stack_pointer(16), jump_register(RA),
    ))  # fmt: skip


class FlagCode(NamedTuple):
    """Code in which the kernel sets a flag of the running task."""

    made: Callable[[int, Mapping[str, int]], bytes]
    """Function that returns the code; it takes the code's address and a map: symbol -> address."""
    tail: int
    """Number of bytes from the start of the code's last instruction to the end of the code."""


def flag_codes(machine: LinuxMachine) -> tuple[FlagCode, FlagCode | None]:
    """Return two codes: one sets TIF_NEED_RESCHED, the other sets the flag of traced system calls.

    The second code is None if no kernel for this processor needs it.
    """
    if isinstance(machine, RiscvMachine):
        return FlagCode(_riscv_reschedule, _RISCV_RET_SIZE), None
    if isinstance(machine, Arm64Machine):
        return FlagCode(partial(machine_code, ARM64_RESCHEDULE), _ARM64_TAIL), FlagCode(
            partial(machine_code, ARM64_TRACE), _ARM64_TAIL
        )
    return FlagCode(partial(machine_code, RESCHEDULE), _RET_SIZE), FlagCode(
        partial(machine_code, TRACE), _JMP_SIZE
    )


def wakeup(machine: LinuxMachine, facts: KernelOffsets, structs: KernelStructs) -> Wakeup:
    """Return the object that wakes tasks of a booted kernel, by code in guest memory.

    This function does not write the code to guest memory; Wakeup.install() does.
    """
    if isinstance(machine, RiscvMachine):
        return RiscvWakeup(machine, facts, structs)
    if isinstance(machine, Arm64Machine):
        return Arm64Wakeup(machine, facts, structs)
    assert isinstance(machine, PcMachine)
    return WakeupThunk(machine, facts, structs)
