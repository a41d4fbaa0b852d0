"""Generator of RISC-V handler code: a handler program, and code that saves and restores registers around it.

The program is what a probe does at a hit, as operations for any architecture. If the live registers are
unknown, the code saves every register in a struct pt_regs. Otherwise it saves only the registers that are
both live and written by the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arch_hooks import ReturnCode, ReturnDispatch
from emulated_kernel.arch.program.base_lowering import lay_out
from emulated_kernel.arch.program.ir import HandlerCode, Program
from emulated_kernel.arch.riscv import pt_regs
from emulated_kernel.arch.riscv.detour import RETURN_FROM_FRAME, RETURN_ROOM
from emulated_kernel.arch.riscv.encoder import (
    jump_register,
    load,
    move_stack_pointer,
    set_register,
    set_to_address,
    store,
)
from emulated_kernel.arch.riscv.insn import RA, REGISTER_NAMES, SP, T0
from emulated_kernel.arch.riscv.lowering import (
    LEAVING,
    NUMBERS,
    PER_CPU,
    BranchOutOfReachError,
    RiscvLowering,
    in_register,
    in_slot,
)
from emulated_kernel.arch.riscv.pt_regs import WORD

_STACK_ALIGN = 16


def handler_code(
    program: Program,
    addr: int,
    live: LiveRegisters | None,
    breakpoint_: bytes,
    *,
    per_cpu: int | None = PER_CPU,
    user_access: int | None = None,
) -> HandlerCode:
    """Return code that runs a program and preserves the registers `live`, or all registers if `live` is None.

    `addr`: address of the probe, which the program sees as the ip. `breakpoint_`: breakpoint instruction by
    which the code calls the host. `per_cpu`, `user_access`: see RiscvLowering.
    """
    constants = {"ip": addr, **pt_regs.FIXED_REGISTERS}

    def make(far: bool) -> HandlerCode:
        if live is None:
            return _save_all(
                program, breakpoint_, constants, far=far, per_cpu=per_cpu, user_access=user_access
            )
        body = RiscvLowering(
            program, live, constants, breakpoint_, far=far, per_cpu=per_cpu, user_access=user_access
        )
        before, after, slots = _save_live(body, live)
        return lay_out(body, before, after, slots)

    return _reaching(make)


def _reaching(make: Callable[[bool], HandlerCode]) -> HandlerCode:
    """Return handler code with short branches (4 KiB) if they reach their targets, else with far branches.

    `make(far)` generates the code, with far branches if `far` is True.
    """
    try:
        return make(False)
    except BranchOutOfReachError:
        return make(True)


def _save_all(
    program: Program,
    breakpoint_: bytes,
    constants: Mapping[str, int],
    *,
    far: bool,
    per_cpu: int | None,
    user_access: int | None,
) -> HandlerCode:
    """Return a program's code, and code around it that saves all registers in a frame (struct pt_regs).

    At each host call of the program, sp points at the complete frame. `breakpoint_`: breakpoint instruction
    by which the code calls the host. `constants`: pt_regs name -> known value. `far`: branches may lead
    farther than 4 KiB. `per_cpu`, `user_access`: see RiscvLowering.
    """
    # `completed` changes only t0, which programs don't use.
    completed = pt_regs.complete(set_register(T0, constants["ip"]))
    body = RiscvLowering(
        program,
        None,
        constants,
        breakpoint_,
        before_host=completed,
        far=far,
        per_cpu=per_cpu,
        user_access=user_access,
    )
    slots = {number: in_slot(WORD * number) for number in body.slots}
    slots[SP] = in_register(SP, pt_regs.SIZE)
    after = pt_regs.load_general() + move_stack_pointer(pt_regs.SIZE)
    return lay_out(body, pt_regs.save_general(), after, slots)


def _save_live(
    body: RiscvLowering, live: LiveRegisters, above: int = 0
) -> tuple[bytes, bytes, dict[int, int]]:
    """Return code that saves live registers around the program `body`, and code that restores them.

    The third result is the map of slots for _patch_slot(): number of a register -> instruction word (load or
    move) that reads the value that the register had at the hit. `above`: number of bytes that the trampoline
    has pushed on the probed code's stack.
    """
    used = body.used
    # A handler that an fentry site calls returns through t0. Ops other than assembly don't change t0.
    kept = live.registers | {REGISTER_NAMES[T0]}
    restored = [number for number in sorted(used) if REGISTER_NAMES[number] in kept]
    reads = sorted((body.slots & used).difference(restored))
    saved = [*restored, *reads]
    size = -(-WORD * len(saved) // _STACK_ALIGN) * _STACK_ALIGN
    places = {number: WORD * index for index, number in enumerate(saved)}
    before = move_stack_pointer(-size) + b"".join(
        store(SP, at, number, WORD) for number, at in places.items()
    )
    after = b"".join(load(number, SP, places[number], WORD) for number in restored) + move_stack_pointer(size)
    slots = {number: in_register(number) for number in NUMBERS.values()}
    slots |= {number: in_slot(at) for number, at in places.items()}
    slots[SP] = in_register(SP, size + above)
    return before, after, slots


_RETURN_WORD = RETURN_ROOM - pt_regs.SIZE
"""Size in bytes of the area above the struct pt_regs in a return trampoline's stack frame.

The lowest word of the area is the return address.
"""
_ENTER = move_stack_pointer(-_RETURN_WORD) + store(SP, 0, RA, WORD)
"""Code that pushes ra, which contains the return trampoline's own address.

A trampoline begins with it, unless it saves all registers. A hooked function has returned to that address. An
unwinder that finds the address on the stack recognizes a hooked function.
"""
_ENTER_FRAME = pt_regs.save_general(RETURN_ROOM, but=RA) + store(SP, pt_regs.SIZE, RA, WORD)
_RETURN = load(RA, SP, 0, WORD) + move_stack_pointer(_RETURN_WORD) + jump_register(RA)
_NO_CONSTANTS: Mapping[str, int] = {}


class RiscvReturnCode(ReturnCode):
    """Generator of return trampolines that are entered through ra, and of handlers that return through ra."""

    live = LiveRegisters(frozenset(("a0", "a1", *(f"s{n}" for n in range(12)))), flags=False)

    def __init__(
        self, breakpoint_: bytes, *, per_cpu: int | None = PER_CPU, user_access: int | None = None
    ) -> None:
        """Create a generator of code that calls the host by the breakpoint instruction `breakpoint_`.

        `per_cpu`, `user_access`: see RiscvLowering.
        """
        self._breakpoint = breakpoint_
        self._per_cpu = per_cpu
        self._user_access = user_access

    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        found = _reaching(lambda far: self._dispatch(program, saves_all=saves_all, far=far))
        address = buffer + found.entry if own is None else own
        # The handler in Python finds the original ra in the frame.
        code = found.code if saves_all else found.code + load(RA, SP, 0, WORD) + pt_regs.save_general()
        code += pt_regs.complete(set_to_address(T0, buffer + len(code), address), RETURN_ROOM)
        finish = len(code) + len(self._breakpoint)
        return ReturnDispatch(
            code=code + self._breakpoint + RETURN_FROM_FRAME,
            entry=found.entry,
            trap=len(code),
            finish=finish if saves_all else None,
        )

    def _dispatch(self, program: Program, *, saves_all: bool, far: bool) -> HandlerCode:
        leave = jump_register(LEAVING)
        if saves_all:
            # Don't store ra itself: the only word on the stack that may change is the return address.
            own = set_to_address(T0, len(_ENTER_FRAME), 0) + store(SP, WORD * RA, T0, WORD)
            return self._in_frame(program, _ENTER_FRAME + own, leave, far=far)
        body, before, after, slots = self._saving(program, far=far)
        return lay_out(body, _ENTER + before, after, slots, after + leave)

    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        return _reaching(lambda far: self._handler(program, saves_all=saves_all, far=far))

    def _handler(self, program: Program, *, saves_all: bool, far: bool) -> HandlerCode:
        if saves_all:
            return self._in_frame(program, far=far)
        body, before, after, slots = self._saving(program, far=far)
        return lay_out(body, before, after + _RETURN, slots)

    def _in_frame(
        self, program: Program, before: bytes = b"", leave: bytes = b"", *, far: bool
    ) -> HandlerCode:
        """Return code that runs a program on the register frame that the return trampoline has saved.

        `before`: code to run before the program. `leave`: code to insert at each JumpTo of the program.
        `far`: branches may lead farther than 4 KiB.
        """
        body = self._lowered(program, None, far=far)
        slots = {number: in_slot(WORD * number) for number in body.slots}
        slots[SP] = in_register(SP, RETURN_ROOM)
        return lay_out(body, before, b"", slots, leave)

    def _saving(self, program: Program, *, far: bool) -> tuple[RiscvLowering, bytes, bytes, dict[int, int]]:
        """Lower a program, and generate code that saves the registers that it changes.

        Return the lowered program, the saving code, the restoring code, and the map of slots. The map, for
        _patch_slot(), is: number of a register -> instruction word that reads the value that the register had
        at the hit.
        `far`: branches may lead farther than 4 KiB.
        """
        body = self._lowered(program, self.live, far=far)
        return body, *_save_live(body, self.live, _RETURN_WORD)

    def _lowered(self, program: Program, live: LiveRegisters | None, *, far: bool) -> RiscvLowering:
        return RiscvLowering(
            program,
            live,
            _NO_CONSTANTS,
            self._breakpoint,
            far=far,
            per_cpu=self._per_cpu,
            user_access=self._user_access,
        )
