"""Runner: resumes the guest, and determines the reason of each stop."""

from __future__ import annotations

from collections.abc import Callable
from errno import EBUSY
from operator import attrgetter

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.guest_clock import MachineClock
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.run_watchdog import Watchdog
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.util.errors import KernelError


class Runner:
    """Runs the current CPU until it stops; `hooks.dispatch` handles the guest's exceptions."""

    def __init__(
        self, hooks: TrapHooks, memory: Memory, clock: MachineClock, stop: Callable[[], None], budget: float
    ) -> None:
        """Create a runner. The watchdog's thread calls `stop` to end a run after `budget` seconds."""
        self._engine = hooks.engine
        self.cpu = hooks.cpu
        self.regs = hooks.regs
        self.hooks = hooks
        self._asked: Callable[[Regs], tuple[int, ...]] = attrgetter(*self.cpu.hypercall_arguments)
        self.memory = memory
        self._clock = clock
        self.watchdog = Watchdog(stop, hooks.handler_time, budget, self._engine.is_interrupted_again)
        self.is_running = False
        """Whether a run of the guest is in progress. This is also the case while a hook is called."""
        self._number = attrgetter(self.cpu.hypercall_register)
        self._halts: set[int] = set()
        """Cache of the addresses after each `hlt` at which the guest has stopped, to recognize hypercalls.

        No address becomes invalid, because a `hlt` is never patched.
        """

    def run(self, tick: bool = True, budget: float | None = None) -> Trap:
        """Run until the guest stops, and return the trap with the reason.

        If `tick` is True, first set the guest's clock to the present. If it is False, the clock continues
        from its last reading. `budget` is the run's budget in seconds; None means the machine's budget.

        Raises: KernelError EBUSY (a debugger holds the guest), HardwareError (called from within a run; the
        emulator failed), KeyboardInterrupt (by a second SIGINT), Exception (raised by a Python hook).
        """
        self.check_stopped()
        if tick:
            self._clock.tick()
        self.is_running = True
        try:
            self.watchdog.arm(budget)
            try:
                error = self.hooks.run(self.regs.ip)
            except BaseException:
                if self.watchdog.disarm():
                    self._drain_stop(self.regs.ip)
                raise
            return self._why_stopped(error, self.watchdog.disarm())
        finally:
            self.is_running = False

    def run_within(self) -> Trap:
        """Run the guest within a run, for a deferred handler; return the trap that ended the inner run.

        The CPU time of the inner run counts for the outer one.

        Raises: HardwareError (the emulator failed), Exception (raised by a Python hook).
        """
        return self._why_stopped(self.hooks.run(self.regs.ip), self.watchdog.has_expired)

    def check_stopped(self) -> None:
        """Check that the guest isn't running.

        Raises: HardwareError (the guest is running), KernelError EBUSY (a debugger holds it).
        """
        if self._engine.is_held:
            raise KernelError(EBUSY, "a debugger holds the guest")
        if self.is_running:
            raise HardwareError("the guest runs already: not allowed in a hook")

    def _why_stopped(self, error: int, expired: bool) -> Trap:
        hooks = self.hooks
        regs = self.regs
        stopped = hooks.stopped_by
        if expired:
            self._drain_stop(regs.ip)
        hooks.stopped_by = None
        if self._engine.parked is not None:
            hooks.check()
        if stopped is not None:
            return stopped
        ip = regs.ip
        if error:
            raise HardwareError(f"the emulator stopped at {ip:#x}: {self._engine.strerror(error)}")
        if ip in self._halts or self._is_after_halt(ip):
            return Trap(
                TrapKind.HYPERCALL, ip, number=self._number(regs) & 0xFFFFFFFF, args=self._asked(regs)
            )
        if expired:
            return Trap(TrapKind.BUDGET, ip)
        raise HardwareError(f"the emulator stopped at {ip:#x} for no reason")

    def _drain_stop(self, ip: int) -> None:
        """Consume a request to stop that may have come after the end of the run: it would end the next run.

        `ip`: the guest's instruction pointer, which is restored afterwards.
        """
        pad = self.cpu.layout.host_text
        while self.regs.ip != pad + len(self.cpu.halt):
            self._engine.start(pad)
        self.regs.ip = ip

    def _is_after_halt(self, ip: int) -> bool:
        halt = self.cpu.halt
        try:
            halted = self.memory.read(ip - len(halt), len(halt)) == halt
        except MemoryFault:
            return False
        if halted:
            self._halts.add(ip)
        return halted

    def close(self) -> None:
        """End the watchdog's thread."""
        self.watchdog.close()
