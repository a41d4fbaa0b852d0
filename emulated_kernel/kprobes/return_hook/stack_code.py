"""StackCode: emits the guest code that uses a shadow stack at the start and the end of hooked calls.

The code may be interrupted between any two instructions. A call that is hooked during the interrupt returns
before the code continues. Other CPUs see shared words only in consistent states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    CompareExchange,
    ComputeImmediate,
    Condition,
    FetchAdd,
    Jump,
    Label,
    Load,
    Op,
    SetImmediate,
    Store,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import RET_STACK
from emulated_kernel.kprobes.return_hook.shadow_stack import ACTIVE, HIGH_WATER, ShadowStack, counter_at
from emulated_kernel.util.fast_dataclass import dataclass

NODE = 0
"""Number of the virtual register with the address of the call's node."""
TASK = 1
"""Number of the virtual register with the address of the running task."""
SLOT = 2
"""Number of the virtual register with the address of the stack slot that holds the return address."""
RET = 3
"""Number of the virtual register with the real return address."""
FIRST = 4
"""Number of the first virtual register for intermediate values."""
SECOND = 5
"""Number of the second virtual register for intermediate values."""


Stack = TypeVar("Stack", bound=ShadowStack)


@dataclass(frozen=True)
class TaskOffsets:
    """Offsets in bytes of words that guest code reads: running task, CPU number, and fields of the task."""

    word: int
    cpu: CpuWords
    rethooks: int
    """Offset in bytes of `rethooks` in struct task_struct; 0 if there is no such field."""
    ret_stack: int
    """Offset in bytes of `ret_stack` in struct task_struct; 0 if there is no such field."""

    def field(self, number: int) -> int:
        """Return the offset in bytes of the field RETHOOKS or RET_STACK; 0 if there is no such field."""
        return self.ret_stack if number == RET_STACK else self.rethooks

    @classmethod
    def of(cls, abi: Mapping[str, int], arch: Arch) -> TaskOffsets | None:
        """Return the offsets of an image; None if guest code cannot find the running task or CPU number."""
        cpu = CpuWords.of(abi, arch.current_register, arch.word_size)
        if cpu is None:
            return None
        fields = ("task_struct.rethooks", "task_struct.ret_stack")
        return cls(arch.word_size, cpu, *(abi.get(name, 0) for name in fields))


class StackCode(ABC, Generic[Stack]):
    """Emits guest code for one kind of shadow stack; `stack` is its counterpart in Python.

    In the methods, `data` is the number of words of private data in the hook's nodes.
    """

    data_word: ClassVar[int]
    """Index of the first word of private data in a node."""
    needs_field: ClassVar[bool] = True
    """Whether the code uses the field of struct task_struct in which the shadow stack's calls begin."""

    def __init__(self, offsets: TaskOffsets, stack: Stack, returned_at: int) -> None:
        """Create an emitter of code that uses the shadow stack `stack`.

        `returned_at`: offset in bytes, from sp in a return handler, of the word to which the code writes the
        real return address.
        """
        self.offsets = offsets
        self.stack = stack
        self._returned_at = returned_at
        self.word = offsets.word
        self.shift = self.word.bit_length() - 1
        """Number of bits by which a number of words is shifted to get a number of bytes."""

    @abstractmethod
    def find(self, builder: ProgramBuilder, none: Label) -> None:
        """Emit code that sets FIRST to the hook, and SECOND to the frame, of the running task's newest call.

        Both are addresses; see Pending. If there is no call, the code goes to `none`.
        """

    @abstractmethod
    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:
        """Emit code that pushes a call on the running task's shadow stack, and sets NODE to the call's node.

        `hook`: address of the hook that owns the node. Before the code runs, RET contains the return address
        and SLOT the address of its stack slot; both are preserved. If no node is left, the code goes to
        `missed` with nothing pushed.
        """

    @abstractmethod
    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        """Emit code that pops the running task's newest call, and makes the trampoline return from this call.

        `hook`: address of the hook that owns the call's node. Before the code runs, SLOT contains the stack
        pointer. If `data` is not 0, the code loads the first word of the node's data into SLOT.
        """

    def store_data(self, src: int, index: int = 0) -> Op:
        """Return an op that stores register `src` to word `index` of NODE's data."""
        return self.store(NODE, (self.data_word + index) * self.word, src)

    def _give_back(self, builder: ProgramBuilder, data: int) -> None:
        """Emit code that stores RET, to which the trampoline returns, at the offset `_returned_at` from SLOT.

        If `data` is not 0, the code then loads the first word of NODE's data into SLOT.
        """
        builder.emit(self.store(SLOT, self._returned_at, RET))
        if data:
            builder.emit(self.load(SLOT, NODE, self.data_word * self.word))

    # Ops on words

    def load(self, dst: int, base: int, offset: int) -> Op:
        return Load(dst, base, offset, self.word)

    def store(self, base: int, offset: int, src: int) -> Op:
        return Store(base, offset, src, self.word)

    def current_task(self, dst: int) -> Op:
        return self.offsets.cpu.load_task(dst)


def compute(op: Arithmetic, dst: int, value: int) -> Op:
    """Return an op that sets register `dst` to the result of the operation `op` on `dst` and `value`."""
    return ComputeImmediate(op, dst, value)


def set_to(dst: int, value: int) -> Op:
    """Return an op that sets register `dst` to `value`."""
    return SetImmediate(dst, value)


def unless(register: int, label: Label) -> Op:
    """Return an op that jumps to `label` if `register` is 0."""
    return BranchImmediate(Condition.EQ, register, 0, label)


def count_one_more(builder: ProgramBuilder, hook: int, word: int) -> None:
    """Emit code that adds 1 to a hook's counter ACTIVE, and updates HIGH_WATER, the maximum of ACTIVE.

    `hook`: address of the hook. `word`: size of a word in bytes. The code overwrites the virtual registers
    FIRST, SECOND and TASK.
    """
    active, high = (counter_at(hook, number, word) - hook for number in (ACTIVE, HIGH_WATER))
    counted = builder.label()
    with builder.out_of_line() as higher:
        builder.emit(CompareExchange(SECOND, high, TASK, FIRST, changed := builder.label()), Jump(counted))
        builder.place(changed)
        builder.emit(Branch(Condition.BELOW, TASK, FIRST, higher), Jump(counted))
    builder.emit(
        set_to(FIRST, 1),
        set_to(SECOND, hook),
        FetchAdd(SECOND, active, FIRST),
        compute(Arithmetic.ADD, FIRST, 1),
        Load(TASK, SECOND, high, word),
        Branch(Condition.BELOW, TASK, FIRST, higher),
    )
    builder.place(counted)


def count_one_less(builder: ProgramBuilder, hook: int, word: int) -> None:
    """Emit code that subtracts 1 from a hook's counter ACTIVE.

    `hook`: address of the hook. `word`: size of a word in bytes. The code overwrites the virtual registers
    FIRST and SECOND.
    """
    active = counter_at(hook, ACTIVE, word) - hook
    builder.emit(set_to(FIRST, -1), set_to(SECOND, hook), FetchAdd(SECOND, active, FIRST))
