"""Debugger: stops the guest before an instruction, for a remote debugger that then holds the guest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.quirks.hook_range import HookRange
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE, Engine
from emulated_kernel.util.control_lock import ControlLock

_EVERYWHERE = range(1 << 64)
_SLICE = 0.05
"""Maximum time in seconds that one attempt to take the control lock waits."""


class DebuggedMemory(Protocol):
    """Interface of the memory that a debugger sees.

    All methods raise MemoryFault if an address is not mapped.
    """

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes at the virtual address `va`."""

    def write(self, va: int, data: bytes, /) -> None:
        """Write bytes at the virtual address `va`."""


class DebuggedMachine(Protocol):
    """Interface of a machine that a debugger can hold."""

    regs: Regs
    """Registers of the current CPU."""

    @property
    def model(self) -> CpuModel:
        """Model of the machine's CPUs."""

    @property
    def engine(self) -> Engine:
        """The emulator's engine."""

    @property
    def memory(self) -> DebuggedMemory:
        """Virtual memory of the current CPU."""

    @property
    def cpu(self) -> int:
        """Number of the current CPU."""

    @property
    def per_cpu_bases(self) -> Sequence[int]:
        """Addresses of the per-CPU areas, one for each CPU. A debugger uses only the number of areas."""

    def all_registers(self) -> list[dict[str, int]]:
        """Return the registers of all CPUs, indexed by number: name in pt_regs -> value."""

    def at_close(self, action: Callable[[], object], /) -> None:
        """Register `action`, a function to call before the emulator is freed."""

    def passed_in_step(self) -> Callable[[int], bool]:
        """Return a function that returns True for an instruction at which a debugger's step does not stop.

        The step begins at the breakpoint of a probe, which is at the current ip. The debugger calls the
        function before each instruction, with the instruction's address. The step ends at the first address
        for which the function returns False.
        """


class Debugger:
    """Stops ("holds") a guest, and resumes it until a breakpoint, the next instruction or an interrupt.

    While the debugger is attached, Unicorn calls a hook before each instruction. Therefore breakpoints change
    no byte of the guest. While the debugger holds the guest, the control lock is lent: only observers, which
    don't run the guest, get the lock. A thread that runs the guest waits in the hook.
    """

    def __init__(self, machine: DebuggedMachine, lock: ControlLock) -> None:
        self.machine = machine
        self.lock = lock
        self.breakpoints: set[int] = set()
        """Addresses of instructions before which the guest stops."""
        self.is_attached = False
        self.is_held = False
        """Whether the debugger holds the guest now.

        The remote debugger's thread changes it, and so does the thread in a run that stops.
        """
        self.on_stop: Callable[[], None] = lambda: None
        """Function to call after a run has stopped before an instruction. The thread of the run calls it."""
        self.is_in_run = False
        """Whether the guest is held in the middle of a run, where ip cannot be changed."""
        self._steps = False
        self._passes: Callable[[int], bool] | None = None
        """Function: address -> True if the current step does not stop before the instruction at this address.

        The value is None if the step ends at the next instruction.
        """
        self._interrupts = False
        self._hook: HookRange | None = None
        self._resumed = threading.Event()

    def attach(self, is_given_up: Callable[[], bool]) -> None:
        """Hold the guest as soon as no request is served, and call a hook before each of its instructions.

        While requests are served, wait. If `is_given_up` returns True before the guest is held, stop waiting
        and do nothing.
        """
        if not self._take(is_given_up):
            return
        self._note_hold()
        with self.lock.observing():
            if self._hook is None:
                callback = CODE_CALLBACK(self._before)
                added = self.machine.engine.add_hook(HOOK_CODE, callback, at=_EVERYWHERE)
                assert added.value is not None
                self._hook = HookRange(added.value, _EVERYWHERE)
            self._hook.use(True)
            self.machine.engine.flush_code()
            self.is_attached = True

    def detach(self, is_given_up: Callable[[], bool]) -> None:
        """Remove all breakpoints, and resume the guest; do nothing if the debugger is not attached.

        `is_given_up`: function that returns True if the machine is being shut down. In that case, do not wait
        for the control lock, because the thread that ends the machine may hold it.
        """
        if not self.is_attached:
            return
        self.breakpoints.clear()
        self._steps = False
        self._interrupts = False
        self.is_attached = False

        def is_ended() -> bool:
            # The thread in a run may have decided to stop before it saw that the debugger has left.
            if self.is_held:
                self.resume(step=False)
            return is_given_up()

        is_ended()
        if not self._take(is_ended):
            return
        with self.lock.observing():
            if self._hook is not None:
                self._hook.use(False)
                self.machine.engine.flush_code()
        self.lock.end_loan()

    def _take(self, is_given_up: Callable[[], bool]) -> bool:
        """Wait until no thread holds the control lock, lend the lock to this debugger, and return True.

        If `is_given_up` returns True before that, return False.
        """
        while not self.lock.try_lend(_SLICE):
            if is_given_up():
                return False
        return True

    def resume(self, *, step: bool) -> None:
        """Resume the guest; with `step`, stop it again before the next instruction.

        At a probe's breakpoint, a step also executes the slot, the detour and the handlers, and ends after
        the probed instruction. If the guest has stopped in the slot, the detour or a handler, a step executes
        one instruction.
        """
        self._steps = step
        self._interrupts = False
        self._passes = self.machine.passed_in_step() if step and self.breakpoint_size else None
        self.is_held = False
        self.machine.engine.is_held = False
        if self.is_in_run:
            # Hazard: the thread in the run must get the lock before others, which would run the guest.
            self.is_in_run = False
            self._resumed.set()
        else:
            self.lock.end_loan()

    def interrupt(self) -> bool:
        """Stop the guest. Return True if the guest is held when this method returns.

        If a thread holds the control lock, return False. The guest then stops before the next instruction
        that it executes. In case it executes none, the caller repeats the call until the guest is held.
        """
        if self.is_held:
            return True
        self._interrupts = True
        if not self.lock.try_lend():
            return False
        self._interrupts = False
        self._note_hold()
        return True

    @property
    def breakpoint_size(self) -> int:
        """Size in bytes of the breakpoint instruction at ip; 0 if there is another instruction at ip."""
        for code in self.machine.model.breakpoints:
            with suppress(MemoryFault):
                if self.machine.memory.read(self.machine.regs.ip, len(code)) == code:
                    return len(code)
        return 0

    def _note_hold(self) -> None:
        self._resumed.clear()
        self._steps = False
        self.machine.engine.is_held = True
        # Hazard: once this is set, another thread may call resume().
        self.is_held = True

    def _before(self, _engine: int, address: int, _size: int, _data: int) -> None:
        """Stop the run before the instruction at `address` if the guest must stop there.

        Unicorn calls this code hook before each instruction.
        """
        if not (self._steps or self._interrupts or address in self.breakpoints) or not self.is_attached:
            return
        if self._steps and self._passes is not None and self._passes(address):
            return
        self._interrupts = False
        self.is_in_run = True
        self._note_hold()
        with self.lock.lent():
            self.on_stop()
            self._resumed.wait()
