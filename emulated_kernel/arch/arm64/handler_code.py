"""Generator of arm64 handler code: a handler program, and code that saves and restores registers around it.

If the live registers are unknown, the code saves every register in a struct user_pt_regs. Otherwise it
saves only the registers that are both live and written by the program.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arch_hooks import HandlerStub, ReturnCode, ReturnDispatch
from emulated_kernel.arch.arm64 import pt_regs
from emulated_kernel.arch.arm64.encoder import (
    BRK,
    SP,
    WORD,
    add_immediate,
    branch_register,
    load,
    load_all,
    move,
    move_stack_pointer,
    read_system_register,
    return_to,
    set_register,
    set_to_address,
    store,
    store_all,
    write_flags,
)
from emulated_kernel.arch.arm64.insn import LINK, REGISTER_NAMES
from emulated_kernel.arch.arm64.lowering import (
    LEAVING,
    NUMBERS,
    Arm64Lowering,
    above_stack,
    in_register,
    in_slot,
)
from emulated_kernel.arch.arm64.pt_regs import FLAGS, SCRATCH
from emulated_kernel.arch.program.base_lowering import lay_out
from emulated_kernel.arch.program.ir import HandlerCode, Program

_STACK_ALIGN = 16
CALLER = 9
"""Number of x9, which has the return address of the traced function when an fentry site calls a handler.

While the handler runs, x9 and x30 are exchanged: x9 has the address after the site, and x30 has the return
address.
"""
EXCHANGE_LINKS = move(SCRATCH, LINK) + move(LINK, CALLER) + move(CALLER, SCRATCH)
"""Code that exchanges x30 and x9, at the start of code that an fentry site calls.

The exchange overwrites SCRATCH.
"""


def handler_code(
    program: Program, addr: int, live: LiveRegisters | None, *, by_call: bool = False
) -> HandlerCode:
    """Return code that runs a program and preserves the registers `live`, or all registers if `live` is None.

    `addr`: address of the probe, which the program sees as the ip. The code itself works at any address.
    `by_call`: True if an fentry site calls the code, so that it must exchange x9 and x30; False if a jump or
    trap enters it.
    """
    constants = {"ip": addr}
    before = EXCHANGE_LINKS if by_call else b""
    if live is None:
        return _save_all(program, constants, before)
    if by_call:
        live = LiveRegisters(live.registers | {REGISTER_NAMES[CALLER]}, live.flags)
    body = Arm64Lowering(program, live, constants)
    saving, restoring, slots = _save_live(body, live)
    return lay_out(body, before + saving, restoring, slots)


def _frame_slots(body: Arm64Lowering, room: int) -> dict[int, int]:
    """Return a map: slot number -> instruction that loads the slot's value from a frame with all registers.

    A slot is the value of a register at the hit, which the program reads. The map is for Encoding.patch_slot.
    `body`: the lowered program. `room`: distance in bytes from the frame up to the probed code's sp.
    """
    slots = {number: in_slot(WORD * number) for number in body.slots}
    return slots | {SP: above_stack(room)}


def _save_all(program: Program, constants: Mapping[str, int], before: bytes) -> HandlerCode:
    """Return code that runs `before`, saves all registers in a frame, runs a program, and restores them.

    At each host call of the program, sp points at the complete frame (struct user_pt_regs). `constants`:
    pt_regs name -> known value.
    """
    completed = pt_regs.complete(set_register(SCRATCH, constants["ip"]))
    body = Arm64Lowering(program, None, constants, before_host=completed)
    after = pt_regs.load_general() + move_stack_pointer(pt_regs.SIZE)
    return lay_out(body, before + pt_regs.save_general(), after, _frame_slots(body, pt_regs.SIZE))


def _save_live(
    body: Arm64Lowering, live: LiveRegisters, above: int = 0
) -> tuple[bytes, bytes, dict[int, int]]:
    """Return code that saves live registers around the program `body`, and code that restores them.

    The third result is the map of slots for Encoding.patch_slot: slot number -> instruction word (load or
    move) that reads the saved value. `above`: number of bytes that the trampoline has pushed on the probed
    code's stack.
    """
    used = body.used
    restored = [number for number in sorted(used) if REGISTER_NAMES[number] in live.registers]
    reads = sorted((body.slots & used).difference(restored))
    restores_flags = live.flags and body.overwrites_flags
    saved = [*restored, *reads, *([FLAGS] if restores_flags or FLAGS in body.slots else ())]
    size = -(-WORD * len(saved) // _STACK_ALIGN) * _STACK_ALIGN
    places = {number: WORD * index for index, number in enumerate(saved)}
    before = move_stack_pointer(-size)
    before += store_all(SP, {number: places[number] for number in (*restored, *reads)})
    after = load_all(SP, {number: places[number] for number in restored}) + move_stack_pointer(size)
    # A program that has to do with the flags overwrites a register, whose value is saved if it matters.
    spare = min(used, default=SCRATCH)
    if FLAGS in places:
        before += read_system_register(spare, "nzcv") + store(SP, places[FLAGS], spare, WORD)
    if restores_flags:
        after = load(spare, SP, places[FLAGS], WORD) + write_flags(spare) + after
    slots = {number: in_register(number) for number in NUMBERS.values()}
    slots |= {number: in_slot(at) for number, at in places.items()}
    slots[SP] = above_stack(size + above)
    return before, after, slots


RETURN_ROOM = pt_regs.SIZE + 2 * WORD
"""Size in bytes of a return trampoline's stack frame: registers and the return address, 16-byte aligned."""
_RETURN_WORD = RETURN_ROOM - pt_regs.SIZE
"""Size in bytes of the area above the register frame of a return; its lowest word is the return address."""
_ENTER = move_stack_pointer(-_RETURN_WORD) + store(SP, 0, LINK, WORD)
"""Code that pushes x30, which still has the address that the hooked function returned to.

This is the trampoline's address, by which an unwinder recognizes a hooked function.
"""
_ENTER_FRAME = pt_regs.save_general(RETURN_ROOM) + store(SP, pt_regs.SIZE, LINK, WORD)
_RETURN = load(LINK, SP, 0, WORD) + move_stack_pointer(_RETURN_WORD) + return_to(LINK)
_RETURN_FROM_FRAME = (
    pt_regs.load_general(LINK)
    + load(LINK, SP, pt_regs.SIZE, WORD)
    + move_stack_pointer(RETURN_ROOM)
    + return_to(LINK)
)
"""End of a return trampoline: code that restores registers and jumps to the real return address."""
_NO_CONSTANTS: Mapping[str, int] = {}


def return_trampoline(address: int) -> HandlerStub:
    """Return the return trampoline, to which hooked functions return, for the address `address`.

    Mirrors: arch/arm64/kernel/probes/kprobes_trampoline.S:__kretprobe_trampoline (v6.1).
    """
    save = _ENTER_FRAME + pt_regs.complete(set_to_address(SCRATCH, address), RETURN_ROOM)
    return HandlerStub(save + BRK + _RETURN_FROM_FRAME, len(save))


def ftrace_trampoline() -> HandlerStub:
    """Return the trampoline that armed fentry sites call; it ends with a jump to the saved ip.

    The instruction before an fentry site copies x30 to x9. The call at the site then overwrites x30. The
    trampoline saves the return address of the traced function as x30. At its end, it sets sp to the saved sp.
    It may change x9 and x16.
    Mirrors: arch/arm64/kernel/entry-ftrace.S:ftrace_caller (v6.12).
    """
    save = EXCHANGE_LINKS + pt_regs.save_general() + pt_regs.complete(move(SCRATCH, CALLER))
    restore = pt_regs.load_general(CALLER, SCRATCH)
    restore += load(SCRATCH, SP, pt_regs.OFFSETS["sp"], WORD) + load(CALLER, SP, pt_regs.OFFSETS["ip"], WORD)
    restore += add_immediate(SP, SCRATCH, 0) + return_to(CALLER)
    return HandlerStub(save + BRK + restore, len(save))


class Arm64ReturnCode(ReturnCode):
    """Generator of return trampolines that are entered through x30, and of handlers that return through x30.

    GCC lets a caller rely on registers that the called function does not change. So the code
    preserves all registers except x30, which the return itself uses.
    """

    live = LiveRegisters(frozenset(REGISTER_NAMES) - {REGISTER_NAMES[LINK]}, flags=True)
    preserves_all = True

    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        found = self._dispatch(program, saves_all=saves_all)
        address = buffer + found.entry if own is None else own
        # The handler in Python finds the trampoline's address as x30 in the frame.
        code = found.code if saves_all else found.code + load(LINK, SP, 0, WORD) + pt_regs.save_general()
        code += pt_regs.complete(set_to_address(SCRATCH, address), RETURN_ROOM)
        finish = len(code) + len(BRK)
        return ReturnDispatch(
            code=code + BRK + _RETURN_FROM_FRAME,
            entry=found.entry,
            trap=len(code),
            finish=finish if saves_all else None,
        )

    def _dispatch(self, program: Program, *, saves_all: bool) -> HandlerCode:
        leave = branch_register(LEAVING)
        if saves_all:
            return self._in_frame(program, _ENTER_FRAME, leave)
        body = Arm64Lowering(program, self.live, _NO_CONSTANTS)
        before, after, slots = _save_live(body, self.live, _RETURN_WORD)
        return lay_out(body, _ENTER + before, after, slots, after + leave)

    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        if saves_all:
            return self._in_frame(program)
        body = Arm64Lowering(program, self.live, _NO_CONSTANTS)
        before, after, slots = _save_live(body, self.live, _RETURN_WORD)
        return lay_out(body, before, after + _RETURN, slots)

    def _in_frame(self, program: Program, before: bytes = b"", leave: bytes = b"") -> HandlerCode:
        """Return code that runs a program on the register frame that the return trampoline has saved.

        `before` is code to run before the program, and `leave` is code at each JumpTo op, where control
        leaves the program.
        """
        body = Arm64Lowering(program, None, _NO_CONSTANTS)
        return lay_out(body, before, b"", _frame_slots(body, RETURN_ROOM), leave)
