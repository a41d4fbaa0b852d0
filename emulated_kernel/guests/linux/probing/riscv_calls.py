"""Code by which KernelCalls calls functions of a RISC-V kernel; kernel_calls.py has x86's code."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.riscv.encoder import (
    BranchFunct3,
    addi,
    branch,
    jalr,
    jump_register,
    load,
    move,
    move_stack_pointer,
    set_register,
    store,
)
from emulated_kernel.arch.riscv.insn import A0, RA, S0, SP, T0, T1, ZERO

_WORD = 8
_FRAME = 16
_MAX_ERRNO = 4095
_ARGUMENTS = 6
_ENTER = move_stack_pointer(-_FRAME) + store(SP, _WORD, RA, _WORD) + store(SP, 0, S0, _WORD)
_LEAVE = load(RA, SP, _WORD, _WORD) + load(S0, SP, 0, _WORD) + move_stack_pointer(_FRAME) + jump_register(RA)


def _call(function: int) -> bytes:
    return set_register(T1, function) + jalr(RA, T1, 0)


def interrupt(symbols: Mapping[str, int]) -> bytes:
    """Return the code that the interrupt of KernelCalls runs: queue_work_on(any_cpu, *workqueue, *work).

    `symbols` has the address of queue_work_on(), the CPU number `any_cpu`, and the addresses `workqueue` and
    `work` of the two pointers that the code loads.
    """
    code = set_register(A0, symbols["any_cpu"])
    for register, name in ((A0 + 1, "workqueue"), (A0 + 2, "work")):
        code += set_register(T0, symbols[name]) + load(register, T0, 0, _WORD)
    return code + set_register(T1, symbols["queue_work_on"]) + jump_register(T1)


def maker(symbols: Mapping[str, int], work: int, result: int, state: int, task: int, no_thread: int) -> bytes:
    """Return the code of the work_struct's function, which creates the thread and wakes it.

    `symbols`: addresses of the thread's code (`thread`), of its name (`name`) and of the two kernel functions
    that are called. `work`, `result`, `state` and `task`: offsets in a mailbox, which is the memory with the
    data of a call. `no_thread`: value to store as the state if no thread can be created.
    """
    code = _ENTER + addi(S0, A0, -work) + set_register(A0, symbols["thread"]) + move(A0 + 1, S0)
    code += addi(A0 + 2, ZERO, -1) + set_register(A0 + 3, symbols["name"])
    code += _call(symbols["kthread_create_on_node"]) + set_register(T0, -_MAX_ERRNO)
    made = store(S0, task, A0, _WORD) + _call(symbols["wake_up_process"]) + _LEAVE
    failed = store(S0, result, A0, _WORD) + addi(T0, ZERO, no_thread) + store(S0, state, T0, _WORD)
    return code + branch(BranchFunct3.GEU, A0, T0, 4 + len(made)) + made + failed + _LEAVE


def thread(result: int, state: int, returned: int) -> bytes:
    """Return the code of the thread: it calls the function whose address and arguments are in the mailbox.

    `result` and `state`: offsets in the mailbox, which is the memory with the data of the call. `returned`:
    value to store as the state after the call.
    """
    code = _ENTER + move(S0, A0)
    for number in range(_ARGUMENTS):
        code += load(A0 + number, S0, _WORD * (1 + number), _WORD)
    code += load(T0, S0, 0, _WORD) + jalr(RA, T0, 0) + store(S0, result, A0, _WORD)
    return code + addi(T0, ZERO, returned) + store(S0, state, T0, _WORD) + addi(A0, ZERO, 0) + _LEAVE
