"""Probes that read user memory where loads of the kernel itself fault, and checks of the probes' hits.

The probed function is int_sqrt(). Code of the test calls int_sqrt() in a client's task.

The second argument and the result are the address of user memory.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from emulated_kernel.arch.riscv import encoder as riscv
from emulated_kernel.arch.riscv.insn import RA
from emulated_kernel.arch.riscv.pt_regs import clear_in_status, read_status, set_in_status
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux.files import Files

FUNCTION = "int_sqrt"
USER = BUFFER + 0x80000
"""Address of the first of two user pages that are in memory; the next page is not."""
WORD = int.from_bytes(b"greeting", "little")
"""Word at USER."""
END = 2 * 4096
"""Offset from USER of the page that is not in memory."""
TURNS = 20
"""Number of calls in whose hits callbacks in Python are counted."""
CUT = 4 * 4096 - 2
"""Offset from USER of a string without an end, after which no page is in memory."""
ALLOWED = 1 << 18
"""Bit of the flags on x86 (AC), and of sstatus on RISC-V (SUM), that allows access to user memory."""
READABLE = (
    "any=+0(ARG):u64 user=+u0(ARG):u64 signed=+1(ARG):s8 bits=+0(ARG):b5@3/32 far=+4088(ARG):x64",
    "each=+0(ARG):u8[4] crossing=+4092(ARG):x64 chain=+0(+64(ARG)):u32",
    "any=+0(ARG):string user=+0(ARG):ustring crossing=+4090(ARG):string last=+8186(ARG):ustring",
    "pointed=+0(+64(ARG)):string strings=+u64(ARG):ustring[2]",
    "kernel=+0(+112(ARG)):u64 text=+1(+112(ARG)):string banner=@linux_banner:string name=$comm",
)
FAULTING = (
    "user=+u0($stack):u64 text=+0($stack):ustring kernel=+u0(+0($stack)):u64",
    "missing=+8192(ARG):u64 user=+u8192(ARG):u64 crossing=+8188(ARG):x64 any=+8192(ARG):string",
    "crossing=+16382(ARG):string user=+16382(ARG):ustring empty=+8(ARG):string none=+8(ARG):ustring",
    "hole=+0(+80(ARG)):u64 text=+0(+80(ARG)):string user=+u0(+80(ARG)):ustring lower=-u0x300000(ARG):u64",
    "half=+0(+88(ARG)):u64 text=+0(+88(ARG)):string user=+u0(+88(ARG)):u8 users=+0(+88(ARG)):ustring",
    "half=+0(+96(ARG)):u64 text=+0(+96(ARG)):string user=+u0(+96(ARG)):u8 users=+0(+96(ARG)):ustring",
    "end=+0(+104(ARG)):u64 text=+0(+104(ARG)):string user=+u0(+104(ARG)):u8 users=+0(+104(ARG)):ustring",
    "kernel=+u0(+112(ARG)):u64 text=+0(+112(ARG)):ustring chain=+0(+8192(ARG)):u32",
    "last=+0(+120(ARG)):u64 text=+0(+120(ARG)):string first=+1(+120(ARG)):u64 user=+u1(+120(ARG)):u8",
)


class UserReads:
    """A kernel with a client whose task has user memory, and code that calls the probed function in this
    task.
    """

    def __init__(self, engine: LinuxEngine) -> None:
        self.engine = engine
        mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False, keeps_tracefs=True)
        self.files = Files(mount, Client(4001, 0, 0))
        tasks = engine.tasks
        self._calls = LinuxSyscalls(tasks)
        self._task = tasks.fork(tasks.init, 4002)
        self._file = self._calls.open(self._task, "/scratch/x", os.O_RDWR | os.O_CREAT, 0o644)
        tasks.copy_to_user(self._task, USER, bytes(END))
        # Missing, not canonical in both halves, the end of user space, the kernel's, and the last address.
        task_size = engine.components.arch.task_size
        banner = engine.kernel.required("linux_banner")
        hole = task_size // 2
        pointers = (USER, USER + 4090, hole, 3 << 60, 1 << 63, task_size - 4, banner, (1 << 64) - 1)
        for at, data in (
            (0, b"greeting\0"),
            (64, struct.pack("<8Q", *pointers)),
            (4090, b"crossing a page\0"),
            (END - 6, b"last.\0"),
            (CUT, b"xx"),
        ):
            tasks.copy_to_user(self._task, USER + at, data)
        self._is_x86 = engine.components.arch.name == "x86_64"
        text = engine.machine.text
        self._entry = engine.kernel.required("vfs_write")
        self._trap = text.alloc_text(16)
        text.poke(self._trap, engine.components.arch.breakpoint)
        self._code = text.alloc_text(128)
        engine.machine.breakpoints[self._entry] = self._begin
        engine.machine.breakpoints[self._trap] = self._end
        self._kept: dict[str, int] = {}
        self._found: list[dict[str, int]] = []
        self._turns = 0

    @property
    def size(self) -> int:
        """Return the size of the probed function in bytes."""
        found = self.engine.kernel.kallsyms.lookup(self.engine.kernel.required(FUNCTION))
        assert found is not None
        return found.symbol.size

    def _caller(self, allowed: bool) -> bytes:
        """Return code that calls the probed function, and then copies the flags (x86) or sstatus (RISC-V) to
        a register.

        The register is that of the third argument. `allowed`: whether access to user memory is allowed before
        the call.
        """
        arch = self.engine.components.arch
        function = self.engine.kernel.required(FUNCTION)
        if self._is_x86:
            before = b"\x0f\x01\xcb" if allowed else b"\x0f\x01\xca"
            call = arch.relative_call(self._code + len(before), function)
            return (
                before
                + call
                + b"\x9c\x5a"
                + arch.relative_jump(self._code + len(before + call) + 2, self._trap)
            )
        change = set_in_status(0, 31) if allowed else clear_in_status(31)
        before = riscv.set_register(31, ALLOWED) + change
        call = riscv.long_jump(RA, RA, self._code + len(before), function) + read_status(12)
        return before + call + riscv.long_jump(0, 31, self._code + len(before + call), self._trap)

    def _begin(self, regs: Any) -> None:
        names = [name for name in self.engine.machine.model.registers if name != "ip"]
        self._kept = {name: regs.get(name) for name in names}
        self._call(regs)

    def _call(self, regs: Any) -> None:
        first, second = ("di", "si") if self._is_x86 else ("a0", "a1")
        regs.set(first, USER * USER)
        regs.set(second, USER)
        regs.ip = self._code

    def _end(self, regs: Any) -> None:
        names = [name for name in self.engine.machine.model.registers if name != "ip"]
        self._found.append({name: regs.get(name) for name in names})
        self._turns -= 1
        if self._turns:
            self._call(regs)
            return
        for name, value in self._kept.items():
            regs.set(name, value)
        # The kernel's code for ftrace, which does nothing.
        regs.ip = self._entry + (5 if self._is_x86 else 8)

    def call(self, turns: int, *, allowed: bool, preserved: Collection[str] = ()) -> list[dict[str, int]]:
        """Call the function `turns` times in one system call of the client.

        Return, for each call, the registers `preserved`, and as "allowed" the flag for access to user memory.
        `allowed`: whether this access is allowed before each call.
        """
        text = self.engine.machine.text
        with self.engine.lock:
            breakpoint_ = self.engine.components.arch.breakpoint
            text.poke(self._code, self._caller(allowed))
            text.poke(self._entry, breakpoint_)
            self._turns = turns
            self._found = []
            self._calls.write(self._task, self._file, b"x", None)
            text.poke(self._entry, text.original(self._entry, len(breakpoint_)))
        assert len(self._found) == turns
        flags = "dx" if self._is_x86 else "a2"
        return [
            {"allowed": each[flags] & ALLOWED, **{name: each[name] for name in preserved}}
            for each in self._found
        ]

    @contextmanager
    def probed(self, place: str, events: Sequence[str]) -> Iterator[None]:
        """During the block, enable one event for each of `events`, which are lists of fetch arguments.

        `place`: `p` or `r` and the address, such as "p int_sqrt".
        """
        kind, _, where = place.partition(" ")
        lines = [f"{kind}:u/e{at} {where} {args}" for at, args in enumerate(events)]
        argument = "$retval" if kind == "r" else "%si" if self._is_x86 else "%a1"
        text = "".join(f"{line}\n" for line in lines).replace("ARG", argument)
        self.files.write("/kprobe_events", text, os.O_WRONLY | os.O_TRUNC)
        self.files.write("/tracing/events/u/enable", "1")
        optimizer = self.engine.kprobes.optimizer
        if optimizer is not None:
            with self.engine.lock:
                optimizer.work.flush()
        yield
        self.files.write("/tracing/events/u/enable", "0")
        self.files.write("/kprobe_events", "", os.O_WRONLY | os.O_TRUNC)
        self.files.write("/tracing/trace", "", os.O_WRONLY | os.O_TRUNC)

    def records(self) -> list[str]:
        """Return the records without their times and flags."""
        return re.findall(r": (e\d: .*)", self.files.read("/tracing/trace"))

    def names(self) -> list[str]:
        """Return the names in a directory of the guest, which the kernel writes to user memory."""
        with self.engine.lock:
            return [entry.name for entry in self._calls.listdir("/scratch")]

    def entries(self, turns: int, *, allowed: bool) -> int:
        """Return how many callbacks in Python `turns` calls of the function cause.

        The test's own traps are not counted. `allowed`: as for call().
        """
        found = 0
        callbacks = self.engine.machine.hooks.handler_time.callbacks

        def note(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal found
            found += event == "call" and frame.f_code in callbacks

        sys.setprofile(note)
        try:
            self.call(turns, allowed=allowed)
        finally:
            sys.setprofile(None)
        return found


def check_hits(in_guest: UserReads, in_python: UserReads) -> None:
    """Check that guest code handles the hits, records the same as Python, and preserves the registers of the
    caller.

    The hits are those of probes at the function's entry and at its return.
    """
    engine = in_guest.engine
    arch = engine.components.arch
    at_entry = {*engine.machine.model.registers} - {"ip"}
    if engine.kprobes.sites is not None or engine.kprobes.optimizer is not None:
        # On RISC-V, the jump and the call of a site go through temporary registers, which are free there.
        at_entry -= {f"t{number}" for number in range(7)}
    for kind, preserved in (("p", at_entry), ("r", arch.callee_saved)):
        place = f"{kind} {FUNCTION}"
        for allowed in (False, True):
            call = partial(in_guest.call, 3, allowed=allowed, preserved=preserved)
            expected = call()
            assert {bool(each["allowed"]) for each in expected} == {allowed}
            own = in_guest.entries(TURNS, allowed=allowed)
            with in_guest.probed(place, READABLE):
                assert call() == expected
                # The host also handles the end of a buffer's page.
                assert in_guest.entries(TURNS, allowed=allowed) < own + 5
                assert call() == expected
                found = in_guest.records()
            with in_guest.probed(place, FAULTING):
                assert [call() for _ in range(3)] == [expected] * 3
                found += in_guest.records()
            with in_python.probed(place, READABLE):
                in_python.call(TURNS + 6, allowed=allowed)
                by_python = in_python.records()
            with in_python.probed(place, FAULTING):
                in_python.call(9, allowed=allowed)
                by_python += in_python.records()
            assert found == by_python
            assert len(found) == (TURNS + 6) * len(READABLE) + 9 * len(FAULTING)
    assert in_guest.engine.kprobes.compiler.made
    assert not in_python.engine.kprobes.compiler.made


def check_other_loads_fault(reads: UserReads) -> None:
    """Check that a load of user memory by an assembly handler faults, while events at the same place read
    user memory.

    The load faults even if the hit has just read the same page.
    """
    load = "mov al, byte ptr [rsi]" if reads.engine.components.arch.name == "x86_64" else "lb t1, 0(a1)"
    probe = Kprobe(symbol_name=FUNCTION, code=load)
    reads.engine.kprobes.register_kprobe(probe)
    with reads.probed(f"p {FUNCTION}", ["text=+0(ARG):ustring word=+0(ARG):u64"]):
        reads.call(20, allowed=False)
        assert probe.failures == 20
        reads.call(20, allowed=True)
        assert probe.failures == 20
        assert reads.records() == [f'e0: ({FUNCTION}+0x0/{reads.size:#x}) text="greeting" word={WORD}'] * 40
    reads.engine.kprobes.unregister_kprobe(probe)
