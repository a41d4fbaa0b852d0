"""Effects of x86 instructions on a stack frame, for unwinding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from emulated_kernel.arch.analysis.stack_frames import (
    ALIGNED,
    CFA,
    IP,
    Effect,
    Flow,
    Frame,
    FrameInsn,
    add_to_register,
    copy_low_half,
    forget_registers,
    load_word,
    store_register,
    take_address,
    unchanged,
)
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.insn import decode_all
from emulated_kernel.arch.x86.liveness import register_numbers

_SCRATCH = {64: ("ax", "cx", "dx", "si", "di", "r8", "r9", "r10", "r11"), 32: ("ax", "cx", "dx")}
"""Word size in bits -> registers that a called function may change."""


def frame_insns(
    code: bytes, addr: int, bits: int, *, switches_stack: bool
) -> Iterator[tuple[int, FrameInsn]]:
    """Yield each instruction of a function: address, and effect on the stack frame.

    `switches_stack`: whether the function loads sp from memory, and so returns on the stack of an earlier
    call of the same function, as __switch_to_asm does.
    """
    from iced_x86 import InstructionInfoFactory

    reader = _FrameReader(bits, InstructionInfoFactory(), range(addr + 1, addr + len(code)), switches_stack)
    for at, length, insn in decode_all(code, addr, bits):
        if insn is not None:
            yield at, reader.read(insn, length)


class _FrameReader:
    def __init__(self, bits: int, factory: Any, inside: range, switches_stack: bool) -> None:
        self._word = bits // 8
        self._factory = factory
        self._inside = inside
        self._switches_stack = switches_stack
        self._scratch = _SCRATCH[bits]
        self._numbers = register_numbers()
        self._makers = self._makers_by_mnemonic()

    def _makers_by_mnemonic(self) -> dict[int, Callable[[Any], Effect | None]]:
        """Return a map: iced's number of a mnemonic -> function that returns an instruction's effect.

        The function returns None if _other() must find the effect.
        """
        from iced_x86 import Mnemonic

        return {
            Mnemonic.PUSH: self._pushing,
            Mnemonic.POP: self._popping,
            Mnemonic.LEAVE: self._leaving,
            Mnemonic.MOV: self._move,
            Mnemonic.MOVSXD: self._move_low_half,
            Mnemonic.LEA: self._address,
            Mnemonic.ADD: partial(self._sum, sign=1),
            Mnemonic.SUB: partial(self._sum, sign=-1),
            Mnemonic.AND: self._and,
        }

    def read(self, insn: Any, length: int) -> FrameInsn:
        from iced_x86 import FlowControl

        flow = insn.flow_control
        target = insn.near_branch_target or None
        if flow == FlowControl.CALL and target in self._inside:
            # A call within the function, as in a retpoline, only pushes its return address.
            return FrameInsn(length, partial(self._push, None), Flow.JUMP, target)
        if flow in (FlowControl.CALL, FlowControl.INDIRECT_CALL):
            return FrameInsn(length, forget_registers(self._scratch), Flow.CALL)
        if flow == FlowControl.EXCEPTION:
            return FrameInsn(length, unchanged, Flow.TRAP)
        effect = self._effect(insn)
        if flow == FlowControl.CONDITIONAL_BRANCH:
            return FrameInsn(length, effect, Flow.BRANCH, target)
        if flow == FlowControl.UNCONDITIONAL_BRANCH:
            return FrameInsn(length, effect, Flow.JUMP, target)
        if flow == FlowControl.INDIRECT_BRANCH:
            return FrameInsn(length, effect, Flow.INDIRECT)
        if flow in (FlowControl.NEXT, FlowControl.INTERRUPT):
            return FrameInsn(length, effect)
        return FrameInsn(length, effect, Flow.RETURN)

    def _effect(self, insn: Any) -> Effect:
        make = self._makers.get(insn.mnemonic)
        effect = None if make is None else make(insn)
        return self._other(insn) if effect is None else effect

    # Operands

    def _name(self, register: Any) -> str | None:
        """Return the pt_regs name of a whole general register; None for its parts and for other registers."""
        from iced_x86 import RegisterExt

        number = self._numbers.get(RegisterExt.full_register(register))
        if number is None or RegisterExt.size(register) != self._word:
            return None
        return REGISTER_NAMES[number]

    @staticmethod
    def _whole(register: Any) -> Any:
        """Return the 64-bit register of which `register` is a part."""
        from iced_x86 import RegisterExt

        return RegisterExt.full_register(register)

    def _register(self, insn: Any, operand: int) -> str | None:
        from iced_x86 import OpKind

        return self._name(insn.op_register(operand)) if insn.op_kind(operand) == OpKind.REGISTER else None

    def _place(self, insn: Any) -> tuple[str, int] | None:
        """Return base register and offset of an instruction's memory operand.

        Return None if the operand has an index, a segment prefix, or no base.
        """
        from iced_x86 import Register

        if insn.memory_index != Register.NONE or insn.segment_prefix != Register.NONE:
            return None
        name = self._name(insn.memory_base)
        return None if name is None else (name, self._signed(insn.memory_displacement))

    def _signed(self, number: int) -> int:
        return number - (1 << 8 * self._word if number >> 8 * self._word - 1 else 0)

    # Effects

    def _pushing(self, insn: Any) -> Effect:
        if insn.op_count and (name := self._register(insn, 0)) is not None:
            return partial(self._push, name)
        from iced_x86 import OpKind

        if insn.op_kind(0) == OpKind.MEMORY and (place := self._place(insn)) is not None:
            return partial(self._push_from, place)
        return partial(self._push, None)

    def _push(self, name: str | None, frame: Frame) -> None:
        value = None if name is None else frame.regs.get(name)
        frame.add("sp", "sp", -self._word)
        frame.store(frame.at("sp"), value, self._word, self._word)

    def _push_from(self, place: tuple[str, int], frame: Frame) -> None:
        at = frame.at(*place)
        value = None if at is None else frame.slots.get(at)
        frame.add("sp", "sp", -self._word)
        frame.store(frame.at("sp"), value, self._word, self._word)

    def _popping(self, insn: Any) -> Effect:
        return partial(self._pop, self._register(insn, 0))

    def _pop(self, name: str | None, frame: Frame) -> None:
        if name is not None:
            frame.load(name, frame.at("sp"))
        frame.add("sp", "sp", self._word)

    def _leaving(self, _insn: Any) -> Effect:
        return self._leave

    def _leave(self, frame: Frame) -> None:
        frame.add("sp", "bp", 0)
        self._pop("bp", frame)

    def _move_low_half(self, insn: Any) -> Effect | None:
        """Return the effect of a move of the low 32 bits of a register, zero-extended or sign-extended.

        Return None for another instruction, and on i386.
        """
        from iced_x86 import OpKind, RegisterExt

        if self._word != 8 or insn.op0_kind != OpKind.REGISTER or insn.op1_kind != OpKind.REGISTER:
            return None
        to, source = (insn.op_register(operand) for operand in (0, 1))
        if (
            RegisterExt.size(source) != 4
            or not {self._whole(to), self._whole(source)} <= self._numbers.keys()
        ):
            return None
        return copy_low_half(*(REGISTER_NAMES[self._numbers[self._whole(each)]] for each in (to, source)))

    def _move(self, insn: Any) -> Effect | None:
        from iced_x86 import OpKind

        to = self._register(insn, 0)
        source = self._register(insn, 1)
        if to is not None and source is not None:
            return add_to_register(to, source)
        if (low_half := self._move_low_half(insn)) is not None:
            return low_half
        place = self._place(insn) if OpKind.MEMORY in (insn.op0_kind, insn.op1_kind) else None
        if to is not None and insn.op1_kind == OpKind.MEMORY:
            if to == "sp" and self._switches_stack:
                return unchanged
            return None if place is None else load_word(to, *place)
        if insn.op0_kind == OpKind.MEMORY and place is not None and source is not None:
            return store_register(source, *place, self._word, self._word)
        return None

    def _address(self, insn: Any) -> Effect | None:
        to = self._register(insn, 0)
        place = self._place(insn)
        if to is None or place is None:
            return None
        return take_address(to, *place)

    def _sum(self, insn: Any, sign: int) -> Effect | None:
        from iced_x86 import OpKind

        to = self._register(insn, 0)
        if insn.op1_kind in (OpKind.REGISTER, OpKind.MEMORY):
            return None
        by = sign * self._signed(insn.immediate(1))
        if to is None:
            return self._sum_in_memory(insn, by)
        return take_address(to, to, by)

    def _sum_in_memory(self, insn: Any, by: int) -> Effect | None:
        """Return the effect of adding the constant `by` to a word in memory, as ftrace's trampoline does.

        Return None if the operand is not a word, or if its place is not a base register plus an offset.
        """
        from iced_x86 import MemorySizeExt, OpKind

        place = self._place(insn) if insn.op0_kind == OpKind.MEMORY else None
        if place is None or MemorySizeExt.size(insn.memory_size) != self._word:
            return None
        word = self._word

        def add(frame: Frame) -> None:
            at = frame.at(*place)
            base, offset = ("", 0) if at is None else frame.slots.get(at, ("", 0))
            frame.store(at, (base, offset + by) if base in (CFA, ALIGNED) else None, word, word)

        return add

    def _and(self, insn: Any) -> Effect | None:
        return _align if self._register(insn, 0) == "sp" else None

    def _other(self, insn: Any) -> Effect:
        """Return the effect of an instruction without a special rule: what it writes becomes unknown.

        If the instruction moves sp by a constant, sp stays known.
        """
        from iced_x86 import MemorySizeExt, OpAccess, RegisterExt

        info = self._factory.info(insn)
        reads = (OpAccess.NONE, OpAccess.READ, OpAccess.COND_READ, OpAccess.NO_MEM_ACCESS)
        moved = insn.stack_pointer_increment
        names = [
            REGISTER_NAMES[number]
            for used in info.used_registers()
            if used.access not in reads
            and (number := self._numbers.get(RegisterExt.full_register(used.register))) is not None
            and not (moved and REGISTER_NAMES[number] == "sp")
        ]
        stores = [
            (name, self._signed(used.displacement), MemorySizeExt.size(used.memory_size))
            for used in info.used_memory()
            if used.access not in reads and not used.index and (name := self._name(used.base)) is not None
        ]

        def forget(frame: Frame) -> None:
            if moved:
                frame.add("sp", "sp", moved)
            for base, offset, size in () if moved else stores:
                frame.store(frame.at(base, offset), None, size, self._word)
            frame.forget(names)

        return forget


def _align(frame: Frame) -> None:
    frame.slots = {at: value for at, value in frame.slots.items() if at[0] != ALIGNED}
    frame.set("sp", (ALIGNED, 0))


_HOST_FRAME = 4
"""Number of words that the host pushes to interrupt the guest.

In address order: vector, error code, flags, ip.
"""


def entry_frame(bits: int, *, by_interrupt: bool) -> Frame:
    """Return the stack frame at a function's entry.

    The highest word of the frame is the return address. `by_interrupt`: whether an interrupt enters the
    function; if so, this word is the interrupted ip.
    """
    word = bits // 8
    regs = {name: (name, 0) for name in REGISTER_NAMES[: 16 if bits == 64 else 8]}
    regs["sp"] = (CFA, -word * (_HOST_FRAME if by_interrupt else 1))
    return Frame(regs, {(CFA, -word): (IP, 0)})
