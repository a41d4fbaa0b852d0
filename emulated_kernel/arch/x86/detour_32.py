"""Guest code around a probe's handler on i386: ftrace's and the return trampoline, and the detour buffer.

Like detour.py and return_trampoline.py, with i386's struct pt_regs: segment registers are saved, but never
loaded from it.
"""

from __future__ import annotations

from emulated_kernel.arch.base import Detour, HandlerStub
from emulated_kernel.arch.x86.detour import relocated
from emulated_kernel.arch.x86.prepare import INT3

PT_REGS = (
    "bx", "cx", "dx", "si", "di", "bp", "ax", "ds", "es", "fs", "gs",
    "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip
"""struct pt_regs, from the lowest address up, in words."""

FIXED_REGISTERS = {
    "ds": 0x7B, "es": 0x7B, "fs": 0xD8, "gs": 0, "cs": 0x60, "ss": 0x68, "orig_ax": -1,
}  # fmt: skip
"""What the frame has in place of registers that are the same at every hit."""
_PUSH_SS = b"\x6a\x68"
_PUSH_SP = b"\x54"
_PUSHF, _POPF = b"\x9c", b"\x9d"
_PUSH_CS = b"\x6a\x60"
_PUSH_NO_SYSCALL = b"\x6a\xff"
_PUSH_ZERO = b"\x6a\x00"
_PUSH_RETURN_ADDRESS = b"\xff\x74\x24\x10"
"""push 16(%esp): below it lie ss, sp, flags and cs."""
_PUSH_SEGMENTS = bytes.fromhex("0fa8 0fa0 06 1e")
"""gs, fs, es, ds."""
_STORE_WAY_BACK = bytes.fromhex(
    "8b44243c"  # mov 15*4(%esp), %eax: sp
    "8b4c2430"  # mov 12*4(%esp), %ecx: ip
    "8948fc"  # mov %ecx, -4(%eax)
    "8b4c2438"  # mov 14*4(%esp), %ecx: flags
    "8948f8"  # mov %ecx, -8(%eax)
    "8d40f8"  # lea -8(%eax), %eax
    "8944243c"  # mov %eax, 15*4(%esp): an interrupt must find nothing of use below esp
)
_TAKE_WAY_BACK = bytes.fromhex("8b642420 9d c3")
"""mov 32(%esp), %esp; popf; ret, with esp at ds."""
_SKIP_TO_FLAGS = b"\x8d\x64\x24\x1c"
_SKIP_SP_SS = b"\x8d\x64\x24\x08"
"""lea 8(%esp), %esp: unlike an add, it leaves the flags alone."""

_PUSH_GENERAL = bytes.fromhex("50 55 57 56 52 51 53")
_POP_GENERAL = bytes.fromhex("5b 59 5a 5e 5f 5d 58")


def _adjust_sp(size: int) -> bytes:
    """add $size, 4(%esp): the saved sp as it was before the first push."""
    return b"\x83\x44\x24\x04" + bytes([size])


def ftrace_trampoline() -> HandlerStub:
    """What an fentry site calls; it goes on at the saved ip and sp.

    Mirrors: arch/x86/kernel/ftrace_32.S:ftrace_regs_caller (v6.1). Deviates: as on x86_64.
    """
    save = (_PUSH_SS + _PUSH_SP + _PUSHF + _adjust_sp(8) + _PUSH_CS + _PUSH_RETURN_ADDRESS + _PUSH_ZERO) + (
        _PUSH_SEGMENTS + _PUSH_GENERAL
    )
    return HandlerStub(save + INT3 + _STORE_WAY_BACK + _POP_GENERAL + _TAKE_WAY_BACK, len(save))


def return_trampoline(address: int) -> HandlerStub:
    """What hooked functions return to, at `address`.

    Mirrors: arch/x86/kernel/rethook.c:arch_rethook_trampoline (v6.1).
    """
    own = b"\x68" + (address & 0xFFFFFFFF).to_bytes(4, "little")
    save = (own + _PUSH_SS + _PUSH_SP + _PUSHF + _adjust_sp(8) + _PUSH_CS + own + _PUSH_NO_SYSCALL) + (
        _PUSH_SEGMENTS + _PUSH_GENERAL
    )
    return HandlerStub(save + INT3 + _POP_GENERAL + _SKIP_TO_FLAGS + _POPF + _SKIP_SP_SS + b"\xc3", len(save))


def detour(code: bytes, addr: int, length: int, buffer: int) -> Detour:
    """The detour at `buffer` for `length` bytes of whole instructions at `addr`, which `code` starts with.

    Raises: KernelError EINVAL or ERANGE where the buffer is too far away.
    Mirrors: arch/x86/kernel/kprobes/opt.c:optprobe_template_entry, arch_prepare_optimized_kprobe (v6.1).
    """
    ip = (addr + 1 & 0xFFFFFFFF).to_bytes(4, "little")
    save = (_PUSH_SS + _PUSH_SP + _PUSHF + _adjust_sp(4) + _PUSH_CS + b"\x68" + ip + _PUSH_NO_SYSCALL) + (
        _PUSH_SEGMENTS + _PUSH_GENERAL
    )
    template = save + INT3 + _POP_GENERAL + _SKIP_TO_FLAGS + _POPF + _SKIP_SP_SS
    return Detour(
        template + relocated(code, addr, length, buffer + len(template), 32), len(save), len(template)
    )
