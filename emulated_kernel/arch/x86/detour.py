"""Guest code around a probe's handler on x86: detour buffers, ftrace trampoline, return trampoline.

Each piece of code saves a struct pt_regs on the stack of the probed code, and hits a breakpoint that calls
the handler. After that, it loads the registers from the struct pt_regs, which the handler may have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import HandlerStub, OriginalPlace, StubEnd, TextReturns
from emulated_kernel.arch.x86.copy_insn import DISP32_SIZE, JMP32_SIZE, relative_jump
from emulated_kernel.arch.x86.encoder import AX, CX, INT3, SP
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_insn
from emulated_kernel.arch.x86.pt_regs import POPF, RegsFrame, push_address
from emulated_kernel.arch.x86.relocate import guarded_popf, is_popf, is_relocated_call, relocate
from emulated_kernel.util.errors import KernelError

RET = b"\xc3"
OWN_SIZE = len(push_address(0))
"""Size in bytes of the instruction with which a return trampoline pushes its own address."""
_FILLERS = (INT3, b"\x90", b"\x0f\x1f")
"""Opcodes of int3 and of nops, with which the compiler fills the space after a function's code."""
MAX_DETOUR = 160
"""Maximum size in bytes of a detour: code around the call of the handler, and at most MAX_COPIED bytes."""
MAX_DETOURED = MAX_INSN_SIZE + DISP32_SIZE
"""Maximum size in bytes of a region (the instructions that a jump replaces).

A region has this size if an instruction of maximum size begins at the jump's last byte.
"""
_MAX_GROWTH = 3 * 7
"""Upper limit for the number of bytes by which relocation makes a region's code longer.

Each of three 2-byte branches can become 9 bytes.
"""
MAX_COPIED = MAX_DETOURED + _MAX_GROWTH + JMP32_SIZE
"""Upper limit for the size in bytes of a region's relocated instructions and the jump back."""


def ftrace_trampoline(frame: RegsFrame) -> HandlerStub:
    """Return the trampoline that fentry sites call; it continues at the saved ip with the saved sp.

    Linux: a changed sp is ignored, and a handler that skips the function sets ip to a `ret`.
    Deviates: sp is obeyed, so one handler works for both a call and a breakpoint.
    Mirrors: arch/x86/kernel/ftrace_*.S:ftrace_regs_caller (v6.1); orig_ax is 0 there too.
    """
    encoder = frame.encoder
    at = frame.offsets
    word = frame.encoder.word
    # Push the return address; ss, sp, flags and cs lie below it.
    save = frame.save_whole(b"\xff\x74\x24" + bytes([4 * word]), 0, words=1)
    store_way_back = (
        encoder.load(AX, SP, at["sp"], word)
        + encoder.load(CX, SP, at["ip"], word)
        + encoder.store(AX, -word, CX, word)
        + encoder.load(CX, SP, at["flags"], word)
        + encoder.store(AX, -2 * word, CX, word)
        + encoder.lea(AX, AX, -2 * word)
        # An interrupt must not find anything of use below sp.
        + encoder.store(SP, at["sp"], AX, word)
    )
    take_way_back = encoder.load(SP, SP, at["sp"] - frame.above_general, word) + POPF + RET
    return HandlerStub(save + INT3 + store_way_back + frame.pops + take_way_back, len(save))


def return_trampoline(frame: RegsFrame, address: int) -> HandlerStub:
    """Return the return trampoline for `address`. Hooked functions return to it.

    The trampoline pushes its own address into the word that held the return address. An unwinder then sees a
    hooked function until the handler stores the real return address in this word.
    Mirrors: arch/x86/kernel/rethook.c:arch_rethook_trampoline (v6.1).
    """
    own = push_address(address)
    save = own + frame.save_whole(own, -1, words=1)
    return HandlerStub(save + INT3 + frame.restore_whole + RET, len(save))


class X86TextReturns(TextReturns):
    """Generator of calls in unused bytes of the kernel's text, by which functions return to a trampoline.

    A hooked function returns to such a call. The call itself pushes an address, and skips the push with which
    the trampoline begins. The return address on the stack is then in a function of the kernel, as Linux's
    stack traces require.
    Mirrors: arch/x86/kernel/dumpstack.c:show_trace_log_lvl (v6.1).
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def filler_size(self, code: bytes) -> int:
        at = end = 0
        while at < len(code):
            try:
                insn = decode_insn(code[at:].ljust(MAX_INSN_SIZE, b"\0"), self._bits)
            except KernelError:
                return 0
            at += insn.length
            if insn.opcode not in _FILLERS:
                end = at
        return max(len(code) - end, 0)

    def trampoline_entry(self, source: int, trampoline: int) -> bytes:
        return relative_call(source, trampoline + OWN_SIZE)


def around_handler(frame: RegsFrame, region: Region) -> tuple[bytes, bytes]:
    """Return code that saves the registers in a struct pt_regs on the stack, and code that restores them.

    The saved ip is the address after a breakpoint at the region's start. See Arch.

    Mirrors: arch/x86/kernel/kprobes/opt.c:optprobe_template_entry, arch_prepare_optimized_kprobe (v6.1).
    """
    return frame.save_whole(push_address(region.addr + 1), -1, words=0), frame.restore_whole


def relocated(region: Region, to: int, bits: int) -> bytes:
    """Return the region's instructions without padding, relocated to `to`, and a jmp back; see Arch."""
    result = b"".join(code for _, code in _relocated_insns(region, to, bits))
    return result + relative_jump(to + len(result), region.end)


def _relocated_insns(region: Region, to: int, bits: int) -> Iterator[tuple[int, bytes]]:
    """Yield (original address, code of its copy) for each instruction except padding.

    The copies begin at the address `to`.
    """
    at = region.addr
    while at < region.end - region.padding:
        code, length = relocate(region.code[at - region.addr :], at, to, bits)
        yield at, code
        at += length
        to += len(code)


def stub_end(region: Region, to: int, bits: int) -> StubEnd:
    """Return the code that ends a stub (the compiled handlers of a breakpoint hit), for the address `to`.

    The code consists of the region's instructions, relocated, and a jump back; see Arch.

    If the region is a popf that would set the trap flag, a breakpoint makes Python execute the popf.
    """
    if not is_popf(region.code, bits):
        return StubEnd(relocated(region, to, bits))
    code = guarded_popf(region.code, bits)
    code += relative_jump(to + len(code), region.end)
    return StubEnd(code + INT3, by_python=to + len(code))


def original_place(region: Region, copied: int, address: int, bits: int) -> OriginalPlace:
    """Map an address in the relocated instructions to the original instruction; see Arch.

    `copied`: address of the first relocated instruction. A relocated call is a push and a jump. The addresses
    of both are mapped to the call. At the jump, the return address has been pushed, and `pushed` of the
    result is its size; otherwise it is 0.
    """
    at = copied
    if is_popf(region.code, bits):
        jump_back = at + len(guarded_popf(region.code, bits))
        return OriginalPlace(region.end if address == jump_back else region.addr)
    for original, code in _relocated_insns(region, copied, bits):
        if address < at + len(code):
            has_pushed = address > at and is_relocated_call(region.code[original - region.addr :], bits)
            return OriginalPlace(original, bits // 8 if has_pushed else 0, is_calling=has_pushed)
        at += len(code)
    return OriginalPlace(region.end)


def relative_call(source: int, target: int) -> bytes:
    """Encode a `call rel32` from `source` to `target`. Raises: KernelError ERANGE (32 bits don't reach)."""
    return b"\xe8" + relative_jump(source, target)[1:]


def relative_calls(targets: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """Yield (source, encoded `call rel32`) for each item of `targets`, a map source -> target.

    The map may have tens of thousands of items. Raises: KernelError ERANGE (32 bits don't reach).
    """
    size = DISP32_SIZE
    end = JMP32_SIZE
    for source, target in targets.items():
        try:
            yield source, b"\xe8" + (target - source - end).to_bytes(size, "little", signed=True)
        except OverflowError:
            yield source, relative_call(source, target)
