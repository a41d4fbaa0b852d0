"""StackCode: what a shadow stack does at a call's begin and end, as ops of handler programs.

Each piece may be interrupted between any two instructions: a call hooked within the interrupt has returned
before it goes on, and other CPUs find words that are shared in one of their states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

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
    LoadPerCpu,
    Op,
    SetImmediate,
    Store,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.shadow_stack import ACTIVE, HIGH_WATER, ShadowStack, counter_at
from emulated_kernel.util.fast_dataclass import dataclass

NODE, TASK, SLOT, RET, FIRST, SECOND = range(6)
"""Virtual registers: the call's node, its task, the stack slot and the real address, two to help."""


Stack = TypeVar("Stack", bound=ShadowStack)


@dataclass(frozen=True)
class TaskOffsets:
    """Where guest code finds the running task, and its fields that shadow stacks hang on; bytes."""

    word: int
    current_task: int
    """From the CPU's base, as is `cpu_number`."""
    cpu_number: int
    rethooks: int
    """In struct task_struct, as are the following."""
    ret_stack: int
    """0 where there is no RetStack."""

    @classmethod
    def of(cls, abi: Mapping[str, int], word: int) -> TaskOffsets | None:
        """Those of an image; None where its tasks have no `rethooks`."""
        needed = ("percpu.current_task", "percpu.cpu_number", "task_struct.rethooks")
        if any(name not in abi for name in needed):
            return None
        current_task, cpu_number, rethooks = (abi[name] for name in needed)
        return cls(word, current_task, cpu_number, rethooks, abi.get("task_struct.ret_stack", 0))


class StackCode(ABC, Generic[Stack]):
    """The guest's part of one kind of shadow stack; Python's is `stack`.

    `data` is how many words of private data the hook's nodes have.
    """

    data_word: ClassVar[int]
    """Where they begin in a node."""

    def __init__(self, offsets: TaskOffsets, stack: Stack, returned_at: int) -> None:
        """`returned_at` is Arch.returned_at."""
        self.offsets = offsets
        self.stack = stack
        self._returned_at = returned_at
        self.word = offsets.word
        self.shift = self.word.bit_length() - 1
        """Words to bytes, as a shift."""

    @abstractmethod
    def find(self, builder: ProgramBuilder, none: Label) -> None:
        """FIRST = the hook of the running task's newest call, SECOND = its frame; `none` if there is none."""

    @abstractmethod
    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:
        """Push NODE on the running task's shadow stack: return address RET, from stack slot SLOT (both kept).

        Goes to `missed`, with nothing changed, where no node is left.
        """

    @abstractmethod
    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        """The newest call, which is the hook's, returns: the trampoline goes on at the real address.

        SLOT is the stack pointer, and becomes the first word of data that the node had, which goes back.
        """

    def store_data(self, src: int, index: int = 0) -> Op:
        """A word of NODE's data becomes that of a register."""
        return self.store(NODE, (self.data_word + index) * self.word, src)

    def _give_back(self, builder: ProgramBuilder, data: int) -> None:
        """What returns is NODE, with the real address in RET."""
        builder.emit(self.store(SLOT, self._returned_at, RET))
        if data:
            builder.emit(self.load(SLOT, NODE, self.data_word * self.word))

    # Ops on words

    def load(self, dst: int, base: int, offset: int) -> Op:
        return Load(dst, base, offset, self.word)

    def store(self, base: int, offset: int, src: int) -> Op:
        return Store(base, offset, src, self.word)

    def current_task(self, dst: int) -> Op:
        return LoadPerCpu(dst, self.offsets.current_task, self.word)


def compute(op: Arithmetic, dst: int, value: int) -> Op:
    return ComputeImmediate(op, dst, value)


def set_to(dst: int, value: int) -> Op:
    return SetImmediate(dst, value)


def unless(register: int, label: Label) -> Op:
    """Go to the label if a register is 0."""
    return BranchImmediate(Condition.EQ, register, 0, label)


def count_one_more(builder: ProgramBuilder, hook: int, word: int) -> None:
    """An instance more is in use; FIRST, SECOND and TASK are overwritten."""
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
    """An instance less is in use; FIRST and SECOND are overwritten."""
    active = counter_at(hook, ACTIVE, word) - hook
    builder.emit(set_to(FIRST, -1), set_to(SECOND, hook), FetchAdd(SECOND, active, FIRST))
