"""Parts of a trace line: flags, delays, task names, symbols."""

from __future__ import annotations

import errno

import pytest

from emulated_kernel.trace.output.line_formatter import find_mark, latency_flags
from emulated_kernel.trace.ring.trace_clock import ns_to_usecs
from emulated_kernel.trace.ring.trace_entry import AddressStyle
from emulated_kernel.trace.text.cmdlines import DEFAULT_SIZE, SavedCmdlines
from emulated_kernel.util.errors import KernelError

from .conftest import Symbols


@pytest.mark.parametrize(
    ("flags", "preempt", "text"),
    [
        (0x00, 0x00, "....."),
        (0x48, 0xFF, "..Zff"),
        (0x01, 0x01, "d..1."),
        (0x81, 0x10, "D...1"),
        (0x80, 0x00, "b...."),
        (0x82, 0x00, "b...."),
        (0x02, 0x00, "X...."),
        (0x04, 0x00, ".n..."),
        (0x20, 0x00, ".p..."),
        (0x24, 0x00, ".N..."),
        (0x08, 0x00, "..h.."),
        (0x10, 0x00, "..s.."),
        (0x18, 0x00, "..H.."),
        (0x40, 0x00, "..z.."),
        (0x58, 0x0A, "..Za."),
    ],
)
def test_latency_flags(flags: int, preempt: int, text: str) -> None:
    assert latency_flags(flags, preempt) == text


@pytest.mark.parametrize(
    ("usecs", "mark"),
    [
        (0, " "),
        (10, " "),
        (11, "+"),
        (101, "!"),
        (1001, "#"),
        (10_001, "*"),
        (100_001, "@"),
        (1_000_001, "$"),
    ],
)
def test_delay_mark(usecs: int, mark: str) -> None:
    assert find_mark(1000 * usecs) == mark


@pytest.mark.parametrize(("ns", "usecs"), [(0, 0), (499, 0), (500, 1), (1499, 1), (7_192_839_531, 7_192_840)])
def test_times_are_rounded(ns: int, usecs: int) -> None:
    assert ns_to_usecs(ns) == usecs


def test_task_names() -> None:
    cmdlines = SavedCmdlines()
    cmdlines.save(117, "python3")
    cmdlines.save(0, "swapper/0")
    assert [cmdlines.find(pid) for pid in (117, 118, 0, -1)] == ["python3", "<...>", "<idle>", "<XXX>"]
    cmdlines.save(117, "bash")
    assert cmdlines.records() == ["117 bash\n"]


def test_the_oldest_task_name_makes_room() -> None:
    cmdlines = SavedCmdlines(2)
    for pid in (1, 2, 3):
        cmdlines.save(pid, f"task{pid}")
    assert [cmdlines.find(pid) for pid in (1, 2, 3)] == ["<...>", "task2", "task3"]


def test_pids_that_share_an_entry() -> None:
    cmdlines = SavedCmdlines()
    cmdlines.save(5, "old")
    cmdlines.save(5 + 0x8000, "new")
    assert (cmdlines.find(5), cmdlines.find(5 + 0x8000)) == ("<...>", "new")


def test_saved_cmdlines_size() -> None:
    cmdlines = SavedCmdlines()
    cmdlines.save(1, "init")
    assert cmdlines.size == DEFAULT_SIZE
    # The size is the number of names that fit into 2**n pages.
    for size, got in ((1, 6552), (6552, 6552), (6553, 19659), (0x8000, 45874)):
        cmdlines.resize(size)
        assert (cmdlines.size, cmdlines.records()) == (got, [])
    for size in (0, 0x8001):
        with pytest.raises(KernelError) as caught:
            cmdlines.resize(size)
        assert caught.value.errno == errno.EINVAL


def test_saved_tgids() -> None:
    cmdlines = SavedCmdlines()
    cmdlines.save_tgid(12, 10)
    cmdlines.save_tgid(0, 5)
    assert cmdlines.tgid_records() == ["12 10\n"]
    assert cmdlines.find_tgid(13) == 0


START = Symbols.ranges[0][0]
MODULE = Symbols.ranges[1][0]


@pytest.mark.parametrize(
    ("address", "plain", "with_offset"),
    [
        (0, "0", "0"),
        (START + 9, "vfs_mkdir", "vfs_mkdir+0x9/0x140"),
        (MODULE, "ktgt_add", "ktgt_add+0x0/0x10 [ktgt]"),
        (Symbols.trampoline, "[unknown/kretprobe'd]", "[unknown/kretprobe'd]"),
        (0x1234, "0x00001234", "0x1234"),
    ],
)
def test_places(address: int, plain: str, with_offset: str) -> None:
    assert AddressStyle(Symbols()).place(address) == plain
    assert AddressStyle(Symbols(), sym_offset=True).place(address) == with_offset


def test_sym_addr_shows_places_as_numbers_too() -> None:
    assert AddressStyle(Symbols(), sym_addr=True).place(START) == "vfs_mkdir <ffffffff8135d4f0>"
