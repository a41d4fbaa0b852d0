"""LinuxClock: the time of the guest's sched_clock(), which the kernel log and trace records show."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from ctypes import addressof, c_uint64
from functools import partial
from struct import Struct

from emulated_kernel.guests.linux.guest_abi import X86_64
from emulated_kernel.guests.linux.pc.board import Board
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.memory.guest_memory import GuestMemory

STEP_NS = 40
"""Nanoseconds by which each reading by guest code advances the time, if instructions are not counted."""
_MEMBERS = ("cyc2ns_mul", "cyc2ns_shift", "cyc2ns_offset")
_EPOCH = "epoch_ns", "epoch_cyc", "sched_clock_mask"
_FACTORS = "mult", "shift"
_MASK = (1 << 64) - 1
_MILLION = 10**6
_LONGEST_SHIFT = 63
_SCALE = Struct("<IIQ")


class LinuxClock(GuestClock):
    """Converts cycles to nanoseconds with the guest kernel's own factors.

    Compiled handlers in the guest read the time from a word in memory, and advance the word at each reading.
    """

    def __init__(self, pc: Board, memory: GuestMemory, cell: int) -> None:
        """Create a clock that follows the time counter of `pc`.

        `cell`: address of the word with the time, a u64 in host-owned guest memory.
        """
        super().__init__()
        self.cell = cell
        self._now = memory.view(cell, 8).cast("Q")
        self.host_address = addressof(c_uint64.from_buffer(self._now))
        self._shown = 0
        self._part = 0
        """Remainder, in millionths of a cycle, of go_on()'s last conversion of nanoseconds to cycles.

        go_on() converts the nanoseconds that guest code has added to `_now`.
        """
        self._pc = pc
        self.is_virtual = not pc.is_real
        self.show(pc.tsc)
        pc.follower = self

    @property
    def step_ns(self) -> int:
        """Nanoseconds by which a reading by guest code advances the time; 0 if instructions do so."""
        return 0 if self._pc.counts_instructions else STEP_NS

    @abstractmethod
    def _ns(self, cycles: int) -> int:
        """Return the time in nanoseconds at which the counter of cycles is `cycles`."""

    @abstractmethod
    def _cycles(self, nanoseconds: int) -> int | None:
        """Return the counter's value at the time `nanoseconds`; None if the kernel's factors are invalid."""

    def go_on(self, tsc: int, cycles: int) -> int:
        """Return the counter's new value: `tsc`, plus `cycles`, plus the time that guest code has used.

        Guest code has added this time, in nanoseconds, to the word that it reads. If `cycles` is not 0, write
        the new time to the word. If it is 0, leave the word unchanged: a conversion to cycles and back could
        round the time up. Then a measured duration would depend on when it began.
        """
        now = self._now[0]
        nanoseconds = now - self._shown
        if nanoseconds:
            passed, self._part = divmod(nanoseconds * self._pc.khz + self._part, _MILLION)
            tsc += passed
            self._shown = now
        if cycles:
            tsc += cycles
            self.show(tsc)
        return tsc

    def show(self, cycles: int) -> None:
        """Write the time for the TSC value `cycles` to the word that guest code reads.

        The word never decreases, although rounding could give a smaller value.
        """
        cell = self._now
        shown = self._ns(cycles)
        # A call of max() would cost as much as the rest of this method.
        if shown > cell[0]:  # noqa: PLR1730
            cell[0] = shown
        self._shown = cell[0]

    def pass_to(self, nanoseconds: int) -> None:
        """Set the counter so that the guest's time is at least `nanoseconds`.

        Change nothing if the guest's time is later already, or if the kernel's conversion factors are
        invalid. For the time of a memory dump, the counter may need any value, even a lower one: the dump's
        TSC may be unstable or belong to another machine.
        """
        if _signed(self._ns(self._pc.tsc)) >= nanoseconds:
            return
        cycles = self._cycles(nanoseconds)
        if cycles is None:
            return
        self._shown = 0
        self._now[0] = 0
        self._pc.tsc = min(cycles, _MASK)

    def now_ns(self) -> int:
        return self._now[0]

    def read_ns(self) -> int:
        if not self._is_held:
            self._pc.read_tsc()
        return self.now_ns()


class Cyc2nsClock(LinuxClock):
    """The clock of x86 kernels.

    Mirrors: arch/x86/kernel/tsc.c:cycles_2_ns (v6.1).
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel lacks the symbols or types of this clock).
    """

    def __init__(self, pc: Board, kernel: LinuxKernel, memory: GuestMemory, per_cpu: int, cell: int) -> None:
        """Create the clock, with views of the words by which the kernel converts TSC cycles to nanoseconds.

        `per_cpu`: address of the per-CPU area. `cell`: address of the word with the time, a u64 in host-owned
        guest memory.
        """
        start = kernel.required_per_cpu("cyc2ns")
        offset = kernel.btf.offset
        at = [offset(f"cyc2ns_data.{name}") for name in _MEMBERS]
        if at != [0, 4, 8]:
            raise unusable("its clock has an unknown layout")
        scales = memory.view(per_cpu + start + offset("cyc2ns.data"), 2 * _SCALE.size)
        self._scaled: Callable[[int], tuple[int, int, int]] = partial(_SCALE.unpack_from, scales)
        """Function: position in bytes of a set of factors in cyc2ns.data -> the set.

        A set is (cyc2ns_mul, cyc2ns_shift, cyc2ns_offset). There are two sets. The kernel uses one set while
        it writes the other.
        """
        self._version = memory.view(per_cpu + start + offset("cyc2ns.seq"), 4).cast("I")
        super().__init__(pc, memory, cell)

    def _ns(self, cycles: int) -> int:
        factor, shift, offset = self._scaled(self._version[0] % 2 * _SCALE.size)
        return offset + (cycles * factor >> shift) & _MASK

    def _cycles(self, nanoseconds: int) -> int | None:
        factor, shift, offset = self._scaled(self._version[0] % 2 * _SCALE.size)
        if not factor or shift > _LONGEST_SHIFT:
            return None
        return -(-(nanoseconds - _signed(offset) << shift) // factor)


class GenericClock(LinuxClock):
    """The clock of kernels with generic sched_clock(), such as those for RISC-V.

    Mirrors: kernel/time/sched_clock.c:sched_clock (v6.12).
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel lacks the symbols or types of this clock).
    """

    def __init__(self, pc: Board, kernel: LinuxKernel, memory: GuestMemory, cell: int) -> None:
        """Create the clock, with views of the words by which the kernel converts cycles to nanoseconds.

        `cell`: address of the word with the time, a u64 in host-owned guest memory.
        """
        start = kernel.required("cd")
        offset = kernel.btf.offset
        size = kernel.btf.size("clock_read_data")
        words = [offset(f"clock_read_data.{name}") // 8 for name in _EPOCH]
        factors = [offset(f"clock_read_data.{name}") // 4 for name in _FACTORS]
        first = start + offset("clock_data.read_data")
        sets = [memory.view(first + size * number, size) for number in range(2)]
        self._sets = [(view.cast("Q"), view.cast("I")) for view in sets]
        self._epoch_ns, self._epoch, self._limit = words
        self._factor, self._shift = factors
        self._version = memory.view(start + offset("clock_data.seq"), 4).cast("I")
        super().__init__(pc, memory, cell)

    def _ns(self, cycles: int) -> int:
        words, halves = self._sets[self._version[0] % 2]
        passed = cycles - words[self._epoch] & words[self._limit]
        return words[self._epoch_ns] + (passed * halves[self._factor] >> (halves[self._shift] & 63)) & _MASK

    def _cycles(self, nanoseconds: int) -> int | None:
        words, halves = self._sets[self._version[0] % 2]
        factor = halves[self._factor]
        if not factor:
            return None
        passed = nanoseconds - words[self._epoch_ns] << (halves[self._shift] & 63)
        return words[self._epoch] + -(-passed // factor)


def linux_clock(pc: Board, kernel: LinuxKernel, memory: GuestMemory, per_cpu: int, cell: int) -> LinuxClock:
    """Return the clock of a kernel. `per_cpu`: address of the per-CPU area. `cell`: see LinuxClock.

    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel lacks the symbols or types of its clock).
    """
    if kernel.architecture == X86_64.name:
        return Cyc2nsClock(pc, kernel, memory, per_cpu, cell)
    return GenericClock(pc, kernel, memory, cell)


def _signed(value: int) -> int:
    """Convert a u64 to the s64 with the same bits."""
    return value - (value >> 63 << 64)
