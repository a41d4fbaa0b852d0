"""Complete register states to start single instructions from: pointers, small numbers, noise, bad stacks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.guest_calls import map_stack
from emulated_kernel.machine.machine import Machine
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from tests.snapshot import DataSnapshot, data_snapshot, image_data

MAX_REPETITIONS = 1 << 10
ARENA_SIZE = 4 * PAGE_SIZE
TF = 0x100
ARITHMETIC_FLAGS = 0x8D5
"""Mask of the flags CF, PF, AF, ZF, SF and OF."""
FIXED_FLAG = 2
INTERRUPT_FLAG = 0x200
DIRECTION_FLAG = 0x400
NON_CANONICAL = 0x8000_1234_5678_9ABC
UNMAPPED = 0x5000
_CELL = 0x3B000000
"""Offset from the CPU's base of memory that nothing else uses on either architecture."""

_SPECIAL = ("sp", "ip", "flags")
_SMALL = (
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    32,
    63,
    64,
    255,
    4095,
    4096,
    -1,
    -2,
    1 << 31,
    (1 << 32) - 1,
    1 << 63,
)


@dataclass(frozen=True)
class Arena:
    """Mapped memory between unmapped pages, to which pointers of the generated states point."""

    base: int
    general: tuple[str, ...]
    """Names of the general registers except the stack pointer."""
    word_size: int
    data: tuple[int, ...]
    """Addresses of the kernel's writable data."""
    read_only: int
    text: int

    @property
    def mask(self) -> int:
        """Return a register value of all ones."""
        return (1 << 8 * self.word_size) - 1

    @property
    def end(self) -> int:
        return self.base + ARENA_SIZE

    def pointer(self, rng: Random) -> int:
        """Return an address in mapped memory, sometimes near a border of the memory or in memory that cannot
        be written.
        """
        choice = rng.random()
        if choice < 0.7:
            return self.base + 0x800 + rng.randrange(0, ARENA_SIZE - 0x1000, 8)
        if choice < 0.8:
            return rng.choice(self.data)
        if choice < 0.9:
            return rng.choice((self.base, self.end)) + rng.randrange(-16, 16)
        return rng.choice((self.read_only, self.text, UNMAPPED, NON_CANONICAL))

    def stack(self, rng: Random) -> int:
        """Return a stack pointer, which usually points to mapped memory."""
        if rng.random() < 0.85:
            return self.base + 0x1000 + rng.randrange(0, ARENA_SIZE - 0x2000, 8)
        near = rng.choice((self.base, self.end)) + rng.randrange(-12, 12)
        return rng.choice((near, near, UNMAPPED, NON_CANONICAL, self.read_only, self.text, 4))


def build_arena(machine: Machine, rng: Random, *, text: bool = True) -> Arena:
    """Map the arena and fill it with numbers and pointers.

    Without `text` no pointer leads to text, where a probe's breakpoint can be read (as on Linux).
    """
    if machine.model.bits == 32:
        _unmap_unused(machine)
    base = map_stack(machine.memory, machine.model, 7, ARENA_SIZE) - ARENA_SIZE
    segments = sorted(machine.image.segments)
    names = ("init_task", "jiffies", "init_stack", "super_blocks", "runqueue", "__log_buf")
    lookup = machine.image.kallsyms.lookup_name
    writable = [va + size // 2 for va, size in image_data(machine)]
    arena = Arena(
        base,
        tuple(name for name in machine.model.registers if name not in _SPECIAL),
        machine.model.word_size,
        (*writable, *[at for at in map(lookup, names) if at is not None]),
        read_only=segments[1][0] + 0x100,
        text=segments[0 if text else 1][0] + 0x100,
    )
    words = [_word(arena, rng) & arena.mask for _ in range(ARENA_SIZE // arena.word_size)]
    machine.memory.write(base, b"".join(word.to_bytes(arena.word_size, "little") for word in words))
    return arena


def writable_memory(machine: Machine, arena: Arena) -> DataSnapshot:
    """Return a snapshot of all memory that the guest can write, of the arena, and of the host's call stack.

    Memory that only the host uses is left out.
    """
    host = machine.memory.host_pages.base
    ranges = [r for r in machine.memory.ranges if r.prot & Prot.WRITE and r.pa < host]
    spans = [
        span for r in ranges for span in _outside(r.start, r.pa, min(r.end - r.start, host - r.pa), machine)
    ]
    stack = machine.memory.find(machine.calls.stack_top)
    assert stack is not None
    spans.append((stack.start, stack.end - stack.start))
    return data_snapshot(machine, [*spans, (arena.base, ARENA_SIZE)])


def image_and_arena(machine: Machine, arena: Arena) -> DataSnapshot:
    """Return a snapshot of the memory that the generated pointers point to.

    This snapshot is faster to compare than one of all memory. In 32 bits, random numbers can point to any
    memory, and so the snapshot is of all memory.
    """
    if machine.model.bits == 32:
        return writable_memory(machine, arena)
    return data_snapshot(machine, [*image_data(machine), (arena.base, ARENA_SIZE)])


def _unmap_unused(machine: Machine) -> None:
    """Unmap the RAM below the image, the pages of the host, and the pages of records.

    In 32 bits, random numbers would point to this memory.
    """
    memory, layout = machine.memory, machine.model.layout
    low = layout.direct_map
    image = min(va for va, *_ in machine.image.segments)
    host = low + memory.host_pages.base
    memory.unmap(low, image - low)
    memory.unmap(host, low + memory.ram_size - host)
    memory.unmap(*_reserved(machine))
    memory.unmap(layout.record_pages, layout.record_pages_size)


def _reserved(machine: Machine) -> tuple[int, int]:
    """Return the address and the size of the per-CPU memory that is reserved for handlers."""
    abi = machine.image.abi
    return abi["percpu.base"] + abi["percpu.reserved"], abi["percpu.reserved_size"]


def counter_cell(machine: Machine) -> tuple[int, int]:
    """Return the address of 8 bytes to which no state points, and their offset from the CPU's base."""
    address = machine.per_cpu_bases[0] + _CELL
    memory = machine.memory
    memory.map(address, memory.host_pages.alloc(PAGE_SIZE), PAGE_SIZE, Prot.READ | Prot.WRITE)
    memory.write(address, bytes(8))
    return address, _CELL


def _outside(start: int, pa: int, size: int, machine: Machine) -> list[tuple[int, int]]:
    """Return (va, size) of each part of a range outside of the handlers' cells."""
    va, reserved_size = _reserved(machine)
    found = machine.memory.find(va)
    if found is None:
        return [(start, size)]
    first = va - found.start + found.pa - pa
    last = first + reserved_size
    pieces = [(start, min(first, size)), (start + max(last, 0), size - max(last, 0))]
    return [piece for piece in pieces if piece[1] > 0] if first < size and last > 0 else [(start, size)]


def _word(arena: Arena, rng: Random) -> int:
    choice = rng.random()
    if choice < 0.4:
        return arena.pointer(rng)
    if choice < 0.6:
        return arena.text + rng.randrange(0x8000)
    return rng.choice(_SMALL) if choice < 0.8 else rng.getrandbits(64)


def generate(arena: Arena, rng: Random, ip: int, *, repeats: bool = False) -> RegisterSet:
    """Return a random state before the instruction at `ip`.

    If the instruction `repeats`, the counter register has a small number.
    """
    pointers = rng.choice((0.9, 0.5, 0.1))

    def value() -> int:
        if rng.random() < pointers:
            return arena.pointer(rng) & arena.mask
        return (rng.choice(_SMALL) if rng.random() < 0.6 else rng.getrandbits(64)) & arena.mask

    flags = rng.getrandbits(12) & ARITHMETIC_FLAGS | FIXED_FLAG
    flags |= rng.choice((0, INTERRUPT_FLAG)) | (DIRECTION_FLAG if rng.random() < 0.1 else 0)
    general = {name: value() for name in arena.general}
    if repeats:
        general["cx"] &= MAX_REPETITIONS - 1
    return RegisterSet(**general, sp=arena.stack(rng) & arena.mask, ip=ip, flags=flags)
