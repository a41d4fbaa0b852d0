"""Random operations on djprobes, compared with the rules of their paper.

Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from iced_x86 import Decoder, FlowControl, Instruction

from emulated_kernel.kprobes.optimizer.djprobe import Djprobes
from emulated_kernel.kprobes.profile import PROFILES, QuiesceMethod
from emulated_kernel.util.errors import KernelError
from tests.kprobes.modelled import MOSTLY, PLACES, SELDOM, Modelled, run
from tests.kprobes.scripted import script

REACH = 0x20
"""Size in bytes of the part of gcd in which probes are registered."""
JUMP_SIZE = 5
SLEEP = 1 << 28
"""Number of jiffies for which a kernel thread sleeps: longer than any test."""
RELATIVE = (FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH, FlowControl.CALL)


class Asked(NamedTuple):
    """A probe that is to be registered."""

    number: int
    has_length: bool
    wrong: int
    """Number of bytes by which the length is too large."""
    disabled: bool
    stepped: bool


ASKED = st.builds(Asked, PLACES, MOSTLY, st.sampled_from([0, 0, 0, 0, -1, 1]), SELDOM, SELDOM)


@cache
def regions(code: bytes) -> dict[int, int]:
    """Return offset -> length of each region of a function that a jump can replace. Source: section 3.2."""
    insns = list(Decoder(32, code))
    targets = {insn.near_branch_target for insn in insns if insn.flow_control in RELATIVE}
    found = {}
    for at, first in enumerate(insns):
        region = list(_region(insns[at:]))
        length = sum(insn.len for insn in region)
        entered = first.len < JUMP_SIZE and targets & set(range(first.ip + 1, first.ip + JUMP_SIZE))
        relative = any(insn.flow_control in RELATIVE for insn in region)
        # The paper's other exception is a return at the very end, which gcd does not have.
        if length >= JUMP_SIZE and first.ip + length < len(code) and not entered and not relative:
            found[first.ip] = length
    return found


def _region(insns: list[Instruction]) -> Iterator[Instruction]:
    size = 0
    for insn in insns:
        if size >= JUMP_SIZE:
            return
        yield insn
        size += insn.len


class Djprobing(Modelled):
    """A state machine for kprobes and djprobes (kprobes with a length) in one function.

    A commit writes jumps. The removal of jumps needs no commit.
    """

    arch = "i386"
    profile = PROFILES["djprobe-2007"]

    def __init__(self) -> None:
        super().__init__()
        kernel, start = self.kernel, self.entry("gcd")
        where = kernel.image.kallsyms.lookup(start)
        assert where is not None
        self.lengths = {
            start + at: length for at, length in regions(kernel.image.read(start, where.symbol.size)).items()
        }
        within = {
            addr + at for addr, size in self.lengths.items() if addr < start + REACH for at in range(size)
        }
        self.places = [b.addr for b in self.reference.boundaries if b.addr in within]
        assert isinstance(self.kprobes.optimizer, Djprobes)
        self.djprobes = self.kprobes.optimizer
        self.standing: int | None = None
        """Address at which a preempted task stays, or None."""
        self.sleeper = 0
        """A kernel thread that sleeps uninterruptibly, or 0."""
        script(self.kernel).quiescent_in = lambda spans: (
            not any(self.standing is not None and start <= self.standing < end for start, end in spans)
        )
        self.instances: dict[int, int] = {}
        """Address -> length of each djprobe_instance."""
        self.jumps: set[int] = set()
        self.allowed = True

    def undo(self) -> None:
        super().undo()
        self.kprobes.set_optimization(True)
        self.standing = None
        self.put_to_sleep(False)
        self.kernel.commit_kprobes()

    def follow(self) -> None:
        """Update the expected jumps after an operation.

        A jump remains only if its address is still in optimized().
        """
        self.instances = {
            addr: length for addr, length in self.instances.items() if addr in self.model.points
        }
        self.jumps &= self.optimized()

    def optimized(self) -> set[int]:
        """Return the addresses of djprobes that have a jump, or get one at the next commit."""
        return {
            addr
            for addr in self.model.armed() & self.instances.keys()
            if self.allowed and not any(e.kprobe.post_handler for e in self.model.points[addr].entries)
        }

    def covered(self, addr: int, length: int) -> set[int]:
        """Return the addresses of probes in the `length` bytes at `addr`, except at `addr` itself."""
        return {other for other in self.model.points if addr < other < addr + length}

    def is_within_another(self, addr: int) -> bool:
        return any(addr in self.covered_bytes(start) for start in self.instances)

    def covered_bytes(self, start: int) -> range:
        return range(start + 1, start + self.instances[start])

    @initialize(asked=st.lists(ASKED, min_size=2, max_size=6))
    def begin(self, asked: list[Asked]) -> None:
        for each in asked:
            self.register(each)

    @rule(asked=ASKED)
    def register(self, asked: Asked) -> None:
        """Register a kprobe or djprobe, and check the result: success, EEXIST within another djprobe's
        region, or EINVAL for a wrong length.

        Source: section 3.3.1. EEXIST is checked before EINVAL.
        """
        number, has_length, wrong, disabled, stepped = asked
        addr = self.place(number)
        right = self.lengths.get(addr, 0)
        length = (right or JUMP_SIZE) + wrong if has_length else 0
        kprobe = self.kprobe(addr, disabled=disabled, stepped=stepped, length=length)
        expected = (
            errno.EEXIST if self.is_within_another(addr) else errno.EINVAL if length not in (0, right) else 0
        )
        if expected:
            with pytest.raises(KernelError) as caught:
                self.kernel.register_kprobe(kprobe)
            assert caught.value.errno == expected
            assert kprobe.length == length
            return
        self.kernel.register_kprobe(kprobe)
        becomes_kprobe = bool(self.covered(addr, length))
        assert kprobe.length == (0 if becomes_kprobe else length)
        is_first = addr not in self.model.points
        self.model.register(addr, kprobe, disabled)
        if is_first and kprobe.length:
            self.instances[addr] = length
            self.model.points[addr].shared = True
        self.follow()

    @rule(number=st.none() | PLACES)
    def commit(self, number: int | None) -> None:
        """Commit while a task is one byte after the address `place(number)`, or without such a task.

        A commit that a task blocks fails with EBUSY and changes nothing. Source: section 3.4.
        """
        self.standing = None if number is None else self.place(number) + 1
        waiting = self.optimized() - self.jumps
        never_freezes = self.sleeper and self.profile.djprobe is QuiesceMethod.FREEZE_PROCESSES
        if never_freezes or any(self.standing in self.covered_bytes(addr) for addr in waiting):
            with pytest.raises(KernelError) as caught:
                self.kernel.commit_kprobes()
            assert caught.value.errno == errno.EBUSY
            return
        self.kernel.commit_kprobes()
        self.jumps = self.optimized()
        assert not self.djprobes.freeing

    @rule(asleep=SELDOM)
    def put_to_sleep(self, asleep: bool) -> None:
        """Begin or end the sleep of a kernel thread for which the freezer waits in vain."""
        if asleep == bool(self.sleeper):
            return
        if asleep:
            function = self.kernel.image.kallsyms.by_name("schedule_timeout_uninterruptible")[0].address
            self.sleeper = self.kernel.call("kthread_run", function, SLEEP, b"sleeper")
            self.kernel.call("yield")
        else:
            self.kernel.call("wake_up_process", self.sleeper)
            self.kernel.call("yield")
            self.sleeper = 0

    @rule(allowed=MOSTLY)
    def set_optimization(self, allowed: bool) -> None:
        self.kprobes.set_optimization(allowed)
        self.allowed = allowed
        self.follow()

    def patches(self) -> Mapping[int, bytes]:
        """Return address -> bytes of each armed probe: a breakpoint, or its jump.

        No jump covers another probe's bytes.
        """
        self.follow()
        found = dict(super().patches())
        for addr in self.jumps:
            members = self.model.points[addr].entries
            detour = self.kprobes.detour(members[0].kprobe)
            assert detour is not None
            displacement = detour.address - (addr + JUMP_SIZE)
            found[addr] = b"\xe9" + displacement.to_bytes(4, "little", signed=True)
            assert not any(other in self.covered_bytes(addr) for other in found)
        return found


@pytest.mark.stateful
@pytest.mark.parametrize("profile", ["djprobe-2007", "djprobe-2007-preempt"])
def test_djprobing(profile: str) -> None:
    run(Djprobing, 60, profile=PROFILES[profile])
