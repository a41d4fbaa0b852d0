"""LinuxMachine: the PC with its CPU, running a kernel until that is idle or a process waits for the host."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum

from emulated_kernel.guests.common.proc import is_dying
from emulated_kernel.guests.linux.initramfs import STUB
from emulated_kernel.guests.linux.pc.devices import Pc
from emulated_kernel.guests.linux.pc.exception_cells import cpu_state
from emulated_kernel.guests.linux.pc.linux_cpu import CPU_MODEL, SYSCALL_SIZE, LinuxCpu
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu import x86
from emulated_kernel.machine.cpu.registers import Regs, fast_regs
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.interrupts.exceptions import LiveExceptionState
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.run_watchdog import HandlerTime, Watchdog
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import (
    CODE_CALLBACK,
    HOOK_BLOCK,
    HOOK_CODE,
    HOOK_INSN,
    IN_CALLBACK,
    INSN_CALLBACK,
    OUT_CALLBACK,
    Engine,
)

_IN, _OUT, _SYSCALL, _RDTSC, _RDTSCP = 218, 500, 699, 608, 609
"""The library's numbers of these instructions (x86.h)."""
_TIMER_LIMIT = 1 << 20
"""Idle interrupts in a row; more of them mean that the guest waits for what never comes."""


_TICK_BLOCKS = 5_000
"""Blocks of code that take as long as a tick does, where they are counted: a small part of a real CPU's."""


class StopReason(Enum):
    """Why a run has ended."""

    AT_STUB = "a process waits for the host"
    IN_CALL = "a process's system call waits for the host"
    IDLE = "nothing can run before the next interrupt"


# As names: Python 3.11 calls a function for each member that is looked up in its class.
AT_STUB, IN_CALL, IDLE = StopReason


class LinuxMachine:
    """One PC; not thread-safe.

    `cells`: see find_exception_cells. `budget`: seconds that one run may take; after one that took longer the
    machine can't be used.

    Raises: HardwareError.
    """

    def __init__(
        self, ram: mmap.mmap, seed: int, cells: tuple[int, int], budget: float, cpu_model: int = CPU_MODEL
    ) -> None:
        self.memory = LinuxMemory(ram)
        self.pc = Pc(seed)
        self.engine = engine = Engine(*X86_64Cpu.engine_mode, cpu_model)
        self.model = X86_64Cpu()
        engine.map_ram(0, ram)
        state = cpu_state(engine)
        self.regs: Regs = fast_regs(self.model, engine, state)
        self.cpu = LinuxCpu(engine, self.regs, self.memory, state)
        error, in_flight = cells
        handler_time = HandlerTime()
        exceptions = LiveExceptionState(state + error, state + in_flight)
        self.hooks = TrapHooks(engine, self.model, self.regs, exceptions, handler_time)
        self.hooks.dispatch = self._exception
        self.hooks.protection_faults[STUB] = self._come_to_stub
        self._stopped: StopReason | None = None
        self.is_running = False
        """The guest runs: what is asked now is asked by a callback, in which nothing else can run."""
        self._is_text_stale = False
        self._counted: list[range] = []
        """Where blocks of code are counted."""
        self._blocks: int | None = None
        """That have run there since the latest tick; None: none comes there."""
        self._has_ticked = False
        self._watchdog = Watchdog(engine.stop, handler_time, budget)
        self._is_reset = False
        self.last_exception: Trap | None = None
        """The latest one that went to the guest."""
        self.death: str = ""
        """Why the guest can't run any more; empty while it can."""
        self._hook_instructions()

    def _hook_instructions(self) -> None:
        pc = self.pc
        regs = self.regs

        def read_port(_engine: int, port: int, size: int, _data: int) -> int:
            return pc.read_port(port, size)

        def write_port(_engine: int, port: int, _size: int, value: int, _data: int) -> None:
            pc.write_port(port, value)

        def syscall(_engine: int, _data: int) -> int:
            self.cpu.syscall(regs.ip)
            # The library steps over the instruction.
            regs.ip -= SYSCALL_SIZE
            return 0

        def rdtsc(_engine: int, _data: int) -> int:
            tsc = pc.read_tsc()
            regs.ax = tsc & 0xFFFFFFFF
            regs.dx = tsc >> 32
            return 1

        def rdtscp(_engine: int, _data: int) -> int:
            regs.cx = 0
            return rdtsc(0, 0)

        for number, callback in (
            (_IN, IN_CALLBACK(read_port)),
            (_OUT, OUT_CALLBACK(write_port)),
            (_SYSCALL, INSN_CALLBACK(syscall)),
            (_RDTSC, INSN_CALLBACK(rdtsc)),
            (_RDTSCP, INSN_CALLBACK(rdtscp)),
        ):
            self.engine.add_hook(HOOK_INSN, callback, instruction=number)

    def call_at(self, address: int, function: Callable[[], object]) -> None:
        """Have `function` called whenever the guest comes to an address.

        It may change memory and registers, but not where the guest goes on.
        """
        self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(lambda *_: function()), at=address)
        # What was translated before has no call.
        if not self.is_running:
            self.engine.flush_code()

    def stop_at(self, address: int, function: Callable[[], object]) -> None:
        """End a run where the guest comes to an address, in front of its instruction."""

        def stop() -> None:
            function()
            self.engine.stop()

        self.call_at(address, stop)

    @contextmanager
    def wanted_by(self, client: int) -> Iterator[None]:
        """Runs end with their client, a thread of the host's; only where a run can be taken back."""
        self._watchdog.ask(lambda: is_dying(client))
        try:
            yield
        finally:
            self._watchdog.ask(None)

    @contextmanager
    def ticking_in(self, code: range) -> Iterator[None]:
        """The timer interrupts there too meanwhile: what waits for jiffies without a halt gets them.

        Invariant: a run stops in front of a block, of which nothing is done by then.
        Unicorn: a hook that is taken back drops what was translated with it, and faults where that is gone by
        then: it stays.
        """
        if code not in self._counted:
            self._counted.append(code)
            self.engine.add_hook(HOOK_BLOCK, CODE_CALLBACK(self._count), at=code)
        self._blocks = 0
        try:
            yield
        finally:
            self._blocks = None

    def _count(self, *_block: int) -> None:
        if self._blocks is None:
            return
        self._blocks += 1
        if (
            self._blocks >= _TICK_BLOCKS
            and self.regs.flags & x86.FLAG_IF
            and self.pc.timer_vector is not None
        ):
            self._blocks = 0
            self._has_ticked = True
            self.engine.stop()

    def watch_text(self, do_sync_core: int) -> None:
        """The guest changes its text, then has its CPUs run do_sync_core(): translated code is stale there.

        Unicorn: it doesn't see that text is written through another mapping.
        """

        def sync(*_arguments: int) -> None:
            # The run that goes on comes here once more.
            self._is_text_stale = not self._is_text_stale
            if self._is_text_stale:
                self.engine.stop()

        self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(sync), at=do_sync_core)

    def _come_to_stub(self, _regs: Regs) -> None:
        self._stopped = AT_STUB
        self.engine.stop()

    def stop_in_call(self) -> None:
        """End a run at the breakpoint that the guest has come to."""
        self._stopped = IN_CALL
        self.engine.stop()

    def _exception(self, trap: Trap) -> None:
        self.last_exception = trap
        self.cpu.raise_exception(trap)

    def watch_reset(self, emergency_restart: int) -> None:
        """The guest ends there after a panic; what it does to a real machine's keyboard takes long."""

        def reset() -> None:
            self._is_reset = True

        self.stop_at(emergency_restart, reset)

    def check_alive(self) -> None:
        """Raises: GuestFault (the guest is dead)."""
        if self.death:
            raise GuestFault(Trap(TrapKind.DOUBLE_FAULT, 0), self.death)

    def run(self) -> StopReason:
        """Go on until a process waits for the host, or the guest is idle. Raises: GuestFault (it is dead)."""
        if self.death:
            self.check_alive()
        self._stopped = None
        self.is_running = True
        try:
            while True:
                self._watchdog.arm()
                try:
                    error = self.engine.start(self.regs.ip)
                    while self._has_ticked and not (error or self._watchdog.has_expired):
                        self._has_ticked = False
                        self.timer()
                        error = self.engine.start(self.regs.ip)
                finally:
                    expired = self._watchdog.disarm()
                if self.engine.parked is not None:
                    self.hooks.check()
                if expired or error or self._is_reset:
                    raise self._fault(error, expired=expired)
                if self._stopped is not None:
                    return self._stopped
                if self._is_text_stale:
                    self.engine.flush_code()
                elif self.regs.flags & x86.FLAG_IF:
                    return IDLE
                else:
                    ip = self.regs.ip
                    raise GuestFault(Trap(TrapKind.FAULT, ip), f"it halted for good at {ip:#x}")
        except GuestFault as fault:
            self.death = str(fault)
            raise
        finally:
            self.is_running = False
            if self.engine.is_interrupted:
                self.engine.raise_interrupt()

    def _fault(self, error: int, *, expired: bool) -> GuestFault:
        """Why a run has ended that the guest can't go on from."""
        ip = self.regs.ip
        if expired:
            # Unicorn: a store in flight at an asynchronous stop is done twice: there is no going on.
            why = "its client was killed" if self._watchdog.was_unwanted else "it ran for too long"
            return GuestFault(Trap(TrapKind.BUDGET, ip), f"{why}, and was given up at {ip:#x}")
        if error:
            message = f"the emulator stopped at {ip:#x}: {self.engine.strerror(error)}"
            return GuestFault(Trap(TrapKind.FAULT, ip), message)
        return GuestFault(Trap(TrapKind.FAULT, ip), self._panic())

    def _panic(self) -> str:
        """What it said last, where that is why it restarts."""
        said = self.pc.console.decode("latin1").splitlines()
        panics = (line.partition("Kernel panic - ")[2] for line in reversed(said))
        return f"it has restarted: {next(filter(None, panics), 'nobody knows why')}"

    def timer(self) -> None:
        """Time passes to the timer's interrupt, which the next run begins with.

        Raises: GuestFault (none will ever come).
        """
        vector = self.pc.timer_vector
        if vector is None:
            raise GuestFault(Trap(TrapKind.FAULT, self.regs.ip), "it waits, and nothing will interrupt it")
        self.pc.timer_fires()
        self.cpu.interrupt(vector)

    def run_to_stub(self) -> None:
        """Run, with time passing whenever the guest is idle. Raises: GuestFault."""
        for _ in range(_TIMER_LIMIT):
            if self.run() is AT_STUB:
                return
            self.timer()
        raise GuestFault(Trap(TrapKind.FAULT, self.regs.ip), "it is idle for ever")

    def close(self) -> None:
        """Free it all; RAM goes with the last view of it."""
        self._watchdog.close()
        self.regs.close()
        self.engine.close()
        self.memory.close()
        with suppress(BufferError):
            self.memory.ram.close()
