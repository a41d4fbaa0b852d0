"""Parts that only the i386 kernel has: 64-bit division, memory functions, 64-bit numbers in text,
segments.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError
from emulated_kernel.util.config import MachineConfig

LONG_LONG = st.one_of(
    st.integers(0, (1 << 64) - 1), st.sampled_from((1, 3, 10**9, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1))
)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine(MachineConfig(arch="i386"), load_image(arch="i386")) as machine:
        yield machine


def _address(machine: Machine, name: str) -> int:
    address = machine.image.kallsyms.lookup_name(name)
    assert address is not None
    return address


def _divide(machine: Machine, name: str, number: int, divisor: int) -> int:
    """Call a function for 64-bit division, and return its result.

    The divisor is on the stack, for lack of registers.
    """
    sp = machine.calls.stack_top
    machine.memory.write(sp + 4, struct.pack("<Q", divisor))
    low, high = number & 0xFFFFFFFF, number >> 32
    end = machine.execute(RegisterSet(ip=_address(machine, name), sp=sp, ax=low, dx=high))
    return end.dx << 32 | end.ax


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@given(number=LONG_LONG, divisor=LONG_LONG.filter(bool))
def test_division(machine: Machine, number: int, divisor: int) -> None:
    assert _divide(machine, "__udivdi3", number, divisor) == number // divisor
    assert _divide(machine, "__umoddi3", number, divisor) == number % divisor
    a, b = _signed(number), _signed(divisor)
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    assert _divide(machine, "__divdi3", number, divisor) == quotient % (1 << 64)
    assert _divide(machine, "__moddi3", number, divisor) == (a - quotient * b) % (1 << 64)


def test_division_by_zero_is_the_processors(machine: Machine) -> None:
    with pytest.raises(GuestFault, match="vector 0"):
        _divide(machine, "__udivdi3", 5, 0)


@given(st.data())
def test_memory_functions(machine: Machine, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 9))
    to = data.draw(st.integers(0, 40))
    size = data.draw(st.integers(0, 40))
    page = machine.alloc_pages(4096)
    before = bytes(range(100))
    for name, source in (("memmove", start), ("memcpy", 200 + start), ("memset", 0x5A)):
        machine.memory.write(page, before + bytes(100) + before)
        argument = source if name == "memset" else page + source
        assert machine.call(_address(machine, name), page + to, argument, size) == page + to
        expected = bytearray(before + bytes(100) + before)
        copied = bytes([0x5A]) * size if name == "memset" else bytes(expected[source : source + size])
        expected[to : to + size] = copied
        assert machine.memory.read(page, 300) == bytes(expected), name
    machine.free_pages(page)


def test_64_bit_numbers_in_text(machine: Machine) -> None:
    page = machine.alloc_pages(4096)
    machine.memory.write(page, b"%llu %lld %px\0")
    number = 12345678901234567890
    words = (number & 0xFFFFFFFF, number >> 32)
    sp = machine.calls.stack_top
    stack = struct.pack("<3I", page + 100, 100, page) + struct.pack("<QqI", number, -5, 0xC0FFEE)
    # More words than a call by the host passes: the frame is made by hand, deeper in the stack.
    machine.memory.write(sp - 64 + 4, stack)
    machine.execute(RegisterSet(ip=_address(machine, "snprintf"), sp=sp - 64))
    assert machine.memory.read_cstring(page + 100) == f"{number} -5 00c0ffee".encode()
    machine.memory.write(page, f"{number}\n\0".encode())
    assert machine.call(_address(machine, "kstrtoull"), page, 10, page + 200) == 0
    assert struct.unpack("<2I", machine.memory.read(page + 200, 8)) == words


def test_checksums(machine: Machine) -> None:
    data = random.Random(1).randbytes(777)
    page = machine.alloc_pages(4096)
    machine.memory.write(page, data)
    crc = machine.call(_address(machine, "crc32_le"), 0xFFFFFFFF, page, len(data))
    assert crc == zlib.crc32(data) ^ 0xFFFFFFFF
    assert machine.call(_address(machine, "test_sort"), 500, 1) == 0
    assert machine.call(_address(machine, "test_list_sort"), 500, 1) == 0


def test_segments(machine: Machine) -> None:
    regs = machine.regs
    assert (regs.cs, regs.ss, regs.ds, regs.es, regs.fs) == (0x60, 0x68, 0x7B, 0x7B, 0xD8)
    assert machine.cpus[0].per_cpu_base == machine.image.abi["percpu.base"]


def test_registers_are_cut_to_32_bits(machine: Machine) -> None:
    saved = machine.regs.snapshot()
    machine.regs.ax = -1
    machine.regs.cx = 1 << 40 | 7
    assert (machine.regs.ax, machine.regs.cx) == (0xFFFFFFFF, 7)
    assert not hasattr(machine.regs, "r8")
    assert machine.regs.snapshot().r8 == 0
    machine.regs.restore(saved)


def test_more_ram_than_the_direct_map_holds() -> None:
    with pytest.raises(HardwareError, match="at most"):
        Machine(MachineConfig(arch="i386", ram_size=1 << 30), load_image(arch="i386"))
