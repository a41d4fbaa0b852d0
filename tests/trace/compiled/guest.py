"""A guest that runs compiled handlers, with mapped memory, a task and ring buffers. Python handles the same
hits for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.arch.program.ir import NR_VREGS, Program
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.arch.x86.arch import I386, X86_64
from emulated_kernel.trace.compiled.guest_addresses import SCRATCH_SIZE, GuestAddresses, NeedResched
from emulated_kernel.trace.compiled.handler import CompiledEvent, EventEmitter, Recording, compiled_event
from emulated_kernel.trace.compiled.next_page import NEXT_PAGE, NextPageEmitter
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.trace.ring import ring_layout
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import RecordTarget, RingMemory, memory_size
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY, RawEntry
from tests.arch.program_model import Interpreter, Unmapped
from tests.trace.events.kernel import FUNCTIONS, Function, no_string

_REQUEST, _SCRATCH, _CONTROLS = 0x400, 0x1000, 0x10000
"""Offsets of a request for room, the scratch memory and the control blocks in the CPU's area."""
CPU = 3
PID, COMM = 4242, b"a-task"
STEP = 57
_TOP = 16384 - 512
"""Offset in the stack of the stack pointer at a hit."""


@dataclass(frozen=True)
class Target:
    """An architecture, and the addresses of memory in its guest."""

    arch: Arch
    kernel: int
    """Address of two pages that arguments may point to; the pages before and after are not mapped."""
    stack: int
    edge: int
    """Address of the last page of user space."""
    clock: int
    pages: int
    per_cpu: int
    task: int
    user: int = 0x10000000

    @property
    def bits(self) -> int:
        return 8 * self.arch.word_size

    @property
    def functions(self) -> list[Function]:
        """Return FUNCTIONS, with each address cut to the size of the architecture's word."""
        return [replace(each, address=each.address & self.mask) for each in FUNCTIONS]

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1


TARGETS = {
    "x86_64": Target(
        X86_64(),
        kernel=0xFFFF888000010000,
        stack=0xFFFF888000020000,
        user=0x00007F0000000000,
        edge=0x7FFFFFFFE000,
        clock=0xFFFFFFFF82000000,
        pages=0xFFFFC98000000000,
        per_cpu=0xFFFFFFFF81100000,
        task=0xFFFF888000030000,
    ),
    "i386": Target(
        I386(),
        kernel=0xC0010000,
        stack=0xC0020000,
        edge=0xBFFFF000,
        clock=0xC1200000,
        pages=0xE0000000,
        per_cpu=0xC1100000,
        task=0xC0030000,
    ),
}


class Memory:
    """The mapped ranges of a guest's address space."""

    def __init__(self) -> None:
        self.stretches: dict[int, bytearray] = {}

    def map(self, address: int, size: int) -> bytearray:
        self.stretches[address] = bytearray(size)
        return self.stretches[address]

    def _find(self, address: int, size: int) -> tuple[bytearray, int] | None:
        for start, data in self.stretches.items():
            if start <= address and address + size <= start + len(data):
                return data, address - start
        return None

    def read(self, address: int, size: int) -> bytes | None:
        found = self._find(address, size)
        return None if found is None else bytes(found[0][found[1] : found[1] + size])

    def write(self, address: int, data: bytes) -> None:
        found = self._find(address, len(data))
        assert found is not None, f"a store to {address:#x}"
        found[0][found[1] : found[1] + len(data)] = data

    def word(self, address: int, value: int, size: int = 8) -> None:
        self.write(address, (value & (1 << 8 * size) - 1).to_bytes(size, "little"))


@dataclass
class Numbers:
    """Memory that is read and written as numbers, for the interpreter of handler programs."""

    memory: Memory

    def read(self, address: int, size: int) -> int:
        data = self.memory.read(address, size)
        if data is None:
            raise Unmapped(hex(address))
        return int.from_bytes(data, "little")

    def write(self, address: int, value: int, size: int) -> None:
        self.memory.word(address, value, size)


@dataclass
class Hit:
    """A ProbeHit that reads the guest's memory."""

    regs: Any
    memory: Memory
    comm: bytes = COMM
    return_address: int = 0

    def keep_origin(self, keep: bool) -> bool:
        return not keep

    def read(self, address: int, size: int) -> bytes | None:
        return self.memory.read(address, size)


@dataclass(eq=False)
class RingRecorder(Recorder):
    """A Recorder with two equal ring buffers: Python writes to the first, and guest code writes to the
    second.
    """

    guest: Guest
    number: int
    saves_comm: bool = True
    overwrite: bool = True
    order: int = 0
    compilable: bool = True
    saved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = memory_size(2, self.order)
        place = RingMemory(memoryview(bytearray(size)))
        self.host_ring = RingBuffer(place, 2, overwrite=self.overwrite, order=self.order)
        memory = self.guest.memory
        target = self.guest.target
        pages_at = target.pages + self.number * 0x100000
        control_at = _CONTROLS + self.number * ring_layout.CONTROL_SIZE
        pages = memoryview(memory.map(pages_at, size))
        control = memoryview(memory.map(target.per_cpu + control_at, ring_layout.CONTROL_SIZE))
        place = RingMemory(pages, pages_at, control, control_at)
        self.guest_ring = RingBuffer(place, 2, overwrite=self.overwrite, order=self.order)

    def triggers_ignore(self, _event: TraceEvent, _payload: bytes) -> bool:
        return False

    def target(self) -> RecordTarget | None:
        if not self.compilable:
            return None
        return RecordTarget(self.guest_ring.place.control_at, self.saves_comm, self._make_room, self.order)

    def _make_room(self) -> bool:
        self.guest.rooms += 1
        request = self.guest.memory.read(self.guest.target.per_cpu + self.guest.places.request, 16)
        assert request is not None
        time, length = (int.from_bytes(request[at : at + 8], "little") for at in (0, 8))
        return self.guest_ring.make_room(length, time)

    def event_switched(self, _event: TraceEvent, /, *, enabled: bool) -> None:
        """Do nothing: this recorder does not depend on which events are enabled."""

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit) -> RawEntry:
        return RawEntry(
            TRACE_ENTRY.pack(event.id, *self.guest.context, PID) + payload, CPU, hit.comm, no_string
        )

    def reserve(self) -> RingBuffer:
        return self.host_ring

    def record(
        self, event: TraceEvent, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None
    ) -> None:
        assert place in (None, self.host_ring)
        self.guest.now += STEP
        if self.host_ring.write(self.entry(event, payload, hit).data, self.guest.now):
            self.guest.host_saved += [PID] * self.saves_comm

    def event_removed(self, event: TraceEvent) -> None:
        """Do nothing when an event is removed."""

    def same(self) -> None:
        """Check that both ring buffers contain the same bytes."""
        assert list(self.guest_ring) == list(self.host_ring)
        assert self.guest_ring.stats() == self.host_ring.stats()
        rings = (self.guest_ring, self.host_ring)
        mine, its = (
            ring.place.pages[ring_layout.data_start(2, self.order, ring.place.address) :].tobytes()
            for ring in rings
        )
        for at in range(0, 3 * self.host_ring.page_size, self.host_ring.page_size):
            # A commit word is stale while the page is written.
            assert mine[at : at + 8] == its[at : at + 8]
        mine_read, its_read = (list(iter(ring.read_page, None)) for ring in (self.guest_ring, self.host_ring))
        assert mine_read == its_read


@dataclass(frozen=True)
class Layout:
    """Offsets of a kernel's need_resched flags, in the CPU's area and in the task.

    The preempt count is always at offset 0x7C of the CPU's area.
    """

    need_resched: int
    resched: NeedResched
    has_interrupt_mask: bool = False
    """Whether a bit masks interrupts, and a breakpoint is not an NMI, as in Linux on arm64."""


LAYOUTS = (
    Layout(0x78, NeedResched()),
    Layout(0x68, NeedResched()),
    Layout(0x68, NeedResched(), has_interrupt_mask=True),
    Layout(0x7C, NeedResched(1 << 31, (0x300, 1 << 3))),
)
"""Layouts: the mark is next to the preempt count, apart from it, or in the same word, as in Linux on x86."""


class Guest:
    """A guest with one CPU and one task."""

    def __init__(
        self,
        way: EntryKind = EntryKind.JUMP,
        arch: str = "x86_64",
        layout: Layout = LAYOUTS[0],
    ) -> None:
        self.way = way
        self.layout = layout
        self.target = target = TARGETS[arch]
        self.word = target.arch.word_size
        self.memory = memory = Memory()
        self.now = 1_000_000
        self.saves = 0
        self.rooms = 0
        """Number of times that guest code has asked the host for room in the ring buffer."""
        self.host_saved: list[int] = []
        memory.map(target.kernel, 8192)
        memory.map(target.stack, 16384)
        memory.map(target.user, 4096)
        memory.map(target.edge, 4096)
        memory.map(target.clock, 16)
        memory.map(target.per_cpu, _SCRATCH + SCRATCH_SIZE)
        memory.map(target.task, 4096)
        self.places = GuestAddresses(
            clock=target.clock,
            time=SimpleNamespace(step_ns=STEP),  # type: ignore[arg-type]
            interrupt_flag=("flags", 0x200),
            has_interrupt_mask=layout.has_interrupt_mask,
            this_cpu_off=0x18,
            cpu=CpuWords(self.word, current_task=0x10, cpu_number=0x20, preempt_count=0x7C),
            pid=0x100,
            comm=0x200,
            need_resched=layout.need_resched,
            resched=layout.resched,
            hardirq_mask=0xF0000,
            softirq_mask=0xFF00,
            last_pid=0x30,
            request=_REQUEST,
            scratch=_SCRATCH,
            breakpoint_context=None if layout.has_interrupt_mask else (0x48, 0xFF),
            save_comm=self._save_comm,
            new_counter=lambda: None,
        )
        memory.word(target.per_cpu + _REQUEST + NEXT_PAGE, 1)
        memory.word(target.clock, self.now)
        memory.word(target.clock + 8, STEP)
        memory.word(target.per_cpu + 0x18, target.per_cpu, self.word)
        memory.word(target.per_cpu + 0x20, CPU, 4)
        memory.word(target.per_cpu + 0x10, target.task, self.word)
        memory.word(target.task + 0x100, PID, 4)
        memory.write(target.task + 0x200, COMM)
        self.regs = SimpleNamespace(**dict.fromkeys(target.arch.registers.names, 0))
        self.regs.sp = target.stack + _TOP
        self.context = (0, 0)
        self.set_context(0, 0, interrupts=True)

    def _save_comm(self) -> bool:
        self.saves += 1
        self.memory.word(self.target.per_cpu + self.places.last_pid, PID, 4)
        return True

    def set_context(self, count: int, need_resched: int, *, interrupts: bool) -> None:
        """Set the CPU's preempt count and interrupt flag, and the flags that request rescheduling.

        Bit 0 of `need_resched` sets the flag in the CPU's area. Bit 1 sets the task's flag, if the kernel has
        one.
        """
        resched = self.layout.resched
        word = need_resched & 1
        if resched.task_flag is not None:
            at, bit = resched.task_flag
            self.memory.word(self.target.task + at, ~bit | (bit if need_resched & 2 else 0), 4)
            self.memory.word(self.target.per_cpu + 0x7C, count | (0 if word else resched.not_needed), 4)
        else:
            self.memory.word(self.target.per_cpu + 0x7C, count, 4)
            self.memory.word(self.target.per_cpu + self.layout.need_resched, word, 4)
        self.regs.flags = 0x202 if interrupts != self.layout.has_interrupt_mask else 0x2
        by_breakpoint = self.way is EntryKind.BREAKPOINT
        if by_breakpoint and self.places.breakpoint_context is not None:
            self.context = self.places.breakpoint_context
            return
        flags = (0 if interrupts and not by_breakpoint else 1) | (0x20 if word else 0)
        flags |= 4 if (word if resched.task_flag is None else need_resched & 2) else 0
        flags |= (
            (8 if count & 0xF0000 else 0) | (0x10 if count & 0x100 else 0) | (0x80 if count & 0xFE00 else 0)
        )
        self.context = (flags, count & 0xFF)

    def advance(self, ns: int) -> None:
        """Advance the clocks of host and guest."""
        self.now += ns
        self.memory.word(self.target.clock, self.now)

    def compile(self, event: KprobeTraceEvent) -> tuple[CompiledEvent, Program, ProgramBuilder] | None:
        compiled = compiled_event(event, event.is_return, event.probes[0].args, self.target.arch)
        if compiled is None:
            return None
        builder = ProgramBuilder()
        handle = event.probes[0].handle
        assert handle is not None
        EventEmitter(builder, compiled, self.way, handle.address, self.target.arch, self.places).emit()
        return compiled, builder.program(), builder

    def hit(self, event: KprobeTraceEvent, return_address: int = 0) -> None:
        """Handle one hit in Python and in guest code, and check that the clocks agree afterwards.

        `return_address`: address to which the probed function returns, for an event at returns; otherwise 0.
        """
        handle = event.probes[0].handle
        assert handle is not None
        self.regs.ip = return_address or handle.address + 1
        event.probes[0].hit(Hit(self.regs, self.memory, return_address=return_address))  # type: ignore[arg-type]
        made = self.compile(event)
        assert made is not None
        _, program, builder = made
        registers = {name: value & self.target.mask for name, value in vars(self.regs).items()}
        if self.way in (EntryKind.CALL, EntryKind.RETURN) and self.target.arch.registers.link is None:
            registers["sp"] -= self.word
        vregs = [0xDEAD0000 + number for number in range(NR_VREGS)]
        Interpreter(
            self.target.bits,
            registers,
            Numbers(self.memory),
            self.target.per_cpu,
            lambda number: builder.actions[number](),
            vregs,
            call=self._next_page,
        ).run(program)

    def _next_page(self, _address: int) -> None:
        """Simulate the call from a handler that makes guest code continue on the next page. The code has
        separate virtual registers.
        """
        builder = ProgramBuilder()
        NextPageEmitter(builder, self.word, self.places.request).emit()
        memory = Numbers(self.memory)
        Interpreter(8 * self.word, {}, memory, self.target.per_cpu, lambda _number: False).run(
            builder.program()
        )


def recordings(compiled: CompiledEvent) -> tuple[Recording, ...]:
    """Return the recordings of an event."""
    return compiled.recordings
