"""Objpool as in Linux 6.7: each CPU has a ring of free nodes. If that is empty, the CPU uses other rings."""

from __future__ import annotations

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    CompareExchange,
    Compute,
    Condition,
    Jump,
    Label,
    Move,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.rethook_list import RethookListCode, RethookListStack
from emulated_kernel.kprobes.return_hook.shadow_stack import ACTIVE, POOL, ShadowStack, count, count_instance
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    SECOND,
    TASK,
    compute,
    count_one_less,
    count_one_more,
    set_to,
)

HEAD = 0
"""Index of the word in a CPU's ring that counts the nodes taken from the ring."""
TAIL = 1
"""Index of the word in a CPU's ring that counts the nodes put into the ring."""
ENTRIES = 2
"""Index of the word in a CPU's ring at which the ring's entries begin."""


class ObjpoolStack(RethookListStack):
    """Shadow stack whose pool of free nodes is divided into rings, one for each CPU.

    A CPU takes nodes from its own ring, and from the other CPUs' rings only if its own is empty.

    Each ring has space for all nodes, so putting back never fails.
    Mirrors: lib/objpool.c (v6.7).
    """

    name = "objpool"

    def __init__(self, words: GuestHeap, tasks: TaskFields, cpus: int) -> None:
        super().__init__(words, tasks, cpus)
        self._counter = (1 << 8 * words.word_size) - 1
        self._rings: dict[int, tuple[int, int]] = {}
        """Address of a hook -> address of its array of ring addresses, and address of its first ring."""

    def _fill_pool(self, hook: int, nodes: range) -> None:
        words = self.words
        word = self.words.word_size
        slots = words.alloc(self.cpus * word)
        words[hook + POOL * word] = slots
        self._rings[hook] = slots, 0
        stride = self.stride(hook)
        rings = words.alloc(self.cpus * stride)
        self._rings[hook] = slots, rings
        for cpu in range(self.cpus):
            words[slots + cpu * word] = rings + cpu * stride
        for number, node in enumerate(nodes):
            self._put(hook, self.ring(hook, number % self.cpus), node)

    def slots(self, hook: int) -> int:
        """Return the address of the hook's array of ring addresses, which is indexed by CPU.

        Mirrors: include/linux/objpool.h:struct objpool_head, cpu_slots (v6.7).
        """
        return self._rings[hook][0]

    def ring(self, hook: int, cpu: int) -> int:
        """Return the address of the ring of `hook` for `cpu`; the rings of a hook are contiguous."""
        return self._rings[hook][1] + cpu * self.stride(hook)

    def stride(self, hook: int) -> int:
        """Return the size in bytes of one of the hook's rings."""
        return (ENTRIES + self.capacity(hook)) * self.words.word_size

    def capacity(self, hook: int) -> int:
        """Return the number of entries in one of the hook's rings."""
        return ring_capacity(self.hooks[hook])

    def _entry(self, hook: int, ring: int, counter: int) -> int:
        return ring + (ENTRIES + (counter & self.capacity(hook) - 1)) * self.words.word_size

    def _put(self, hook: int, ring: int, node: int) -> None:
        words = self.words
        word = self.words.word_size
        tail = words[ring + TAIL * word]
        words[self._entry(hook, ring, tail)] = node
        words[ring + TAIL * word] = tail + 1 & self._counter

    def _count_free(self, hook: int) -> int:
        words = self.words
        word = self.words.word_size
        rings = [self.ring(hook, cpu) for cpu in range(self.cpus)]
        return sum(words[ring + TAIL * word] - words[ring + HEAD * word] & self._counter for ring in rings)

    # The maximum needs a counter, because the nodes are used in turn.
    high_water = ShadowStack.high_water

    def _get(self, hook: int, task: int) -> int:
        node = super()._get(hook, task)
        if node:
            count_instance(self.counters[hook])
        return node

    def _put_back(self, hook: int, node: int) -> None:
        count(self.counters[hook], ACTIVE, -1)
        self._put(hook, self.ring(hook, self.tasks.cpu), node)

    def _take(self, hook: int) -> int:
        words = self.words
        word = self.words.word_size
        first = self.tasks.cpu
        for number in range(self.cpus):
            ring = self.ring(hook, (first + number) % self.cpus)
            head = words[ring + HEAD * word]
            if head != words[ring + TAIL * word]:
                words[ring + HEAD * word] = head + 1 & self._counter
                return self._known_node(hook, words[self._entry(hook, ring, head)])
        return 0

    def _release(self, hook: int) -> None:
        for piece in self._rings.pop(hook, ()):
            if piece:
                self.words.free(piece)
        super()._release(hook)

    def memory_of(self, hook: int) -> int:
        """Return the size in bytes of a hook's nodes and ring entries, without the rings' heads."""
        entries = self.cpus * self.capacity(hook) * self.words.word_size
        return super().memory_of(hook) + entries


def ring_capacity(nodes: int) -> int:
    """Return the number of entries of a ring for `nodes` nodes: the smallest power of two above `nodes`."""
    return 1 << nodes.bit_length()


class ObjpoolCode(RethookListCode[ObjpoolStack]):
    """Emits code for objpools. Mirrors: lib/objpool.c:objpool_try_get_slot, objpool_try_add_slot (v6.7).

    Nodes are put back only into the CPU's own ring. No interrupt may come while a node is put back.
    Linux: interrupts are turned off. Deviates: they stay on, but are never delivered in compiled code
    (HitHandling.may_interrupt).
    """

    def _take(self, builder: ProgramBuilder, hook: int, missed: Label) -> None:
        again = builder.label()
        word = self.word
        self._own_ring(builder, hook, SECOND, FIRST)
        with builder.out_of_line() as empty:
            self._next_ring(builder, hook, missed, again)
        builder.place(again)
        builder.emit(
            self.load(FIRST, SECOND, HEAD * word),
            self.load(TASK, SECOND, TAIL * word),
            Branch(Condition.EQ, FIRST, TASK, empty),
            Move(NODE, FIRST),
        )
        self._entry(builder, hook, NODE)
        builder.emit(
            self.load(NODE, NODE, ENTRIES * word),
            Move(TASK, FIRST),
            compute(Arithmetic.ADD, TASK, 1),
            CompareExchange(SECOND, HEAD * word, FIRST, TASK, again),
        )
        count_one_more(builder, hook, word)

    def _put(self, builder: ProgramBuilder, hook: int) -> None:
        word = self.word
        self._own_ring(builder, hook, SECOND, FIRST)
        builder.emit(self.load(FIRST, SECOND, TAIL * word), Move(TASK, FIRST))
        self._entry(builder, hook, TASK)
        builder.emit(
            self.store(TASK, ENTRIES * word, NODE),
            compute(Arithmetic.ADD, FIRST, 1),
            self.store(SECOND, TAIL * word, FIRST),
        )
        count_one_less(builder, hook, word)

    def _entry(self, builder: ProgramBuilder, hook: int, counter: int) -> None:
        """Emit code that turns a count into the base address for a load or store of its entry in the ring.

        `hook`: address of the hook that owns the ring. `counter`: number of the virtual register with the
        count (the ring's word HEAD or TAIL); it also gets the result. The entry is ENTRIES words after the
        result.

        Before the code runs, register SECOND has the address of the ring.
        """
        builder.emit(
            compute(Arithmetic.AND, counter, self.stack.capacity(hook) - 1),
            compute(Arithmetic.SHL, counter, self.shift),
            Compute(Arithmetic.ADD, counter, SECOND),
        )

    def _own_ring(self, builder: ProgramBuilder, hook: int, ring: int, other: int) -> None:
        """Emit code that sets `ring` to the address of the current CPU's ring, and overwrites `other`.

        `ring`, `other`: numbers of virtual registers. `hook`: address of the hook that owns the rings.
        """
        rings = self.stack
        if rings.cpus == 1:
            builder.emit(set_to(ring, rings.ring(hook, 0)))
            return
        builder.emit(
            *self.offsets.cpu.load_number(ring),
            compute(Arithmetic.SHL, ring, self.shift),
            set_to(other, rings.slots(hook)),
            Compute(Arithmetic.ADD, ring, other),
            self.load(ring, ring, 0),
        )

    def _next_ring(self, builder: ProgramBuilder, hook: int, missed: Label, found: Label) -> None:
        """Emit code that advances SECOND from one CPU's ring to the next CPU's ring.

        The code then goes to `missed` if that is the current CPU's ring, otherwise to `found`.
        """
        rings = self.stack
        stride = self.stack.stride(hook)
        if rings.cpus == 1:
            builder.emit(Jump(missed))
            return
        first = rings.ring(hook, 0)
        other = builder.label()
        builder.emit(
            compute(Arithmetic.ADD, SECOND, stride),
            set_to(FIRST, first + rings.cpus * stride),
            Branch(Condition.NE, SECOND, FIRST, other),
            set_to(SECOND, first),
        )
        builder.place(other)
        self._own_ring(builder, hook, FIRST, TASK)
        builder.emit(Branch(Condition.EQ, SECOND, FIRST, missed), Jump(found))
