"""Guest code that hooked functions return to: it saves the registers for the handlers, and restores them.

It pushes its own address where the return address was taken from, so that whoever looks at the stack
meanwhile sees a hooked function; the handler puts the real one there.
Mirrors: arch/x86/kernel/rethook.c:arch_rethook_trampoline (v6.1).
"""

from __future__ import annotations

from emulated_kernel.arch.base import HandlerStub
from emulated_kernel.arch.x86.prepare import INT3

_PUSH_IMMEDIATE = b"\x68"
_PUSH_SP = b"\x54"
_PUSHF, _POPF = b"\x9c", b"\x9d"
_PUSH_NO_SYSCALL = b"\x6a\xff"
_RET = b"\xc3"

_PUSH_SS, _PUSH_CS = b"\x6a\x18", b"\x6a\x10"
_SAVED_SP_OF_CALLER = bytes.fromhex("4883442408 10")
"""add $16, 8(%rsp): the saved sp as it was before the two pushes in front of it."""
_PUSH_GENERAL = bytes.fromhex("57 56 52 51 50 4150 4151 4152 4153 53 55 4154 4155 4156 4157")
_POP_GENERAL = bytes.fromhex("415f 415e 415d 415c 5d 5b 415b 415a 4159 4158 58 59 5a 5e 5f")
_SKIP_TO_FLAGS, _SKIP_SP_SS = bytes.fromhex("488d642418"), bytes.fromhex("488d642410")
"""lea 24(%rsp), %rsp and lea 16(%rsp), %rsp: unlike an add, they leave the flags alone."""


def return_trampoline(address: int) -> HandlerStub:
    """For x86_64, within the upper 2 GiB."""
    own = _push(address)
    save = own + _PUSH_SS + _PUSH_SP + _PUSHF + _SAVED_SP_OF_CALLER + _PUSH_CS + own + _PUSH_NO_SYSCALL
    save += _PUSH_GENERAL
    restore = _POP_GENERAL + _SKIP_TO_FLAGS + _POPF + _SKIP_SP_SS + _RET
    return HandlerStub(save + INT3 + restore, len(save))


def _push(address: int) -> bytes:
    return _PUSH_IMMEDIATE + (address & 0xFFFFFFFF).to_bytes(4, "little")
