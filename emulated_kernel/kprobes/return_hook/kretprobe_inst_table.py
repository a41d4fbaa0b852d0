"""Kretprobe instances as before Linux 5.11: a free list for each probe, and a hash table of pending calls."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    CompareExchange,
    Compute,
    Condition,
    Jump,
    Label,
    Multiply,
    StoreImmediate,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.rethook_list import RethookListStack
from emulated_kernel.kprobes.return_hook.shadow_stack import DAMAGED, POOL, Pending
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    RET,
    SECOND,
    SLOT,
    TASK,
    StackCode,
    compute,
    set_to,
    unless,
)
from emulated_kernel.kprobes.table import GOLDEN_RATIO, KPROBE_HASH_BITS, hash_address
from emulated_kernel.machine.traps.trap import MemoryFault

NEXT = 0
"""Index of the word in struct kretprobe_instance that points to the next instance in its list."""
PPREV = 1
"""Index of the word in struct kretprobe_instance with the address of the pointer to this instance."""
RP = 2
"""Index of the word in struct kretprobe_instance with the address of the instance's hook.

In Linux, the member `rp` has the address of the struct kretprobe.
"""
RET_ADDR = 3
"""Index of the word in struct kretprobe_instance with the real return address."""
OWNER = 4
"""Index of the word in struct kretprobe_instance with the address of the task."""
FRAME = 5
"""Index of the word in struct kretprobe_instance with the address of the return address on the stack."""
HEADER = 6
"""Number of words in struct kretprobe_instance before the data."""
LOCK = 3
"""Index, among the words of a hook, of the lock of the hook's free list."""


class KretprobeInstTable(RethookListStack):
    """A hash table with the pending calls of all tasks. Tasks with the same hash share a list and its lock.

    Mirrors: kernel/kprobes.c:kretprobe_inst_table (v5.10).
    """

    name = "instances"
    before = 0
    header = HEADER
    hook_word = RP
    ret_addr_word = RET_ADDR
    is_kretprobes = True

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self.table = 0
        """Address of the array of list heads; 0 before the first hook."""
        self.locks = 0
        """Address of the array of locks, one for each list; 0 before the first hook."""

    def lock_words(self) -> list[int]:
        word = self.words.word_size
        table = range(self.locks, self.locks + (word << KPROBE_HASH_BITS), word) if self.locks else ()
        return [*(hook + LOCK * word for hook in self.hooks), *table]

    @property
    def shared_memory(self) -> int:
        """Size in bytes of the memory that all hooks share, without the locks; 0 before the first hook."""
        return self.words.size_of(self.table) if self.table else 0

    def close(self) -> None:
        if self.table:
            self.words.free(self.table)
            self.words.free(self.locks)

    def add_hook(self, nodes: int, data_size: int) -> int:
        if not self.table:
            size = self.words.word_size << KPROBE_HASH_BITS
            self.table = self.words.alloc(size)
            self.locks = self.words.alloc(size)
        return super().add_hook(nodes, data_size)

    def _bucket(self, task: int) -> int:
        word = self.words.word_size
        return self.table + hash_address(task, 8 * word) * word

    def _fill_pool(self, hook: int, nodes: range) -> None:
        for node in nodes:
            self._put_back(hook, node)

    def _count_free(self, hook: int) -> int:
        node = self.words[hook + POOL * self.words.word_size]
        count = 0
        # The list may be a circle.
        while node and count < self.hooks[hook]:
            node = self.words[node + NEXT * self.words.word_size]
            count = count + 1
        return count

    def _take(self, hook: int) -> int:
        node = self.words[hook + POOL * self.words.word_size]
        if node:
            self._unlink(self._known_node(hook, node))
        return node

    def _put_back(self, hook: int, node: int) -> None:
        self._link(hook + POOL * self.words.word_size, node)

    def _link(self, head: int, node: int) -> None:
        """Add a node at the head of a list; if the guest has damaged the list, drop its other nodes.

        Mirrors: include/linux/list.h:hlist_add_head.
        """
        words = self.words
        word = self.words.word_size
        first = words[head]
        if first:
            try:
                words[first + PPREV * word] = node
            except MemoryFault as fault:
                self.damage.report(DAMAGED, fault)
                first = 0
        words[node + NEXT * word] = first
        words[node + PPREV * word] = head
        words[head] = node

    def _unlink(self, node: int) -> None:
        """Remove a node from its list. Mirrors: include/linux/list.h:__hlist_del."""
        words = self.words
        word = self.words.word_size
        following = words[node + NEXT * word]
        before = words[node + PPREV * word]
        words[before] = following
        if following:
            words[following + PPREV * word] = before

    def push(self, hook: int, task: int, node: int, ret_addr: int, frame: int) -> None:  # noqa: ARG002
        words = self.words
        word = self.words.word_size
        words[node + RET_ADDR * word] = ret_addr
        words[node + OWNER * word] = task
        words[node + FRAME * word] = frame
        self._link(self._bucket(task), node)
        # Count the task's calls, so that the table is not searched when a task without calls ends.
        self._count_calls(task, 1)

    def _count_calls(self, task: int, change: int) -> None:
        calls = self._head(task)
        # The guest can set the count to any number.
        calls[0] = calls[0] + change & (1 << 8 * self.words.word_size) - 1

    def _calls(self, task: int) -> Iterator[Pending]:
        words = self.words
        word = self.words.word_size
        node = words[self._bucket(task)] if self.table else 0
        # The list may be a circle in which all calls are those of other tasks.
        for _ in range(sum(self.hooks.values())):
            if not node:
                return
            hook = words[node + RP * word]
            self._known_node(hook, node)
            following = words[node + NEXT * word]
            if words[node + OWNER * word] == task:
                yield Pending(node, hook, words[node + RET_ADDR * word], words[node + FRAME * word])
            node = following

    def _remove(self, task: int, call: Pending) -> None:
        self._count_calls(task, -1)
        self._unlink(call.node)

    def _clear(self, task: int) -> None:
        self._head(task)[0] = 0


class InstancesCode(StackCode[KretprobeInstTable]):
    """Emits guest code that uses a KretprobeInstTable.

    Locks are held for a few instructions, during which no interrupt comes on the CPU.

    Linux: interrupts are turned off. Deviates: they stay on, but are never delivered in compiled code
    (HitHandling.may_interrupt). A CPU that holds a lock is not preempted (Machine.preempt_if), because Python
    cannot wait for the lock.
    Mirrors: kernel/kprobes.c:pre_handler_kretprobe, recycle_rp_inst, kretprobe_table_lock (v5.10).
    """

    data_word = HEADER
    needs_field = False

    @property
    def _to_lock(self) -> int:
        """Offset in bytes from a list's head to its lock."""
        return self.stack.locks - self.stack.table

    def find(self, builder: ProgramBuilder, none: Label) -> None:
        word = self.word
        self._own_list(builder)
        self._lock(builder, SECOND, self._to_lock, FIRST, RET)
        with builder.out_of_line() as lost:
            builder.emit(StoreImmediate(SECOND, self._to_lock, 0, word), Jump(none))
        self._newest(builder, lost)
        builder.emit(
            StoreImmediate(SECOND, self._to_lock, 0, word),
            self.load(FIRST, NODE, RP * word),
            self.load(SECOND, NODE, FRAME * word),
        )

    def enter(self, builder: ProgramBuilder, hook: int, missed: Label, data: int = 0) -> None:  # noqa: ARG002
        word = self.word
        head = POOL * self.word
        builder.emit(set_to(SECOND, hook))
        self._lock(builder, SECOND, LOCK * word, FIRST, TASK)
        with builder.out_of_line() as none:
            builder.emit(StoreImmediate(SECOND, LOCK * word, 0, word), Jump(missed))
        builder.emit(self.load(NODE, SECOND, head), unless(NODE, none))
        self._unlink(builder, FIRST, TASK)
        builder.emit(
            StoreImmediate(SECOND, LOCK * word, 0, word),
            self.store(NODE, RET_ADDR * word, RET),
            self.store(NODE, FRAME * word, SLOT),
        )
        self._own_list(builder)
        builder.emit(self.store(NODE, OWNER * word, TASK))
        self._lock(builder, SECOND, self._to_lock, FIRST, TASK)
        self._link(builder, FIRST)
        builder.emit(StoreImmediate(SECOND, self._to_lock, 0, word))
        self._count(builder, 1)

    def leave(self, builder: ProgramBuilder, hook: int, data: int = 0) -> None:
        word = self.word
        never = builder.label()
        self._own_list(builder)
        self._lock(builder, SECOND, self._to_lock, FIRST, RET)
        self._newest(builder, never)
        builder.place(never)
        self._unlink(builder, FIRST, TASK)
        builder.emit(
            StoreImmediate(SECOND, self._to_lock, 0, word),
            self.load(RET, NODE, RET_ADDR * word),
        )
        self._give_back(builder, data)
        self._count(builder, -1)
        builder.emit(set_to(RET, hook))
        self._lock(builder, RET, LOCK * word, FIRST, TASK)
        builder.emit(set_to(SECOND, hook + POOL * word))
        self._link(builder, FIRST)
        builder.emit(StoreImmediate(RET, LOCK * word, 0, word))

    # Pieces

    def _own_list(self, builder: ProgramBuilder) -> None:
        """Emit code that sets TASK to the running task, and SECOND to the head of this task's list.

        Mirrors: hash_ptr.
        """
        word = self.word
        builder.emit(
            self.current_task(TASK),
            set_to(SECOND, GOLDEN_RATIO[8 * word]),
            Multiply(SECOND, TASK),
            compute(Arithmetic.SHR, SECOND, 8 * word - KPROBE_HASH_BITS),
            compute(Arithmetic.SHL, SECOND, word.bit_length() - 1),
            set_to(FIRST, self.stack.table),
            Compute(Arithmetic.ADD, SECOND, FIRST),
        )

    def _lock(self, builder: ProgramBuilder, base: int, offset: int, first: int, second: int) -> None:
        """Emit code that takes the lock at `offset` bytes from the address in register `base`.

        `base`, `first`, `second`: numbers of virtual registers. The code overwrites `first` and `second`.
        """
        again = builder.label()
        builder.place(again)
        builder.emit(set_to(first, 0), set_to(second, 1), CompareExchange(base, offset, first, second, again))

    def _newest(self, builder: ProgramBuilder, none: Label) -> None:
        """Emit code that sets NODE to the first instance of TASK in the list that begins at SECOND.

        If the list has no instance of TASK, the code goes to `none`.
        """
        again = builder.label()
        found = builder.label()
        builder.emit(self.load(NODE, SECOND, 0))
        builder.place(again)
        builder.emit(
            unless(NODE, none),
            self.load(FIRST, NODE, OWNER * self.word),
            Branch(Condition.EQ, FIRST, TASK, found),
            self.load(NODE, NODE, NEXT * self.word),
            Jump(again),
        )
        builder.place(found)

    def _unlink(self, builder: ProgramBuilder, following: int, before: int) -> None:
        """Emit code that removes NODE from its list. Mirrors: include/linux/list.h:__hlist_del.

        `following` and `before` are numbers of virtual registers that the code may overwrite.
        """
        word = self.word
        last = builder.label()
        builder.emit(
            self.load(following, NODE, NEXT * word),
            self.load(before, NODE, PPREV * word),
            self.store(before, 0, following),
            BranchImmediate(Condition.EQ, following, 0, last),
            self.store(following, PPREV * word, before),
        )
        builder.place(last)

    def _link(self, builder: ProgramBuilder, first: int) -> None:
        """Emit code that puts NODE first in the list whose head is at SECOND.

        `first`: number of a virtual register that the code may overwrite.
        Mirrors: include/linux/list.h:hlist_add_head.
        """
        word = self.word
        alone = builder.label()
        builder.emit(
            self.load(first, SECOND, 0),
            self.store(NODE, NEXT * word, first),
            self.store(NODE, PPREV * word, SECOND),
            self.store(SECOND, 0, NODE),
            BranchImmediate(Condition.EQ, first, 0, alone),
            self.store(first, PPREV * word, NODE),
        )
        builder.place(alone)

    def _count(self, builder: ProgramBuilder, number: int) -> None:
        """Emit code that adds `number` to the running task's count of pending calls, the field `rethooks`.

        If struct task_struct has no such field, emit nothing. Only kprobefs's own kernel reads the field.
        """
        rethooks = self.offsets.rethooks
        if not rethooks:
            return
        builder.emit(
            self.current_task(TASK),
            self.load(FIRST, TASK, rethooks),
            compute(Arithmetic.ADD, FIRST, number),
            self.store(TASK, rethooks, FIRST),
        )
