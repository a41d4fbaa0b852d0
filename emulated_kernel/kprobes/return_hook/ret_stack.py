"""RetStack: the function graph's shadow stack, one array of words per task, which all hooks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from emulated_kernel.kprobes.return_hook.shadow_stack import (
    ACTIVE,
    DAMAGED,
    Pending,
    ShadowStack,
    count,
    count_instance,
)
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
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

SHADOW_STACK_SIZE = PAGE_SIZE
"""Size in bytes of a task's array of entries, without the counts after it."""
HOOK = 0
"""Index of the word with the address of the hook, among the words after an entry's data."""
RET_ADDR = 1
"""Index of the word with the real return address, among the words after an entry's data."""
FRAME = 2
"""Index of the word with the stack address of the return address, among the words after an entry's data."""
SIZE = 3
"""Index of the word with the number of words of an entry, among the words after the entry's data."""
TRAILER = 4
"""Number of words in an entry after its data."""
_USED = 0
"""Index of the word with the number of words in use, among the words after a task's array.

Linux has this number in task_struct.
"""
_OVERRUNS = 1
"""Index of the word with the number of overruns, among the words after a task's array.

An overrun is a call for which the array had no space. Linux has this number in task_struct.
"""
_COUNTS = 2
"""Number of words after a task's array of entries: _USED and _OVERRUNS."""


class RetStack(ShadowStack):
    """For each task, an array of words that is a stack of entries of any size.

    All tasks get their arrays at the first hook; a later task gets its array at its first hooked call.
    In Linux, a task gets its array at fork.
    Mirrors: kernel/trace/fgraph.c:alloc_retstack_tasklist, ftrace_push_return_trace (v6.1); the layout is
    that of v6.10.
    """

    name = "fgraph"
    header = 0
    field = RET_STACK

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._entry_words: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        """Address of a task -> address of its array."""
        self.used_at = SHADOW_STACK_SIZE + words.word_size * _USED
        """Offset in bytes from the start of an array to its count of words in use."""
        self.overruns_at = SHADOW_STACK_SIZE + words.word_size * _OVERRUNS
        """Offset in bytes from the start of an array to its count of overruns."""

    def give_current(self) -> bool:
        """Allocate an array for the running task; return False if there is no memory."""
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
        """Allocate arrays for the tasks that have none. Raises: KernelError ENOMEM."""
        for task in tasks:
            with self.damage.left_out("task list"):
                if not self._array(task):
                    self._allocate(task)

    def _allocate(self, task: int) -> None:
        # If a rollback of guest memory has cleared the task's field, the array exists already.
        stack = self._stacks.get(task)
        if stack is None:
            size = SHADOW_STACK_SIZE + _COUNTS * self.words.word_size
            stack = self.words.alloc(size)
            self._stacks[task] = stack
        self.words[stack + self.used_at] = 0
        self._head(task)[0] = stack

    def _free_stack(self, task: int) -> None:
        self._head(task)[0] = 0
        self.words.free(self._stacks.pop(task))

    def _array(self, task: int) -> int:
        """Return the address of a task's array, or 0 if the task has no array.

        Raises: MemoryFault (the guest has changed the address).
        """
        array = int(self._head(task)[0])
        if array and array != self._stacks.get(task):
            raise MemoryFault(array, "no shadow stack of the task")
        return array

    def _get(self, hook: int, task: int) -> int:
        """Reserve a node on the task's stack; return its address, or 0 if there is no space or memory.

        If the task's array has no space, count an overrun. Other calls of the task may be hooked before the
        node is pushed. They get the space above the node, and return before the push.
        """
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
            self._count_overrun(array)
            return 0
        count_instance(self.counters[hook])
        node = array + used * word
        self._fill(node, size, hook)
        self._set_end(array, node + size * word)
        return node

    def _set_end(self, array: int, end: int) -> None:
        """Set an array's count of words in use, so that the array's newest entry ends at `end`.

        `array`: address of the array. `end`: address after the entry.
        """
        self.words[array + self.used_at] = (end - array) // self.words.word_size

    def _count_overrun(self, array: int) -> None:
        at = array + self.overruns_at
        self.words[at] = self.words[at] + 1 & (1 << 8 * self.words.word_size) - 1

    def _fill(self, node: int, size: int, hook: int) -> None:
        """Write an entry's `hook` and its `size` in words; clear its other words.

        An earlier call may have used these words.
        """
        words = self.words
        word = self.words.word_size
        for at in range(node, node + size * word, word):
            words[at] = 0
        end = node + size * word
        words[end - (TRAILER - HOOK) * word] = hook
        words[end - (TRAILER - SIZE) * word] = size

    def put_back(self, hook: int, task: int, node: int) -> None:
        with self.damage.left_out(DAMAGED):
            self._set_end(self._array(task), node)
        super().put_back(hook, task, node)

    def _put_back(self, hook: int, node: int) -> None:  # noqa: ARG002 - the space is free already
        count(self.counters[hook], ACTIVE, -1)

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:
        words = self.words
        word = self.words.word_size
        array = self._array(task)
        end = node + self._entry_words[hook] * word
        words[end - (TRAILER - RET_ADDR) * word] = ret_addr
        words[end - (TRAILER - FRAME) * word] = frame
        self._set_end(array, end)

    def _calls(self, task: int) -> Iterator[Pending]:
        words = self.words
        word = self.words.word_size
        array = self._array(task)
        used = words[array + self.used_at] if array else 0
        while used:
            # Each entry is within the array and below the previous one.
            if not TRAILER <= used <= SHADOW_STACK_SIZE // word:
                raise MemoryFault(array, f"{used} words in use")
            end = array + used * word
            hook, ret_addr, frame, size = (words[end - number * word] for number in range(TRAILER, 0, -1))
            if not TRAILER <= size <= used:
                raise MemoryFault(end, f"an entry of {size} words")
            used -= size
            # An entry without both addresses is reserved; its call is not hooked yet.
            if ret_addr or frame:
                yield Pending(array + used * word, hook, ret_addr, frame)

    def _remove(self, task: int, call: Pending) -> None:
        """Do nothing: put_back() takes the entry from the stack, where it is the task's newest entry."""

    def _clear(self, task: int) -> None:
        array = self._array(task)
        if array:
            self.words[array + self.used_at] = 0

    def flush(self, task: int) -> list[int]:
        """Remove the calls of an ended task, and free its array; return the address of each call's hook.

        Mirrors: kernel/trace/fgraph.c:ftrace_graph_exit_task (v6.1).
        """
        hooks = super().flush(task)
        if task in self._stacks:
            self._free_stack(task)
        return hooks

    def has_array(self, task: int) -> bool:
        """Return True if the task has an array."""
        return task in self._stacks

    def overruns(self, task: int) -> int:
        """Return the number of a task's calls for which its array had no space.

        Mirrors: include/linux/sched.h:struct task_struct, trace_overrun (v6.1).
        """
        return self.words[self._stacks[task] + self.overruns_at] if task in self._stacks else 0

    def clear_overruns(self) -> None:
        """Reset the overrun counts of all tasks."""
        for stack in self._stacks.values():
            self.words[stack + self.overruns_at] = 0

    def memory_of(self, hook: int) -> int:  # noqa: ARG002 - every hook is a guest of the tasks' arrays
        return 0

    @property
    def shared_memory(self) -> int:
        return len(self._stacks) * SHADOW_STACK_SIZE


class UnifiedStack(RetStack):
    """The function graph's stack, as the shadow stack of all return hooks including those of kretprobes."""

    name = "unified"
    needs_fentry = True


class RetStackCode(StackCode[RetStack]):
    """Emits guest code that pushes hooked calls to the tasks' RetStack arrays, finds them, and pops them.

    Mirrors: kernel/trace/fgraph.c:ftrace_push_return_trace, ftrace_pop_return_trace (v6.1).
    """

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
            # Reserve the space first, because an interrupt pushes calls above it.
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
        """Emit code that pops the running task's newest call, because the call must not be hooked.

        `hook`: address of the hook for which enter() has pushed the call. `data`: number of words of the
        call's data. The call's return address in the guest must not have been replaced yet.
        """
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
        """Emit code that moves register `call` from one node of the running task to an older node of a hook.

        `hook`: address of the hook. `call`: number of the virtual register with the address of a node; the
        code sets it to the next older node of the hook. `spare`: numbers of three virtual registers that the
        code may overwrite. If the hook has no older node, the code goes to `none`.
        """
        word = self.word
        again = builder.label()
        bottom, first, second = spare
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
        """Return operations that set register `dst` to the number of overruns of the running task."""
        return (
            self.current_task(dst),
            self.load(dst, dst, self.offsets.ret_stack),
            self.load(dst, dst, self.stack.overruns_at),
        )
