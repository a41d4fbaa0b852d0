"""Lowering of a handler program's ops to machine instructions: the code that all architectures share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.code_layout import Block, Encoding, Layout
from emulated_kernel.arch.program.ir import Condition, HandlerCode, Program

BIT_TESTS = (Condition.ANY_BIT, Condition.NO_BIT)
SPARE = -1
"""Pseudo virtual register: its real register is a scratch register for the code of one op."""
SECOND = -2
"""Pseudo virtual register for the second scratch register of one op."""
THIRD = -3
"""Pseudo virtual register for the third scratch register of one op."""
FOURTH = -4
"""Pseudo virtual register for the fourth scratch register of one op."""


def registers_read(program: Program) -> frozenset[str]:
    """Return the pt_regs names of the registers that a program reads."""
    by_assembly = (op.assembly.reads for op in program if type(op) is ir.RunAssembly)
    return frozenset([op.name for op in program if type(op) is ir.GetRegister]).union(*by_assembly)


def overwritten_by_assembly(program: Program) -> frozenset[str]:
    """Return the pt_regs names of the registers that a program's assembly writes."""
    written: frozenset[str] = frozenset()
    return written.union(*(op.assembly.writes for op in program if type(op) is ir.RunAssembly))


def cost(name: str, live: Collection[str], reads: Collection[str]) -> int:
    """Return a rank by which a register called `name` is chosen for a program; a lower rank is cheaper.

    The rank is 0 if the register is dead and the program doesn't read its value at the hit. `live`: registers
    that the probed code may still read. `reads`: registers that the program reads.
    """
    return 4 * (name in reads) + 2 * (name in live)


@lru_cache(1024)
def by_cost(
    order: tuple[int, ...], names: tuple[str, ...], live: frozenset[str], reads: frozenset[str]
) -> tuple[int, ...]:
    """Return the registers that a program may use, cheapest first; see cost().

    `order`: numbers of the registers, in the order for equal costs. `names`: number -> pt_regs name.
    """
    return tuple(sorted(order, key=lambda number: cost(names[number], live, reads)))


class Assignment(dict[int, int]):
    """Map virtual register -> real register.

    A virtual register gets its real register on first use: the first free one in the order of preference.
    """

    def __init__(self, order: Sequence[int], overwritten: set[int]) -> None:
        self._order = order
        self.pinned: set[int] = set()
        """Real registers that must not be assigned, because the program reads their values at the hit."""
        self.overwritten = overwritten
        """Real registers that may no longer contain the probed code's value."""

    def __missing__(self, vreg: int) -> int:
        taken = self.values()
        number = next(n for n in self._order if n not in taken and n not in self.pinned)
        self.overwritten.add(number)
        self[vreg] = number
        return number


class Lowering(ABC):
    """Lowers ops to blocks of code, and records the registers and saved values that the code uses.

    Each class of ops has its own method: _set_immediate() lowers SetImmediate.
    """

    encoding: ClassVar[Encoding]
    zero: ClassVar[int]
    """Number of the register that always contains 0; not set for an architecture without such a register."""
    _methods: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {}

    def __init_subclass__(cls) -> None:
        named = {op: _method_name(op) for op in ir.Op.__subclasses__()}
        cls._methods = {op: getattr(cls, name) for op, name in named.items() if hasattr(cls, name)}

    def __init__(
        self, real: Assignment, constants: Mapping[str, int], breakpoint_: bytes, before_host: bytes
    ) -> None:
        """Create a lowering with one empty block.

        `real`: virtual register -> real register. `constants`: pt_regs name -> known value. `breakpoint_`:
        breakpoint instruction of host calls. `before_host`: code to insert before each host call.
        """
        self._real = real
        self._constants = constants
        self._breakpoint = breakpoint_
        self._before_host = before_host
        self.slots: set[int] = set()
        """Slot numbers of the saved values (registers at the hit) that the code reads.

        A slot number is the register's number, but the flags and, on x86, sp have numbers of their own.
        """
        self.blocks: list[Block] = []
        self._by_assembly: frozenset[int] = frozenset()
        """Registers that assembly handlers of the program write.

        On x86, the set also has the registers that the code reloads before a handler reads them.
        """
        self._start(Block())
        self.labels: dict[int, int] = {}
        """Label number -> index of the block that begins at the label."""

    @property
    def used(self) -> frozenset[int]:
        """Real registers that the lowered program writes."""
        return self._by_assembly.union(self._real.values())

    @abstractmethod
    def _load_immediate(self, register: int, value: int) -> None: ...

    @abstractmethod
    def _read_register(self, dst: int, name: str) -> None:
        """Emit code that loads into `dst` the value that the register `name` had at the hit."""

    def _lower(self, program: Program) -> None:
        methods = self._methods
        for op in program:
            methods[type(op)](self, op)

    def _start(self, block: Block) -> None:
        self.blocks.append(block)
        self._block = block
        self._code = block.code

    @abstractmethod
    def _restore_for_assembly(self, name: str) -> None:
        """Emit code that sets the register `name` to its value at the hit, unless it still has this value."""

    def _run_assembly(self, op: ir.RunAssembly) -> None:
        for name in sorted(op.assembly.reads):
            self._restore_for_assembly(name)
        start = len(self._code)
        self._block.accesses += [(start + at, op.on_fault.number) for at in op.assembly.starts]
        self._code += op.assembly.code

    def _number(self, value: int, spare: int) -> int:
        """Return the number of a real register that contains the constant `value`.

        For 0, this is the zero register. Otherwise emit code that loads the constant into the real register
        of `spare`, a virtual register.
        """
        if value == 0:
            return self.zero
        register = self._real[spare]
        self._load_immediate(register, value)
        return register

    def _set_immediate(self, op: ir.SetImmediate) -> None:
        self._load_immediate(self._real[op.dst], op.value)

    def _get_register(self, op: ir.GetRegister) -> None:
        dst = self._real[op.dst]
        known = self._constants.get(op.name)
        if known is not None:
            self._load_immediate(dst, known)
        else:
            self._read_register(dst, op.name)

    def _place(self, op: ir.Place) -> None:
        self.labels[op.label.number] = len(self.blocks)
        self._start(Block())

    def _jump(self, op: ir.Jump) -> None:
        self._block.next_label = op.label.number
        self._start(Block(is_label=False))

    def _call_host(self, op: ir.CallHost) -> None:
        self._code += self._before_host
        self._block.host_calls.append((len(self._code), op.number, op.label.number))
        self._code += self._breakpoint


def _method_name(op: type) -> str:
    return "".join(f"_{word.lower()}" for word in re.findall("[A-Z][a-z]*", op.__name__))


def lay_out(
    body: Lowering, before: bytes, after: bytes, slots: Mapping[int, int], leave: bytes = b""
) -> HandlerCode:
    """Return the final code: out-of-line blocks, `before`, the main path of `body`, `after`.

    `before` is the entry. The main path has the blocks that the first block reaches by falling through or by
    unconditional jumps. All other reachable blocks are out-of-line. `slots`: slot number -> value for
    Encoding.patch_slot, such as an offset from the stack pointer. `leave` is appended to blocks that leave
    the program.
    """
    layout = Layout(body.blocks, body.labels, body.encoding, leave)
    straight, behind = layout.chain(0)
    cold = [layout.chain(index) for index in layout.others()]
    for chain, target in cold:
        layout.put(chain)
        layout.jump(target)
    entry = len(layout.code)
    layout.code += before
    layout.put(straight)
    if behind != layout.end:
        layout.jump(behind)
    layout.starts[layout.end] = len(layout.code)
    layout.code += after
    return layout.link(entry, slots)
