"""The devices of the PC, driven as Linux drives them."""

from __future__ import annotations

from itertools import pairwise

from emulated_kernel.guests.linux.pc.devices import PIT_HZ, TSC_KHZ, Pc


def initialised() -> Pc:
    """Return a PC whose interrupts begin at vector 0x30, and whose timer interrupt is unmasked."""
    pc = Pc(1)
    for port, value in ((0x20, 0x11), (0x21, 0x30), (0x21, 4), (0x21, 1), (0x21, 0xFE)):
        pc.write_port(port, value)
    return pc


def program(pc: Pc, command: int, count: int) -> None:
    for port, value in ((0x43, command), (0x40, count & 0xFF), (0x40, count >> 8)):
        pc.write_port(port, value)


def test_time_goes_on_by_the_seed() -> None:
    first, same, other = Pc(1), Pc(1), Pc(2)
    times = [first.read_tsc() for _ in range(50)]
    assert times == sorted(set(times)) == [same.read_tsc() for _ in range(50)]
    assert times != [other.read_tsc() for _ in range(50)]
    assert len({later - sooner for sooner, later in pairwise(times)}) > 10


def test_the_timer_interrupts_once_or_again_and_again() -> None:
    pc = initialised()
    assert pc.read_port(0x21, 1) == 0xFE
    assert pc.timer_vector is None
    start = pc.tsc
    program(pc, 0x38, 1000)
    assert (pc.timer_vector, pc.is_due) == (0x30, False)
    pc.timer_fires()
    assert pc.tsc - start == 1000 * TSC_KHZ * 1000 // PIT_HZ
    assert pc.timer_vector is None
    program(pc, 0x34, 1000)
    dues = []
    for _ in range(3):
        pc.timer_fires()
        dues.append(pc.due)
    assert dues[2] - dues[1] == dues[1] - dues[0] == pc.period  # type: ignore[operator]
    pc.tsc = pc.due or 0
    assert pc.is_due
    pc.write_port(0x21, 0xFF)
    assert not pc.is_due


def test_calibration_by_a_channel_that_does_not_count_fails_at_once() -> None:
    """Channel 2 of the PIT never reads as 0xff, although 0xff was written.

    Otherwise pit_expect_msb() would read the channel many times before the calibration of the TSC fails.
    """
    pc = initialised()
    for port, value in ((0x43, 0xB0), (0x42, 0xFF), (0x42, 0xFF)):
        pc.write_port(port, value)
    low, high = pc.read_port(0x42, 1), pc.read_port(0x42, 1)
    assert high != 0xFF
    assert low != 0xFF


def test_state_comes_back() -> None:
    pc = initialised()
    program(pc, 0x34, 5000)
    pc.write_port(0x3F9, 5)
    other = Pc(0)
    other.restore(pc.state())
    assert other.state() == pc.state()
    assert [other.read_tsc() for _ in range(5)] == [pc.read_tsc() for _ in range(5)]
    assert other.read_port(0x3F9, 1) == 5


def test_the_console_keeps_its_end_and_nobody_else_answers() -> None:
    pc = Pc(1)
    for number in range(70_000):
        pc.write_port(0x3F8, number & 0xFF)
    assert len(pc.console) == 1 << 16
    assert pc.console[-1] == 69_999 & 0xFF
    assert pc.read_port(0x3FD, 1) == 0x60
    for port, size in ((0x64, 1), (0xCF8, 4), (0x1F0, 2)):
        assert pc.read_port(port, size) == (1 << 8 * size) - 1
