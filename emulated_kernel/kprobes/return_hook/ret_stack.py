"""The function graph's shadow stack: one array a task, shared by all hooks and by no other task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    Compute,
    Condition,
    Jump,
    Label,
    Move,
    Op,
    StoreImmediate,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import RET_STACK, GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.shadow_stack import ACTIVE, Pending, ShadowStack, note_taken
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    RET,
    SECOND,
    SLOT,
    TASK,
    StackCode,
    compute,
    count_one_less,
    count_one_more,
    set_to,
    unless,
)
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

SHADOW_STACK_SIZE = PAGE_SIZE
"""Bytes of a task's array."""
HOOK, RET_ADDR, FRAME, SIZE = range(4)
"""Words at the end of an entry, behind its data; SIZE is that of the whole entry in words."""
TRAILER = 4
"""All of them."""
_USED, _OVERRUNS, _COUNTS = range(3)
"""Words behind a task's array: how many of it are in use, the calls for which there was no room, and the
number of these words. Linux: in its task_struct."""


class RetStack(ShadowStack):
    """Entries of any size on a stack of words.

    Every task gets its array as soon as there is a hook, or with its first call if it is younger. Linux: with
    its birth. Mirrors: kernel/trace/fgraph.c:alloc_retstack_tasklist, ftrace_push_return_trace (v6.1); the
    layout is v6.10's.
    """

    name = "fgraph"
    header = 0

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._entry_words: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        """Task to its array."""
        self.used_at, self.overruns_at = (
            SHADOW_STACK_SIZE + words.word_size * number for number in (_USED, _OVERRUNS)
        )
        """From an array's begin to its counts; bytes."""

    def give_current(self) -> bool:
        """The running task has none yet; false if there is no memory for one."""
        try:
            self.give_stacks([self.tasks.current()])
        except KernelError:
            return False
        return True

    def add_hook(self, nodes: int, data_size: int) -> int:  # noqa: ARG002 - the stacks have room or not
        word = self.words.word_size
        hook = self._add_control(0)
        self._entry_words[hook] = TRAILER + -(-data_size // word)
        return hook

    def _release(self, hook: int) -> None:
        del self._entry_words[hook]
        self._free_control(hook)
        if not self.hooks:
            for task in list(self._stacks):
                self._free_stack(task)

    def give_stacks(self, tasks: Iterable[int]) -> None:
        """Allocate for tasks that have none yet. Raises: KernelError ENOMEM."""
        for task in tasks:
            if not self._array(task):
                self._allocate(task)

    def _allocate(self, task: int) -> None:
        # What the guest has done may have been taken back, its task's own words among it.
        stack = self._stacks.get(task)
        if stack is None:
            size = SHADOW_STACK_SIZE + _COUNTS * self.words.word_size
            stack = self._stacks[task] = self.words.alloc(size)
        self.words[stack + self.used_at] = 0
        self.tasks.of(task)[RET_STACK] = stack

    def _free_stack(self, task: int) -> None:
        self.tasks.of(task)[RET_STACK] = 0
        self.words.free(self._stacks.pop(task))

    def _array(self, task: int) -> int:
        """Its address; 0 for a task that has none."""
        return int(self.tasks.of(task)[RET_STACK])

    def try_get(self, hook: int, task: int) -> int:
        """Room on the task's stack, which is its own: nobody else takes it meanwhile."""
        if not self._array(task):
            try:
                self._allocate(task)
            except KernelError:
                return 0
        array = self._array(task)
        word = self.words.word_size
        size = self._entry_words[hook]
        used = self.words[array + self.used_at]
        if (used + size) * word > SHADOW_STACK_SIZE:
            self.words[array + self.overruns_at] += 1
            return 0
        note_taken(self.counters[hook])
        node = array + used * word
        self._fill(node, size, hook)
        return node

    def _fill(self, node: int, size: int, hook: int) -> None:
        """Its data are zeroed: the words may have been another call's."""
        words = self.words
        word = self.words.word_size
        for at in range(node, node + size * word, word):
            words[at] = 0
        end = node + size * word
        words[end - (TRAILER - HOOK) * word] = hook
        words[end - (TRAILER - SIZE) * word] = size

    def put_back(self, hook: int, node: int) -> None:  # noqa: ARG002 - nothing lies above it
        self._less(hook)

    def _less(self, hook: int) -> None:
        self.counters[hook][ACTIVE] -= 1
        self._release_if_unused(hook)

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:
        words = self.words
        word = self.words.word_size
        array = self._array(task)
        end = node + self._entry_words[hook] * word
        words[end - (TRAILER - RET_ADDR) * word] = ret_addr
        words[end - (TRAILER - FRAME) * word] = frame
        words[array + self.used_at] = (end - array) // word

    def pending(self, task: int) -> Iterator[Pending]:
        words = self.words
        word = self.words.word_size
        array = self._array(task)
        end = array + words[array + self.used_at] * word if array else 0
        while end > array:
            hook, ret_addr, frame, size = (words[end - number * word] for number in range(TRAILER, 0, -1))
            end -= size * word
            yield Pending(end, hook, ret_addr, frame)

    def pop(self, task: int, count: int) -> None:
        array = self._array(task)
        for call in list(islice(self.pending(task), count)):
            self.words[array + self.used_at] = (call.node - array) // self.words.word_size
            self._less(call.hook)

    def flush(self, task: int) -> list[int]:
        """Mirrors: kernel/trace/fgraph.c:ftrace_graph_exit_task (v6.1), with what was pending."""
        hooks = super().flush(task)
        if task in self._stacks:
            self._free_stack(task)
        return hooks

    def is_given(self, task: int) -> bool:
        """Whether it has its array; only tasks have one."""
        return task in self._stacks

    def overruns(self, task: int) -> int:
        """Its calls that its array had no room for. Mirrors: struct task_struct, trace_overrun (v6.1)."""
        return self.words[self._stacks[task] + self.overruns_at] if task in self._stacks else 0

    def clear_overruns(self) -> None:
        """Count every task's from 0 again."""
        for stack in self._stacks.values():
            self.words[stack + self.overruns_at] = 0

    def memory_of(self, hook: int) -> int:  # noqa: ARG002 - every hook is a guest of the tasks' arrays
        return 0

    @property
    def shared_memory(self) -> int:
        return len(self._stacks) * SHADOW_STACK_SIZE


class UnifiedStack(RetStack):
    """The function graph's hook for everybody: a kretprobe is a thin layer on it.

    So there are return hooks only where a function can be traced, and none behind a breakpoint.
    """

    name = "unified"
    needs_fentry = True


class RetStackCode(StackCode[RetStack]):
    """Mirrors: kernel/trace/fgraph.c:ftrace_push_return_trace, ftrace_pop_return_trace (v6.1)."""

    data_word = 0

    def find(self, builder: ProgramBuilder, none: Label) -> None:
        word = self.word
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, self.offsets.ret_stack),
            unless(NODE, none),
            self.load(SECOND, NODE, self.stack.used_at),
            unless(SECOND, none),
            compute(Arithmetic.SHL, SECOND, self.shift),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(FIRST, NODE, (HOOK - TRAILER) * word),
            self.load(SECOND, NODE, (FRAME - TRAILER) * word),
        )

    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:
        word = self.word
        again = builder.label()
        size = TRAILER + data
        used_at = self.stack.used_at
        overruns_at = self.stack.overruns_at
        with builder.out_of_line() as young:
            builder.call_host(self.stack.give_current, missed)
            builder.emit(Jump(again))
        with builder.out_of_line() as full:
            builder.emit(
                self.load(FIRST, NODE, overruns_at),
                compute(Arithmetic.ADD, FIRST, 1),
                self.store(NODE, overruns_at, FIRST),
                Jump(missed),
            )
        builder.place(again)
        builder.emit(
            self.current_task(TASK),
            self.load(NODE, TASK, self.offsets.ret_stack),
            unless(NODE, young),
            self.load(FIRST, NODE, used_at),
            BranchImmediate(Condition.ABOVE, FIRST, SHADOW_STACK_SIZE // word - size, full),
            # First the room is taken: an interrupt hooks calls behind it.
            Move(SECOND, FIRST),
            compute(Arithmetic.ADD, SECOND, size),
            self.store(NODE, used_at, SECOND),
            compute(Arithmetic.SHL, FIRST, self.shift),
            Compute(Arithmetic.ADD, NODE, FIRST),
            set_to(SECOND, hook),
            self.store(NODE, (data + HOOK) * word, SECOND),
            self.store(NODE, (data + RET_ADDR) * word, RET),
            self.store(NODE, (data + FRAME) * word, SLOT),
            StoreImmediate(NODE, (data + SIZE) * word, size, word),
        )
        count_one_more(builder, hook, word)

    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        word = self.word
        used_at = self.stack.used_at
        builder.emit(
            self.current_task(TASK),
            self.load(TASK, TASK, self.offsets.ret_stack),
            self.load(FIRST, TASK, used_at),
            compute(Arithmetic.ADD, FIRST, -TRAILER - data),
            Move(NODE, TASK),
            Move(SECOND, FIRST),
            compute(Arithmetic.SHL, SECOND, self.shift),
            Compute(Arithmetic.ADD, NODE, SECOND),
            self.load(RET, NODE, (data + RET_ADDR) * word),
        )
        self._give_back(builder, data)
        builder.emit(self.store(TASK, used_at, FIRST))
        count_one_less(builder, hook, word)

    def put_back(self, builder: ProgramBuilder, hook: int, data: int) -> None:
        """The newest call, which is the hook's, isn't awaited after all."""
        used_at = self.stack.used_at
        builder.emit(
            self.current_task(TASK),
            self.load(TASK, TASK, self.offsets.ret_stack),
            self.load(FIRST, TASK, used_at),
            compute(Arithmetic.ADD, FIRST, -TRAILER - data),
            self.store(TASK, used_at, FIRST),
        )
        count_one_less(builder, hook, self.word)

    def older(
        self, builder: ProgramBuilder, hook: int, call: int, spare: tuple[int, int, int], none: Label
    ) -> None:
        """`call`, a node of the running task, becomes the hook's next older one; `none` if there is none.

        `spare` are registers to overwrite.
        """
        word = self.word
        again = builder.label()
        (bottom, first, second) = spare
        builder.emit(self.current_task(bottom), self.load(bottom, bottom, self.offsets.ret_stack))
        builder.place(again)
        builder.emit(
            Branch(Condition.EQ, call, bottom, none),
            self.load(first, call, (SIZE - TRAILER) * word),
            self.load(second, call, (HOOK - TRAILER) * word),
            compute(Arithmetic.SHL, first, self.shift),
            Compute(Arithmetic.SUB, call, first),
            set_to(first, hook),
            Branch(Condition.NE, second, first, again),
        )

    def load_overruns(self, dst: int) -> tuple[Op, ...]:
        """dst = the running task's RetStack.overruns()."""
        return (
            self.current_task(dst),
            self.load(dst, dst, self.offsets.ret_stack),
            self.load(dst, dst, self.stack.overruns_at),
        )
