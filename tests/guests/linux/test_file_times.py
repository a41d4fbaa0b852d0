"""Times of files in scratch/ follow the host's clock, while the guest's clocks advance only with the guest's
work.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from time import sleep, time_ns

import pytest

from emulated_kernel.guests.common.wall_time import GRANULARITY_NS
from emulated_kernel.guests.linux.guest.file_times import FileTimes
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.kernel_offsets import TIMEKEEPER, timekeeper_offset
from emulated_kernel.guests.linux.pc.devices import TSC_KHZ
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.image.linux import made

SHELL = Client(4001, 0, 0)
CLOCK_GETTIME = 228
REALTIME, MONOTONIC, RAW, BOOTTIME = 0, 1, 4, 7


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    found = debian_kernel.mount()
    yield found
    found.close()


def test_each_change_has_a_time_of_its_own(mount: Mount) -> None:
    """Files that are created one after the other have distinct, increasing times close to the
    host's clock.
    """
    seen = []
    for number in range(200):
        path = f"/scratch/{number}"
        before = time_ns()
        mount.release(mount.create(SHELL, path, 0o644, os.O_WRONLY))
        made = mount.getattr(path)
        assert made.atime_ns == made.mtime_ns == made.ctime_ns
        assert before - GRANULARITY_NS < made.mtime_ns <= mount.getattr("/scratch").mtime_ns <= time_ns()
        seen.append(made.mtime_ns)
        if not number % 50:
            sleep(0.005)
    assert seen == sorted(set(seen))


def test_what_was_there_at_the_boot_is_of_then(mount: Mount) -> None:
    """Files that exist since the boot have times of the last hour, even if the snapshot is older."""
    for path in ("/dev", "/dev/null", "/scratch"):
        found = mount.getattr(path)
        for time in (found.atime_ns, found.mtime_ns, found.ctime_ns):
            assert 0 <= time_ns() - time < 3600 * 10**9


def test_what_is_written_or_read_later_is_newer(mount: Mount) -> None:
    shell = Files(mount, SHELL)
    mount.release(mount.create(SHELL, "/scratch/source", 0o644, os.O_WRONLY))
    made = mount.getattr("/scratch/source")
    shell.write("/scratch/source", "changed")
    written = mount.getattr("/scratch/source")
    assert made.mtime_ns < written.mtime_ns == written.ctime_ns
    assert shell.read("/scratch/source") == "changed"
    assert written.mtime_ns < mount.getattr("/scratch/source").atime_ns
    mount.chmod(SHELL, "/scratch/source", 0o600)
    changed = mount.getattr("/scratch/source")
    assert (changed.mtime_ns, changed.ctime_ns > written.ctime_ns) == (written.mtime_ns, True)


def test_times_that_are_set_are_the_files(mount: Mount) -> None:
    path = "/scratch/dated"
    mount.release(mount.create(SHELL, path, 0o644, os.O_WRONLY))
    for atime, mtime in ((0, 1), (1_700_000_000_123_456_789, 1_704_110_400_000_000_000), (-5, 7)):
        before = time_ns()
        mount.utimens(SHELL, path, atime, mtime)
        found = mount.getattr(path)
        assert (found.atime_ns, found.mtime_ns) == (atime, mtime)
        assert before - GRANULARITY_NS < found.ctime_ns <= time_ns()
        mount.utimens(SHELL, path, None, 99)
        assert (mount.getattr(path).atime_ns, mount.getattr(path).mtime_ns) == (atime, 99)


def test_a_kernel_with_another_clock_keeps_its_own_time() -> None:
    """The host does not set the time of a kernel whose clock source is not the TSC.

    After a change back to the TSC, changes of files have new times again.
    """
    guest, kernel = debian_kernel.with_kernel()
    calls, words = LinuxSyscalls(guest), guest.machine.memory.words
    FileTimes(guest.machine, guest.facts)
    offset = guest.facts.offsets
    timekeeper = guest.facts.symbols[TIMEKEEPER] + offset[TIMEKEEPER]

    def place(name: str) -> int:
        return guest.machine.memory.translate(guest.root, timekeeper + offset[f"timekeeper.{name}"]) >> 3

    def changed() -> list[int]:
        """Let time pass and change a file.

        Return the kernel's time, and the cycles that this time belongs to.
        """
        guest.machine.pc.pass_time(1000)
        calls.close(guest.init, calls.open(guest.init, "/scratch/a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        return [words[place(name)] for name in ("xtime_sec", "tkr_mono.xtime_nsec", "tkr_mono.cycle_last")]

    clock, tsc = place("tkr_mono.clock"), words[place("tkr_mono.clock")]
    jiffies = kernel.kallsyms.lookup_name("clocksource_jiffies")
    assert jiffies is not None
    before = changed()
    words[clock] = jiffies
    assert changed() == before
    assert FileTimes(guest.machine, guest.facts).shown(5) == 5
    words[clock] = tsc
    assert changed() > before
    words[clock] = 0x1234
    assert FileTimes(guest.machine, guest.facts).shown(5) == 5
    guest.machine.close()


def clocks(of_files: bool) -> tuple[list[int], set[int]]:
    """Change files for more than a second of guest time. Return all readings of the guest's clocks, and the
    files' times.

    `of_files`: let FileTimes set the times of files.
    """
    guest = debian_kernel.tasks()
    calls, init, shown, given = LinuxSyscalls(guest), guest.init, list[int](), set[int]()
    if of_files:
        FileTimes(guest.machine, guest.facts)

    def said(clock: int) -> int:
        guest.call(init, CLOCK_GETTIME, clock, BUFFER)
        seconds, nanoseconds = struct.unpack("<qq", guest.copy_from_user(init, BUFFER, 16))
        assert 0 <= nanoseconds < 10**9
        return int(seconds * 10**9 + nanoseconds)

    for number in range(1100):
        guest.machine.pc.pass_time(TSC_KHZ)
        calls.close(init, calls.open(init, f"/scratch/{number % 7}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        found = guest.files.lstat(f"/scratch/{number % 7}")
        assert found is not None
        given.add(found.mtime_ns)
        shown += map(said, (REALTIME, MONOTONIC, RAW, BOOTTIME))
        if of_files:
            assert 0 <= shown[-4] - found.mtime_ns < 100_000
    guest.machine.close()
    assert shown[-4] - shown[0] > 10**9
    return shown, given


def test_no_other_clock_of_the_guest_sees_it() -> None:
    """All clocks of the guest show the same nanoseconds whether FileTimes sets the times of files or not."""
    (without, of_ticks), (shown, given) = clocks(False), clocks(True)
    assert shown == without
    assert len(of_ticks) < len(given) == 1100


@pytest.mark.parametrize(("size", "offset"), [(4, 8), (16, 16)])
def test_what_precedes_the_timekeeper(size: int, offset: int) -> None:
    """Before Linux 6.13, the timekeeper's offset follows from the size of the sequence count before it.

    In a real-time kernel, the sequence count includes the address of a lock.
    """
    types = made.Btf()
    types.structure("seqcount_raw_spinlock", size)
    assert timekeeper_offset(Btf(types.data())) == offset
