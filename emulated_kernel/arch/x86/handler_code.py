"""Generator of x86 handler code: a handler program, and code that saves and restores registers around it.

The program is what a probe does at a hit, as operations for any architecture. If the live registers are
unknown, the code saves every register in a frame (struct pt_regs). Otherwise it pushes only the registers
that are both live and written by the program.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arch_hooks import ReturnCode, ReturnDispatch
from emulated_kernel.arch.program.base_lowering import lay_out
from emulated_kernel.arch.program.ir import CallHost, HandlerCode, Program
from emulated_kernel.arch.x86 import encoder as asm
from emulated_kernel.arch.x86.detour import OWN_SIZE, RET, return_trampoline
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import AX, SP, Encoder, jump_through
from emulated_kernel.arch.x86.lowering import LEAVING, NUMBERS, SLOT_FLAGS, SLOT_SP, X86Lowering
from emulated_kernel.arch.x86.pt_regs import PUSHF, RegsFrame, push_address


def save_all(program: Program, frame: RegsFrame, constants: Mapping[str, int]) -> HandlerCode:
    """Return code that saves all registers in a frame (struct pt_regs), runs a program, and restores them.

    At each host call of the program, sp points at the complete frame. `constants`: pt_regs name -> known
    value.
    """
    has_host_calls = any(type(op) is CallHost for op in program)
    before_host = frame.completed(constants) if has_host_calls else b""
    body = X86Lowering(program, frame.encoder, None, constants, before_host)
    return lay_out(body, frame.save, frame.restore, slots_of(frame))


def slots_of(frame: RegsFrame) -> dict[int, int]:
    """Return a map for programs that run with a frame (struct pt_regs) at sp: slot number -> offset from sp.

    For slot numbers, see SLOT_FLAGS. The offset, in bytes, is that of the saved value of the probed code's
    register. For SLOT_SP, it is the offset at which the probed code's stack begins.
    """
    offsets = {NUMBERS[name]: offset for name, offset in frame.offsets.items() if name in NUMBERS}
    offsets[SLOT_FLAGS] = frame.offsets["flags"]
    offsets[SLOT_SP] = frame.size
    return offsets


def save_live(
    program: Program, encoder: Encoder, live: LiveRegisters, constants: Mapping[str, int]
) -> HandlerCode:
    """Return code that saves the live registers that a program changes, runs the program, and restores them.

    `live`: registers that the probed code may still read. `constants`: pt_regs name -> known value.
    """
    body = X86Lowering(program, encoder, live, constants)
    keep = {NUMBERS[name] for name in live.registers}
    saving = SavedRegisters(body, encoder, keep)
    return lay_out(body, saving.before, saving.after, saving.offsets)


class SavedRegisters:
    """Code that saves registers before a program (`before`) and restores them after it (`after`).

    The code before the program pushes first the registers that the program only reads, then the registers
    that must be restored, and last the status flags. The flags are saved by lahf and restored by sahf. These
    cost a third of pushf and popf, because popf ends a block of translated code in Unicorn.
    """

    def __init__(self, body: X86Lowering, encoder: Encoder, live: set[int]) -> None:
        changed = {*body.used, AX} if body.saves_flags else set(body.used)
        restored = [number for number in sorted(changed) if number in live]
        reads = sorted(body.slots.difference(restored, [SLOT_SP]))
        pushed = [*reads, *restored]
        save = b"".join(PUSHF if number == SLOT_FLAGS else encoder.push(number) for number in pushed)
        restore = b"".join(map(encoder.pop, reversed(restored)))
        if reads:
            restore += encoder.lea(SP, SP, len(reads) * encoder.word)
        below = 0
        if body.saves_flags:
            keep, give_back, below = _flags_keeping(body, encoder, live)
            save += asm.LAHF + asm.SETO_AL + keep
            restore = give_back + asm.ADD_AL_127 + asm.SAHF + restore
        self.before = save
        self.after = restore
        words = len(pushed) + below
        self.offsets = {number: (words - 1 - index) * encoder.word for index, number in enumerate(pushed)}
        """Slot number -> offset of its saved value from sp during the program, in bytes."""
        self.offsets[SLOT_SP] = words * encoder.word


def _flags_keeping(body: X86Lowering, encoder: Encoder, live: set[int]) -> tuple[bytes, bytes, int]:
    """Return code that copies ax, which contains the saved flags, and code that loads ax from the copy.

    The first code runs before a program, and the second code after it. If the program doesn't use ax, both
    codes are empty, and the third result is 0. Otherwise it is the number of words that the first code
    pushes: 1, or 0 if it copies ax to a free register.
    """
    if AX not in body.used:
        return b"", b"", 0
    for number in range(len(REGISTER_NAMES) if encoder.bits == 64 else 8):
        name = REGISTER_NAMES[number]
        if number != SP and number not in body.used and number not in live and name not in body.reads:
            return encoder.move(number, AX), encoder.move(AX, number), 0
    return encoder.push(AX), encoder.pop(AX), 1


_NO_CONSTANTS: Mapping[str, int] = {}


class X86ReturnCode(ReturnCode):
    """Generator of return trampolines and return handlers, with the struct pt_regs of x86_64 or i386."""

    def __init__(self, frame: RegsFrame, registers: str) -> None:
        """Create a generator of code that saves registers in a struct pt_regs; `frame` has its layout.

        `registers`: names of the registers that a caller may read after a return.
        """
        self._frame = frame
        self.live = LiveRegisters(frozenset(registers.split()), flags=False)

    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        address = buffer + self._dispatch(program, 0, saves_all=saves_all).entry if own is None else own
        found = self._dispatch(program, address, saves_all=saves_all)
        stub = return_trampoline(self._frame, address)
        slow = stub.code[OWN_SIZE:]
        finish = self._frame.restore + RET if saves_all else b""
        behind = len(found.code)
        return ReturnDispatch(
            code=found.code + slow + finish,
            entry=found.entry,
            trap=behind + stub.trap - OWN_SIZE,
            finish=behind + len(slow) if finish else None,
        )

    def _dispatch(self, program: Program, address: int, *, saves_all: bool) -> HandlerCode:
        own = push_address(address)
        frame = self._frame
        leave = jump_through(LEAVING)
        if saves_all:
            body = X86Lowering(program, frame.encoder, None, _NO_CONSTANTS)
            return lay_out(body, own + frame.save, frame.restore, slots_of(frame), leave)
        body, saving = self._saving(program)
        return lay_out(body, own + saving.before, saving.after, saving.offsets, saving.after + leave)

    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        if saves_all:
            # The trampoline's program has already overwritten registers.
            body = X86Lowering(program, self._frame.encoder, None, _NO_CONSTANTS, overwritten=True)
            return lay_out(body, b"", b"", slots_of(self._frame))
        body, saving = self._saving(program)
        return lay_out(body, saving.before, saving.after + RET, saving.offsets)

    def _saving(self, program: Program) -> tuple[X86Lowering, SavedRegisters]:
        encoder = self._frame.encoder
        body = X86Lowering(program, encoder, self.live, _NO_CONSTANTS)
        return body, SavedRegisters(body, encoder, {NUMBERS[name] for name in self.live.registers})
