"""Guest code around a probe's handler: ftrace's trampoline and the detour buffer of an optimized probe.

Both save a struct pt_regs on the stack of the probed code, meet a breakpoint where the handler is reached,
and restore every register from what the handler left. Only x86_64.
"""

from __future__ import annotations

from emulated_kernel.arch.base import Detour, HandlerStub
from emulated_kernel.arch.program import HandlerCode
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE
from emulated_kernel.arch.x86.prepare import DISP32_SIZE, INT3, JMP32_SIZE, copy_instruction, relative_jump

PT_REGS = (
    "r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di",
    "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip
"""struct pt_regs, from the lowest address up, in words."""

_PUSH_SS = b"\x6a\x18"
_PUSH_SP = b"\x54"
_PUSHF, _POPF = b"\x9c", b"\x9d"
_PUSH_CS = b"\x6a\x10"
_PUSH_NO_SYSCALL = b"\x6a\xff"
_PUSH_ZERO = b"\x6a\x00"
_PUSH_RETURN_ADDRESS = b"\xff\x74\x24\x20"
"""push 32(%rsp): below it lie ss, sp, flags and cs."""
_STORE_WAY_BACK = bytes.fromhex(
    "488b842498000000"  # mov 19*8(%rsp), %rax: sp
    "488b8c2480000000"  # mov 16*8(%rsp), %rcx: ip
    "488948f8"  # mov %rcx, -8(%rax)
    "488b8c2490000000"  # mov 18*8(%rsp), %rcx: flags
    "488948f0"  # mov %rcx, -16(%rax)
    "488d40f0"  # lea -16(%rax), %rax
    "4889842498000000"  # mov %rax, 19*8(%rsp): an interrupt must find nothing of use below rsp
)
_TAKE_WAY_BACK = bytes.fromhex("488b642420 9d c3")
"""mov 32(%rsp), %rsp; popf; ret, with rsp at orig_ax."""
_SKIP_TO_FLAGS = b"\x48\x8d\x64\x24\x18"
_SKIP_SP_SS = b"\x48\x8d\x64\x24\x10"
"""lea 16(%rsp), %rsp: unlike an add, it leaves the flags alone."""

_PUSH_GENERAL = bytes.fromhex("57 56 52 51 50 4150 4151 4152 4153 53 55 4154 4155 4156 4157")
_POP_GENERAL = bytes.fromhex("415f 415e 415d 415c 5d 5b 415b 415a 4159 4158 58 59 5a 5e 5f")

MAX_DETOUR = 160
"""Bytes; the template and what a region of 5 to 19 bytes needs."""
MAX_COPIED = MAX_INSN_SIZE + DISP32_SIZE + JMP32_SIZE
"""Bytes of the largest region and of a jump."""

FIXED_REGISTERS = {"cs": 0x10, "ss": 0x18, "orig_ax": -1}
"""What the frame has in place of registers that are the same at every hit."""


def _adjust_sp(size: int) -> bytes:
    """add $size, 8(%rsp): the saved sp as it was before the first push."""
    return b"\x48\x83\x44\x24\x08" + bytes([size])


def ftrace_trampoline() -> HandlerStub:
    """What an fentry site calls; it goes on at the saved ip and sp.

    Linux: a changed sp is ignored, and a handler that skips the function sends it to a `ret`. Deviates: the
    same handler does for a call and for a breakpoint.
    Mirrors: arch/x86/kernel/ftrace_64.S:ftrace_regs_caller (v6.1); orig_ax is 0 there too.
    """
    save = (
        _PUSH_SS + _PUSH_SP + _PUSHF + _adjust_sp(16) + _PUSH_CS + _PUSH_RETURN_ADDRESS + _PUSH_ZERO
    ) + _PUSH_GENERAL
    return HandlerStub(save + INT3 + _STORE_WAY_BACK + _POP_GENERAL + _TAKE_WAY_BACK, len(save))


def detour(code: bytes, addr: int, length: int, buffer: int) -> Detour:
    """The detour at `buffer` for `length` bytes of whole instructions at `addr`, which `code` starts with.

    Raises: KernelError EINVAL or ERANGE where the buffer is too far away.
    Mirrors: arch/x86/kernel/kprobes/opt.c:optprobe_template_entry, arch_prepare_optimized_kprobe (v6.1).
    """
    ip = (addr + 1 & 0xFFFFFFFF).to_bytes(4, "little")
    save = (
        _PUSH_SS + _PUSH_SP + _PUSHF + _adjust_sp(8) + _PUSH_CS + b"\x68" + ip + _PUSH_NO_SYSCALL
    ) + _PUSH_GENERAL
    template = save + INT3 + _POP_GENERAL + _SKIP_TO_FLAGS + _POPF + _SKIP_SP_SS
    result = template + relocated(code, addr, length, buffer + len(template), 64)
    assert len(result) <= MAX_DETOUR
    return Detour(result, len(save), len(template))


def compiled_detour(
    code: bytes, addr: int, length: int, buffer: int, handler: HandlerCode, bits: int
) -> Detour:
    """As `detour`, with the handler's code instead of the breakpoint; raises the same."""
    return Detour.compiled(handler, relocated(code, addr, length, buffer + len(handler.code), bits))


def handler_stub(handler: HandlerCode, buffer: int, target: int) -> Detour:
    """A handler at `buffer` that goes on at `target`. Raises: KernelError(ERANGE)."""
    return Detour.compiled(handler, relative_jump(buffer + len(handler.code), target))


def relocated(code: bytes, addr: int, length: int, to: int, bits: int) -> bytes:
    """Its instructions for `to`, and a jump to what follows them. Raises: KernelError EINVAL, ERANGE."""
    result = b""
    done = 0
    while done < length:
        insn, decoded = copy_instruction(code[done:], addr + done, to + len(result), bits)
        result += insn
        done += decoded.length
    assert done == length, "the region ends within an instruction"
    return result + relative_jump(to + len(result), addr + length)


def relative_call(source: int, target: int) -> bytes:
    """A `call rel32` at `source`. Raises: KernelError(ERANGE) where 32 bits don't reach."""
    jump = relative_jump(source, target)
    assert len(jump) == JMP32_SIZE
    return b"\xe8" + jump[1:]
