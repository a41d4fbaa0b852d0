"""VmcoreCalls: calls functions of a dump's kernel, one at a time, and undoes a call that cannot finish."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EDEADLK, EFAULT, EIO
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.call_arguments import REGISTERS, CallArguments
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.probing.probed_linux import ProbedLinux
from emulated_kernel.guests.linux.vmcore.memory_rollback import MemoryRollback
from emulated_kernel.guests.linux.vmcore.vmcore_guest import VmcoreGuest
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE, Prot, Vector
from emulated_kernel.util.errors import KernelError

BUFFER_SIZE = 256 << 10
"""Size in bytes of the buffer to which called functions write."""
_TEXT = 0xFFFFFFFF70000000
"""Virtual address of host code, in a part of the kernel's top gigabytes that Linux leaves unused."""
_USER = 0x400000000000
"""Virtual address of a buffer in the user half, which the idle task does not use."""
_HLT = b"\xf4"
_STRINGS = 64 << 10
_FRAME = 0x100
"""Size in bytes of the space at the top of the stack that calls leave free, as for a struct pt_regs."""
_MESSAGE = 100
"""Maximum length in bytes of a panic message in an error message."""
_CALLERS = 12
"""Maximum number of callers that an error message lists."""
_PREEMPT = 1
"""Argument of __schedule() if the task is preempted and could continue."""
_SCHEDULE = "__schedule"
_ENDS = {
    _SCHEDULE: (EDEADLK, "it sleeps, and nothing else runs in a dump"),
    **dict.fromkeys(
        (
            "native_queued_spin_lock_slowpath",
            "__pv_queued_spin_lock_slowpath",
            "queued_read_lock_slowpath",
            "queued_write_lock_slowpath",
            "mutex_spin_on_owner",
            "rwsem_spin_on_owner",
            "osq_lock",
        ),
        (EDEADLK, "it waits for a lock that somebody in the dump holds"),
    ),
    "oops_begin": (EFAULT, "it oopsed"),
    "panic": (EFAULT, "it panicked"),
    "do_exit": (EFAULT, "it ends its task, and that is nobody's"),
}
"""Name of a function at which a call cannot continue -> errno and message."""


class VmcoreCalls:
    """Calls functions of a dump's kernel. Lock: held.

    If a method raises KernelError, memory is as it was before the call. EDEADLK: the call cannot continue,
    because no other task runs. EFAULT: the function faulted. EIO: the function does not return.
    """

    def __init__(
        self,
        guest: VmcoreGuest,
        machine: ProbedLinux,
        kernel: LinuxKernel,
        callers: Callable[[Any], list[int]],
        abandoned: Callable[[], None],
    ) -> None:
        """Prepare the guest for calls.

        `callers`: function that takes registers, and returns the addresses of the callers of the code at
        these registers, innermost first. `abandoned`: function that is called when hooked functions of a
        call will never return.
        """
        self._guest = guest
        self._machine = machine
        self._kernel = kernel
        self._callers = callers
        self._abandoned = abandoned
        self._reached = ""
        """Name of the function of _ENDS at which the last run has stopped, or "" if it stopped elsewhere."""
        self._deadline = inf
        self._undo = MemoryRollback(guest.machine.memory.ram, len(guest.machine.memory.ram) - HOST_SIZE)
        self.buffer = machine.alloc_pages(BUFFER_SIZE)
        """Virtual address of the buffer to which called functions can write."""
        machine.memory.map(
            _USER, machine.memory.translate(self.buffer), BUFFER_SIZE, Prot.READ | Prot.WRITE | Prot.USER
        )
        self.user_buffer = _USER
        """User-space address of the memory at `buffer`, for functions that write to user memory."""
        strings = machine.alloc_pages(_STRINGS)
        self._arguments = CallArguments(kernel, machine.memory, strings, _STRINGS)
        page = machine.memory.host_pages.alloc(PAGE_SIZE)
        machine.memory.ram[page : page + PAGE_SIZE] = _HLT * PAGE_SIZE
        self._page = page
        self._used = len(_HLT)
        machine.memory.map(_TEXT, page, PAGE_SIZE, Prot.READ | Prot.EXEC)
        for name in _ENDS:
            address = kernel.kallsyms.lookup_name(name)
            if address is not None:
                guest.machine.stop_at(address, partial(setattr, self, "_reached", name))
        guest.machine.engine.flush_code()
        guest.machine.engine.flush_tlb()

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Limit the total time of all calls in the `with` block to the maximum time of one run.

        The last call may exceed the limit by at most this time.
        """
        self._deadline = monotonic() + snapshot.BUDGET
        try:
            yield
        finally:
            self._deadline = inf

    def add_code(self, code: bytes) -> int:
        """Copy `code`, which called functions can use, to guest memory; return its address.

        Raises: HardwareError (the page for host code is full).
        """
        at = self._used
        end = self._used + len(code)
        if end > PAGE_SIZE:
            raise HardwareError("guest memory for host code is full")
        self._machine.memory.ram[self._page + at : self._page + end] = code
        self._used = end
        return _TEXT + at

    def call_function(self, function: str, *arguments: int | str) -> int:
        """Call the kernel function `function` and return its result; copy string arguments to guest memory.

        Raises: the errors of CallArguments.placed(), and those that the class describes.
        """
        return self._call(*self._arguments.placed(function, arguments))

    def _call(self, address: int, values: list[int]) -> int:
        machine = self._guest.machine
        if machine.death:
            raise KernelError(EIO, f"the guest has died: {machine.death}")
        self._undo.checkpoint()
        with self._machine.text.recorded() as written:
            try:
                return self._returned(address, values)
            except MemoryFault as fault:
                self._take_back(written)
                raise KernelError(EFAULT, f"what it leads to isn't there: {fault}") from fault
            except BaseException:
                self._take_back(written)
                raise

    def _returned(self, address: int, values: list[int]) -> int:
        """Run the function at `address` with the argument registers `values`; return its result.

        Raises: KernelError (the function cannot continue), MemoryFault, HardwareError.
        """
        machine = self._guest.machine
        self._guest.be_ready()
        regs = machine.regs
        for name, value in zip(REGISTERS, values, strict=False):
            setattr(regs, name, value)
        regs.sp = self._guest.stack + THREAD_SIZE - _FRAME - 8
        regs.ip = address
        self._machine.memory.write(regs.sp, struct.pack("<Q", _TEXT))
        machine.last_exception = None
        error, why = self._run()
        if not why:
            return int(regs.ax)
        raise KernelError(error, f"{why}{self._where()}")

    def _run(self) -> tuple[int, str]:
        """Run until the call returns; return (0, ""), or an errno and the reason if it cannot return."""
        machine = self._guest.machine
        while monotonic() < self._deadline:
            self._reached = ""
            try:
                machine.run()
            except GuestFault as fault:
                # If interrupts were off at the return, run() reports the halt there as a fault.
                if not self._reached and machine.regs.ip - len(_HLT) != _TEXT:
                    return EIO, str(fault)
                machine.death = ""
            if self._reached == _SCHEDULE and machine.regs.di & 0xFFFFFFFF == _PREEMPT:
                self._go_on()
            elif self._reached:
                return _ENDS[self._reached]
            elif machine.regs.ip - len(_HLT) == _TEXT:
                return 0, ""
            else:
                return EIO, f"it halted at {machine.regs.ip:#x}"
        return EIO, "what was asked for takes too long"

    def _go_on(self) -> None:
        """Make __schedule() return at once, because the dump has no other task to run."""
        guest = self._guest
        memory = self._machine.memory
        regs = self._guest.machine.regs
        flags = guest.init_task + self._kernel.btf.offset("task_struct.thread_info.flags")
        memory.write(flags, struct.pack("<Q", memory.read_word(flags) & ~guest.need_resched))
        guest.ask_for_nothing()
        regs.ip = memory.read_word(regs.sp)
        regs.sp += 8

    def _where(self) -> str:
        """Return the end of an error message: where a call failed. Return "" if this is unknown.

        The text names the exception, the panic message or the callers.
        """
        regs = self._guest.machine.regs
        trap = self._guest.machine.last_exception
        if self._reached == "oops_begin" and trap is not None:
            at = self._kernel.kallsyms.lookup(trap.address)
            what = f"exception {trap.vector}"
            if trap.vector == Vector.PAGE_FAULT:
                what = f"page fault for address {trap.cr2:#x}"
            elif trap.vector == Vector.INVALID_OPCODE:
                what = "an instruction that this CPU lacks, or BUG()"
            return f": {what} at {at or hex(trap.address)}"
        if self._reached == "panic":
            with suppress(MemoryFault):
                return f": {self._text(regs.di)}"
        if self._reached:
            with suppress(MemoryFault):
                found = map(self._kernel.kallsyms.lookup, self._callers(regs)[:_CALLERS])
                return f" ({' < '.join(place.name for place in found if place is not None)})"
        return ""

    def _text(self, va: int) -> str:
        """Return the string at the virtual address `va`, at most _MESSAGE bytes of it."""
        data = self._machine.memory.read(va, min(_MESSAGE, PAGE_SIZE - va % PAGE_SIZE))
        return data.partition(b"\0")[0].decode("utf-8", "replace").strip()

    def _take_back(self, written: Sequence[tuple[int, bytes]]) -> None:
        """Undo all changes that a call has made to memory. If this is impossible, declare the guest dead.

        `written`: (address, bytes) of each piece of text that probes patched during the call. These pieces
        are written again after the rollback.
        """
        machine = self._guest.machine
        with suppress(MemoryFault):
            self._abandoned()
        if not self._undo.is_possible:
            machine.death = "a call cannot finish, and cannot be undone without /proc/self/pagemap"
            return
        self._undo.rollback()
        machine.death = ""
        for va, data in written:
            self._machine.text.substitute(va, data)
        machine.engine.flush_code()
        machine.engine.flush_tlb()

    def close(self) -> None:
        """Close the pagemap file; no more calls can be made."""
        self._undo.close()
