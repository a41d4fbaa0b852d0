"""LinuxMachine: the PC with its CPU; runs a kernel until it is idle or a process waits for the host."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from emulated_kernel.guests.common.proc import is_dying
from emulated_kernel.guests.linux.cpu.cpuid_answers import CpuidAnswers
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
from emulated_kernel.guests.linux.initramfs import STUB
from emulated_kernel.guests.linux.pc.devices import Pc
from emulated_kernel.guests.linux.pc.emulated_cpuid import emulated_cpuid
from emulated_kernel.guests.linux.pc.exception_cells import cpu_state
from emulated_kernel.guests.linux.pc.linux_cpu import CPU_MODEL, PRODUCTION_MODEL, SYSCALL_SIZE, LinuxCpu
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu import x86
from emulated_kernel.machine.cpu.registers import FastRegs, Regs, fast_regs
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.interrupts.exceptions import LiveExceptionState
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.quirks.hook_range import HookRange
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
from emulated_kernel.util.abi import Vector

_CPUID = 113
"""Unicorn's instruction id of `cpuid` (x86.h)."""
_RDMSR_SIZE = 2
_EAX = 0xFFFFFFFF
_IN = 218
"""Unicorn's instruction id of `in` (x86.h)."""
_OUT = 500
"""Unicorn's instruction id of `out` (x86.h)."""
_SYSCALL = 699
"""Unicorn's instruction id of `syscall` (x86.h)."""
_RDTSC = 608
"""Unicorn's instruction id of `rdtsc` (x86.h)."""
_RDTSCP = 609
"""Unicorn's instruction id of `rdtscp` (x86.h)."""
_TIMER_LIMIT = 1 << 20
"""Maximum number of successive timer interrupts in an idle guest.

A guest that reaches it waits for an event that never comes.
"""

_TICK_BLOCKS = 5_000
"""Number of basic blocks per tick, in code where blocks are counted. A real CPU executes many more."""


class StopReason(Enum):
    """Reason for the end of a run."""

    AT_STUB = "a process waits for the host"
    IN_CALL = "a process's system call waits for the host"
    IDLE = "nothing can run before the next interrupt"


# Names in the module, because Python 3.11 calls a function for each member that is looked up in its class.
AT_STUB, IN_CALL, IDLE = StopReason


class LinuxMachine:
    """One emulated PC; not thread-safe.

    `cells`: offsets that find_exception_cells() returned. `budget`: seconds that one run may take; after a
    run that took longer, the machine is dead.

    Raises: HardwareError (the library's CPU state cannot be found or has another layout).
    """

    def __init__(
        self, ram: mmap.mmap, seed: int, cells: tuple[int, int], budget: float, cpu_model: int = CPU_MODEL
    ) -> None:
        self.memory = LinuxMemory(ram)
        self.damage = DamageReports()
        """Object that logs which data of the guest are damaged."""
        self.pc = Pc(seed)
        engine = Engine(*X86_64Cpu.engine_mode, cpu_model)
        self.engine = engine
        self.model = X86_64Cpu()
        self._ram_address = engine.map_ram(0, ram)
        state = cpu_state(engine)
        self.regs: Regs = fast_regs(self.model, engine, state)
        self.cpu = LinuxCpu(engine, self.regs, self.memory, state)
        error, in_flight = cells
        handler_time = HandlerTime()
        exceptions = LiveExceptionState(state + error, state + in_flight)
        self.hooks = TrapHooks(engine, self.model, self.regs, exceptions, handler_time)
        self.hooks.dispatch = self._exception
        self.hooks.protection_faults[STUB] = self._come_to_stub
        self._breakpoint_stub = range(0)
        """Addresses of the guest code that delivers breakpoints."""
        self._stopped: StopReason | None = None
        self.is_running = False
        """Whether the guest runs.

        Requests that come meanwhile are from a callback, in which nothing else can run.
        """
        self._is_text_stale = False
        self._counted: dict[range, HookRange] = {}
        """Range of code in which blocks can be counted -> the range of the hook."""
        self._blocks: int | None = None
        """Number of counted blocks since the last tick, or None if blocks are not counted now."""
        self._has_ticked = False
        self._watchdog = Watchdog(engine.stop, handler_time, budget, engine.is_interrupted_again)
        self._is_reset = False
        self.last_exception: Trap | None = None
        """The latest exception that was delivered to the guest."""
        self.before_close: list[Callable[[], object]] = []
        """Functions to call before the emulator is freed."""
        self.death: str = ""
        """Reason why the guest cannot run any more, or "" while it can."""
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
            # The library advances the instruction pointer over the instruction afterwards.
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
            (_RDTSCP, INSN_CALLBACK(rdtscp)),
        ):
            self.engine.add_hook(HOOK_INSN, callback, instruction=number)
        self._hook_rdtsc(INSN_CALLBACK(rdtsc))

    def _hook_rdtsc(self, callback: Any) -> None:
        """Make Unicorn call the host's routine for rdtsc, or the Python callback if there is no routine."""
        routine = routine_address("rdtsc")
        if routine is None:
            self.engine.add_hook(HOOK_INSN, callback, instruction=_RDTSC)
            return
        assert isinstance(self.regs, FastRegs)
        words = self.pc.words
        words.low = self.regs.address_of("ax")
        words.high = self.regs.address_of("dx")
        words.read_in_python = ctypes.cast(callback, ctypes.c_void_p).value
        self.engine.add_hook(
            HOOK_INSN,
            ctypes.c_void_p(routine),
            instruction=_RDTSC,
            data=ctypes.addressof(words),
            keep=(callback, words),
        )

    def call_at(self, address: int, function: Callable[[], object]) -> None:
        """Call `function` from now on whenever the guest reaches an address.

        The function may change memory and registers, but not the instruction pointer. If it raises
        MemoryFault, the guest continues, because the guest's own data are damaged.
        """

        def called(*_arguments: int) -> None:
            with self.damage.left_out("kernel's data"):
                function()

        self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(called), at=address)
        # Code that is already translated does not contain the call.
        if not self.is_running:
            self.engine.flush_code()

    def show_cpu(self, cpu: ProductionCpu, rdmsr_sites: Sequence[int]) -> None:
        """Show the guest a production CPU in place of the emulated CPU.

        `rdmsr_sites`: addresses of the kernel's rdmsr instructions, because Unicorn has no hook for them.
        """
        answers = CpuidAnswers(cpu)
        regs = self.regs

        def cpuid(_engine: int, _data: int) -> int:
            leaf = regs.ax & _EAX
            subleaf = regs.cx & _EAX
            found = answers.cpuid(leaf, subleaf, emulated_cpuid(PRODUCTION_MODEL, leaf, subleaf))
            regs.ax, regs.bx, regs.cx, regs.dx = found
            return 1

        self.engine.add_hook(HOOK_INSN, INSN_CALLBACK(cpuid), instruction=_CPUID)
        registers = answers.registers

        def rdmsr(*_arguments: int) -> None:
            value = registers.get(regs.cx & _EAX)
            if value is not None:
                regs.ax = value & _EAX
                regs.dx = value >> 32

        for site in rdmsr_sites:
            self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(rdmsr), at=site + _RDMSR_SIZE)

    def call_first(self, address: int, calls: Sequence[tuple[int, int]]) -> None:
        """Make the guest call other functions before its first execution of the function at `address`.

        `calls`: address of each function, and its argument. The functions run as if the caller of the
        function at `address` had called them, and may sleep.
        """
        pending = list(calls)

        def arrive() -> None:
            if pending:
                function, argument = pending.pop(0)
                regs = self.regs
                regs.sp -= 8
                self.memory.write(self.cpu.root, regs.sp, address.to_bytes(8, "little"))
                regs.di = argument
                # A write by the API leaves the current block, unlike one to the registers in memory.
                self.engine.reg_write(self.model.registers["ip"], function)

        self.call_at(address, arrive)

    def stop_at(self, address: int, function: Callable[[], object]) -> None:
        """Call `function` and end the run when the guest reaches an address, before the instruction there."""

        def stop() -> None:
            function()
            self.engine.stop()

        self.call_at(address, stop)

    @contextmanager
    def wanted_by(self, client: int) -> Iterator[None]:
        """During the block, end a run if its client, a thread of the host, is killed.

        The machine is dead after that, so use this only if the run can be rolled back.
        """
        self._watchdog.ask(lambda: is_dying(client))
        try:
            yield
        finally:
            self._watchdog.ask(None)

    @contextmanager
    def ticking_in(self, code: range) -> Iterator[None]:
        """During the block, deliver timer interrupts in the code of a range, which may busy-wait for jiffies.

        Invariant: a run stops before a basic block, of which no instruction has been executed.
        Outside of the block the code runs without the hook, which would call Python for each basic block.
        """
        hook = self._counted.get(code)
        if hook is None:
            added = self.engine.add_hook(HOOK_BLOCK, CODE_CALLBACK(self._count), at=code)
            assert added.value is not None
            hook = self._counted[code] = HookRange(added.value, code)
        hook.use(True)
        self.engine.flush_code()
        self._blocks = 0
        try:
            yield
        finally:
            self._blocks = None
            hook.use(False)
            self.engine.flush_code()

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
        """Drop translated code whenever the guest runs do_sync_core(), as it does after patching its text.

        Unicorn: does not notice that text is written through another mapping.
        """

        def sync(*_arguments: int) -> None:
            # The next run begins at this address, so this hook is called a second time.
            self._is_text_stale = not self._is_text_stale
            if self._is_text_stale:
                self.engine.stop()

        self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(sync), at=do_sync_core)

    def _come_to_stub(self, _regs: Regs) -> None:
        self._stopped = AT_STUB
        self.engine.stop()

    def stop_in_call(self) -> None:
        """End the run at the breakpoint that the guest has reached, with the reason IN_CALL."""
        self._stopped = IN_CALL
        self.engine.stop()

    def deliver_breakpoints(self, stub: range, cells: int) -> None:
        """Make the guest continue at `stub` after a breakpoint of kernel mode; the stub delivers it.

        `cells`: physical address of the words that the stub pushes.
        """
        words = self.hooks.words
        assert isinstance(self.regs, FastRegs)
        self._breakpoint_stub = stub
        self.cpu.watch_gate(words, Vector.BREAKPOINT, self._ram_address)
        words.sp = self.regs.address_of("sp")
        words.cells = self._ram_address + cells
        words.stub = stub.start

    def take_breakpoints(self) -> None:
        """Pass each breakpoint to the host first, because the host probes the guest from now on."""
        self.hooks.words.stub = 0

    @property
    def delivers_breakpoints(self) -> bool:
        """Whether breakpoints of kernel mode reach the guest's handler without Python."""
        return bool(self.hooks.words.stub)

    def _exception(self, trap: Trap) -> None:
        self.last_exception = trap
        if trap.address in self._breakpoint_stub:
            what = f"no stack for exception {Vector.BREAKPOINT}: {trap.cr2:#x} is not mapped"
            raise GuestFault(Trap(TrapKind.DOUBLE_FAULT, trap.address, Vector.BREAKPOINT), what)
        self.cpu.raise_exception(trap)

    def watch_reset(self, emergency_restart: int) -> None:
        """Declare the guest dead at emergency_restart(), which a panic calls.

        A reset through the keyboard controller would take long.
        """

        def reset() -> None:
            self._is_reset = True

        self.stop_at(emergency_restart, reset)

    def check_alive(self) -> None:
        """Check that the guest can run.

        Raises: GuestFault (the guest is dead).
        """
        if self.death:
            raise GuestFault(Trap(TrapKind.DOUBLE_FAULT, 0), self.death)

    def run(self) -> StopReason:
        """Run until a process waits for the host, or the guest is idle.

        Raises: GuestFault (the guest is dead).
        """
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
                except BaseException:
                    # The handler of a SIGINT raised it.
                    if self._watchdog.disarm():
                        self.death = str(self._fault(0, expired=True))
                    raise
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
        """Return the fault that ended a run, after which the guest is dead.

        `error`: Unicorn's error code, or 0. `expired`: the watchdog has stopped the run.
        """
        ip = self.regs.ip
        if expired:
            # Unicorn: a store in flight at an asynchronous stop is done twice, so the guest cannot continue.
            why = "it ran for too long"
            if self._watchdog.was_unwanted:
                why = "its client was killed"
            elif self._watchdog.was_interrupted:
                why = "it was interrupted"
            return GuestFault(Trap(TrapKind.BUDGET, ip), f"{why}, and was given up at {ip:#x}")
        if error:
            message = f"the emulator stopped at {ip:#x}: {self.engine.strerror(error)}"
            return GuestFault(Trap(TrapKind.FAULT, ip), message)
        return GuestFault(Trap(TrapKind.FAULT, ip), self._panic())

    def _panic(self) -> str:
        """Return the reason why the guest restarts: the message of the last kernel panic on the console."""
        said = self.pc.console.decode("latin1").splitlines()
        panics = (line.partition("Kernel panic - ")[2] for line in reversed(said))
        return f"it has restarted: {next(filter(None, panics), 'unknown reason')}"

    def timer(self) -> None:
        """Advance the time to the timer's interrupt and deliver it; the next run begins with its handler.

        Raises: GuestFault (the timer is off or masked).
        """
        vector = self.pc.timer_vector
        if vector is None:
            raise GuestFault(Trap(TrapKind.FAULT, self.regs.ip), "it waits, but its timer is off")
        self.pc.timer_fires()
        self.cpu.interrupt(vector)

    def run_to_stub(self) -> None:
        """Run until a process waits at the stub; while the guest is idle, advance the time.

        Raises: GuestFault.
        """
        for _ in range(_TIMER_LIMIT):
            if self.run() is AT_STUB:
                return
            self.timer()
        raise GuestFault(Trap(TrapKind.FAULT, self.regs.ip), "it is idle forever")

    def close(self) -> None:
        """Free the engine and its memory. RAM is unmapped when the last view of it is gone."""
        for action in self.before_close:
            action()
        self.before_close.clear()
        self._watchdog.close()
        self.regs.close()
        self.engine.close()
        self.memory.close()
        with suppress(BufferError):
            self.memory.ram.close()
