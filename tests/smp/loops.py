"""Guest code that calls a function repeatedly, so that CPUs execute the function most of the time."""

from __future__ import annotations

from emulated_kernel.arch.riscv import encoder as riscv
from emulated_kernel.arch.riscv.insn import A0, RA, S0, SP, T0, ZERO
from emulated_kernel.kernel.api import Kernel

TURNS = 40
"""Number of calls in each run of the loop, with the arguments TURNS down to 1."""
_ROOM = 64


def loop(kernel: Kernel, name: str = "int_sqrt", argument: int | None = None) -> int:
    """Return the address of a new guest function that calls `name` repeatedly and returns the last result.

    `argument`: argument of each call; None passes the number of remaining calls.
    """
    text = kernel.machine.text
    code = text.alloc_text(_ROOM)
    target = kernel.image.kallsyms.lookup_name(name)
    assert target is not None
    write = _riscv if kernel.arch.registers.link is not None else _x86
    text.poke(code, write(kernel, code, target, argument))
    return code


def _x86(kernel: Kernel, code: int, target: int, given: int | None) -> bytes:
    head = b"\x53\xbb" + TURNS.to_bytes(4, "little")  # push bx; mov bx, TURNS
    argument = b"\x89\xdf" if kernel.arch.bits == 64 else b"\x89\xd8"  # mov edi, ebx; mov eax, ebx
    if given is not None:
        argument = (b"\xbf" if kernel.arch.bits == 64 else b"\xb8") + given.to_bytes(4, "little")  # mov
    at = code + len(head) + len(argument)
    turn = argument + b"\xe8" + (target - at - 5).to_bytes(4, "little", signed=True)  # call
    turn += b"\xff\xcb\x75"  # dec ebx; jnz
    return head + turn + (-(len(turn) + 1)).to_bytes(1, "little", signed=True) + b"\x5b\xc3"


def _riscv(_kernel: Kernel, code: int, target: int, given: int | None) -> bytes:
    head = riscv.addi(SP, SP, -16) + riscv.store(SP, 8, RA, 8) + riscv.store(SP, 0, S0, 8)
    head += riscv.addi(S0, ZERO, TURNS)
    argument = riscv.move(A0, S0) if given is None else riscv.addi(A0, ZERO, given)
    turn = argument + riscv.long_jump(RA, T0, code + len(head) + len(argument), target)
    turn += riscv.addi(S0, S0, -1)
    turn += riscv.branch(riscv.BranchFunct3.NE, S0, ZERO, -len(turn))
    tail = riscv.load(RA, SP, 8, 8) + riscv.load(S0, SP, 0, 8) + riscv.addi(SP, SP, 16)
    return head + turn + tail + riscv.jump_register(RA)
