"""Copies that the host executes for the guest's kernel: they end as the guest's own copies do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel import Kernel, Kprobe, MachineConfig
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.native import host_code
from emulated_kernel.util.abi import PAGE_SIZE

pytestmark = pytest.mark.skipif(
    host_code.routine_address("copy") is None, reason="there is no routine for this kind of host"
)
SIZE = 8 * PAGE_SIZE
DATA = bytes(at * 7 % 251 for at in range(SIZE))


@pytest.fixture(scope="module", params=["x86_64", "i386"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def room(kernel: Kernel) -> int:
    """Return the address of mapped user memory, which an unmapped page follows."""
    with kernel.lock:
        machine = kernel.machine
        start = machine.user_buffers.alloc(2 * SIZE)
        machine.memory.unmap(start + 2 * SIZE - PAGE_SIZE, PAGE_SIZE)
        return start


def outcome(kernel: Kernel, to: int, source: int, size: int, room: int) -> tuple[int, bytes]:
    """Call copy_user_generic; return its result, and the memory at `room` afterwards.

    `to`, `source`, `size`: arguments of copy_user_generic.
    """
    machine = kernel.machine
    machine.memory.write(room, DATA + bytes(SIZE - PAGE_SIZE))
    with kernel.lock:
        left = machine.call(kernel.kallsyms_lookup_name("copy_user_generic"), to, source, size)
    return left, machine.memory.read(room, 2 * SIZE - PAGE_SIZE)


def by_guest(machine: Machine, value: int) -> None:
    for words in machine.host_copies.all:
        words.copies_itself = value


COPIES = {
    "nothing": (SIZE, 0, 0),
    "a byte": (SIZE, 0, 1),
    "words": (SIZE, 0, 64),
    "unaligned": (SIZE + 3, 1, 4093),
    "several pages": (SIZE, 8, 3 * PAGE_SIZE + 5),
    "up to the end of the memory": (2 * SIZE - PAGE_SIZE - 64, 0, 64),
    "beyond the end of the memory": (2 * SIZE - PAGE_SIZE - 70, 0, 256),
    "from beyond the end": (0, 2 * SIZE - PAGE_SIZE - 70, 256),
    "from memory that is not mapped": (0, 2 * SIZE - PAGE_SIZE, 64),
    "to memory that is not mapped": (2 * SIZE - PAGE_SIZE, 0, 64),
    "onto itself": (0, 0, 64),
    "overlapping, forward by one byte": (1, 0, 256),
    "overlapping, forward by a word": (8, 0, 256),
    "overlapping, backward": (0, 5, 256),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_the_host_copies_as_the_guest_does(kernel: Kernel, room: int, copy: tuple[int, int, int]) -> None:
    to, source, size = copy
    machine = kernel.machine
    found = outcome(kernel, room + to, room + source, size, room)
    by_guest(machine, 1)
    before = machine.host_copies.count
    try:
        assert outcome(kernel, room + to, room + source, size, room) == found
    finally:
        by_guest(machine, 0)
    assert machine.host_copies.count == before


def test_text_is_no_destination(kernel: Kernel, room: int) -> None:
    """A copy to text faults and changes nothing, because text is mapped read-only."""
    text = kernel.kallsyms_lookup_name("vfs_read")
    before = kernel.machine.memory.read(text, 64)
    assert outcome(kernel, text, room, 64, room)[0] == 64
    assert kernel.machine.memory.read(text, 64) == before


def test_a_large_copy_is_the_hosts(kernel: Kernel, room: int) -> None:
    before = kernel.machine.host_copies.count
    assert outcome(kernel, room + SIZE, room, 4096, room)[0] == 0
    assert kernel.machine.host_copies.count == before + 1


def test_a_probed_copy_is_the_guests(kernel: Kernel, room: int) -> None:
    """The guest itself makes a copy whose instruction is probed.

    The handler sees the registers before the first word.
    """
    machine = kernel.machine
    seen: list[tuple[int, int, int]] = []
    [words] = machine.host_copies.all
    start = kernel.kallsyms_lookup_name("copy_user_generic")
    offset = machine.memory.read(start, 32).index(machine.model.repeated_copy)
    probe = Kprobe(
        symbol_name="copy_user_generic",
        offset=offset,
        pre_handler=lambda _probe, regs: seen.append((regs.di, regs.si, regs.cx)),
    )
    before = machine.host_copies.count
    kernel.register_kprobe(probe)
    try:
        assert outcome(kernel, room + SIZE, room, 256, room) == (0, found := outcome_of(256))
    finally:
        kernel.unregister_kprobe(probe)
    assert seen == [(room + SIZE, room, 256 // machine.model.word_size)]
    assert machine.host_copies.count == before
    assert outcome(kernel, room + SIZE, room, 256, room) == (0, found)
    assert machine.host_copies.count == before + 1
    assert words.copies == machine.host_copies.count


def outcome_of(size: int) -> bytes:
    return DATA + DATA[:size] + bytes(SIZE - PAGE_SIZE - size)


def test_counted_instructions_are_the_guests(room: int, kernel: Kernel) -> None:
    """If instructions are counted, the guest itself makes all copies.

    This test is the last one of the module, because the host does not take over again.
    """
    machine = kernel.machine
    counted = machine.count_instructions()
    before = machine.host_copies.count
    assert outcome(kernel, room + SIZE, room, 4096, room)[0] == 0
    assert machine.host_copies.count == before
    assert counted.value > 4096 // machine.model.word_size
