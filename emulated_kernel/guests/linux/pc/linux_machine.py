"""LinuxMachine: a machine with its CPU; runs a kernel until it is idle or a process waits for the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum

from emulated_kernel.guests.common.call_time import CallTime
from emulated_kernel.guests.linux.guest_abi import GuestAbi
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.board import Board, CountedTime
from emulated_kernel.guests.linux.pc.cpu_state import cpu_state
from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs, fast_regs
from emulated_kernel.machine.instruction_time import InstructionTime
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.quirks.hook_range import HookRange
from emulated_kernel.machine.run_watchdog import HandlerTime, Watchdog
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import (
    ADDRESS_CALLBACK,
    CODE_CALLBACK,
    HOOK_BLOCK,
    HOOK_CODE,
    Engine,
)

_TIMER_LIMIT = 1 << 20
"""Maximum number of successive timer interrupts in an idle guest.

LinuxMachine.run_to_stub() then assumes that the guest waits for an event that never comes, and fails.
"""

_TICK_BLOCKS = 5_000
"""Number of basic blocks per tick; see LinuxMachine.ticking_in. A real CPU executes many more."""


class StopReason(Enum):
    """Reason for the end of a run."""

    AT_STUB = "a process waits for the host"
    IN_CALL = "a process's system call waits for the host"
    IDLE = "nothing can run before the next interrupt"


# Names in the module, because Python 3.11 calls a function for each member that is looked up in its class.
AT_STUB, IN_CALL, IDLE = StopReason


class LinuxMachine(ABC):
    """One emulated machine; not thread-safe. After a run that took too long, the machine is dead."""

    memory: LinuxMemory
    pc: Board
    """The machine's time and devices."""
    cpu: LinuxCpu
    hooks: TrapHooks

    def __init__(
        self, abi: GuestAbi, model: CpuModel, engine: Engine, memory: LinuxMemory, budget: float
    ) -> None:
        """Create a machine with the RAM `memory`, which is mapped at the physical address 0.

        `abi`: tables of the processor's system calls, registers and structures. `model`: the CPU model for
        the probe engine. `budget`: maximum seconds of one run.
        Raises: HardwareError (Unicorn's CPU state cannot be found).
        """
        self.abi = abi
        """Tables of the processor's system calls, registers and structures."""
        self.memory = memory
        self.damage = DamageReports()
        """Object that logs the damage that is found in the guest's data."""
        self.engine = engine
        self.model = model
        self._ram_address = engine.map_ram(0, memory.ram)
        self._state = cpu_state(engine, model)
        """Address of Unicorn's CPU state in this process."""
        self.regs: Regs = fast_regs(model, engine, self._state)
        self._handler_time = HandlerTime()
        self._stopped: StopReason | None = None
        self.is_running = False
        """Whether the guest runs.

        If a request comes while the guest runs, a callback of the emulator makes it. No other guest code can
        run during the callback.
        """
        self._is_text_stale = False
        self._counted: dict[range, HookRange] = {}
        """Range of code -> hook that counts basic blocks in it; ticking_in() turns the hook on and off."""
        self._blocks: int | None = None
        """Number of counted blocks since the last tick, or None if blocks are not counted now."""
        self._has_ticked = False
        self._watchdog = Watchdog(engine.stop, self._handler_time, budget, engine.is_interrupted_again)
        self._is_reset = False
        self.last_exception: Trap | None = None
        """The latest exception that was delivered to the guest; None before the first."""
        self.before_close: list[Callable[[], object]] = []
        """Functions to call before the emulator is freed."""
        self.death: str = ""
        """Reason why the guest cannot run any more, or "" while it can."""

    def call_time(self) -> CallTime:
        """Return an object for a call that begins now: it limits the call to the CPU time of one run."""
        return CallTime(self._handler_time, self._watchdog.budget)

    def count_instructions(self) -> None:
        """From now on, advance the guest's time by a fixed time for each instruction, trap and host handler.

        Raises: KernelError EOPNOTSUPP (the host has no routines for counting).
        """
        pc = self.pc
        follower = CountedTime(pc.khz) if pc.follower is None else pc.follower
        InstructionTime(self.engine, self.hooks, follower.host_address).start()
        pc.follower = follower
        pc.counts_instructions = True

    def call_at(self, address: int, function: Callable[[], object]) -> None:
        """Call `function` from now on whenever the guest reaches `address`.

        The function may change memory and registers, but not the instruction pointer. If the function raises
        MemoryFault or GuestFault, report the fault as damage of the guest's data, and let the guest continue.
        """

        def called() -> None:
            try:
                function()
            except (MemoryFault, GuestFault) as fault:
                self.damage.report("kernel's data", fault)

        self.engine.add_hook(HOOK_CODE, ADDRESS_CALLBACK(called), at=address)
        # Code that is already translated does not contain the call.
        if not self.is_running:
            self.engine.flush_code()

    def stop_at(self, address: int, function: Callable[[], object]) -> None:
        """From now on, call `function` and end the run whenever the guest reaches `address`.

        The run ends before the instruction at `address`. What run() then returns or raises does not tell of
        this end, so `function` must record it.
        """

        def stop() -> None:
            function()
            self.engine.stop()

        self.call_at(address, stop)

    @contextmanager
    def wanted_until(self, is_unwanted: Callable[[], bool]) -> Iterator[None]:
        """End a run in the `with` block when `is_unwanted` returns True.

        `is_unwanted`: returns True if no client waits for the run's result any more; the watchdog's thread
        calls it. An ended run leaves the machine dead, so the caller must be able to roll the run back.
        """
        self._watchdog.ask(is_unwanted)
        try:
            yield
        finally:
            self._watchdog.ask(None)

    @contextmanager
    def ticking_in(self, code: range) -> Iterator[None]:
        """During the `with` block, deliver timer interrupts while the guest runs the code in `code`.

        The code may busy-wait for jiffies. After each _TICK_BLOCKS basic blocks of the code, the timer
        interrupts as soon as interrupts are enabled, always before a basic block. The count calls Python for
        each block, which is slow.
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
        if self._blocks >= _TICK_BLOCKS and self.cpu.takes_interrupts and self.pc.timer_vector is not None:
            self._blocks = 0
            self._has_ticked = True
            self.engine.stop()

    def _come_to_stub(self, _regs: Regs) -> None:
        self._stopped = AT_STUB
        self.engine.stop()

    def stop_in_call(self) -> None:
        """End the run at the breakpoint that the guest has reached; run() then returns IN_CALL."""
        self._stopped = IN_CALL
        self.engine.stop()

    def take_breakpoints(self) -> None:  # noqa: B027 - only x86 delivers breakpoints without Python
        """From now on, make each breakpoint trap to Python first, because kprobefs probes the guest.

        This implementation does nothing, because its breakpoints always trap to Python first.
        """

    @property
    def delivers_breakpoints(self) -> bool:
        """Whether breakpoints in kernel mode reach the guest's handler without Python."""
        return False

    def watch_reset(self, emergency_restart: int) -> None:
        """From now on, declare the guest dead when it reaches emergency_restart(), which a panic calls.

        Otherwise the guest would try a reset through the keyboard controller, which takes long.
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

        Raises: GuestFault (the guest is dead, or dies in this run).
        """
        if self.death:
            self.check_alive()
        arrivals = self.hooks.arrivals
        arrivals[0] = 0
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
                if arrivals[0]:
                    return AT_STUB
                if self._stopped is not None:
                    return self._stopped
                if self._is_text_stale:
                    self.engine.flush_code()
                elif self._is_idle():
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

        `error`: Unicorn's error code, or 0. `expired`: the watchdog has stopped the run, and `error` is
        ignored. If it is False and `error` is 0, the guest has restarted itself, as after a panic.
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
        """Return why the guest restarts: the last kernel panic on the console, or a general text."""
        said = self.pc.console.decode("latin1").splitlines()
        panics = ("".join(line.partition("Kernel panic - ")[1:]) for line in reversed(said))
        return next(filter(None, panics), "it has restarted")

    @property
    def has_smap(self) -> bool:
        """Whether SMAP is on.

        Then a kernel's loads from user memory fault unless the kernel has set the flag AC.
        """
        return False

    @abstractmethod
    def running_task(self, facts: KernelOffsets) -> Callable[[], int]:
        """Return a function without parameters that returns the address of the running task's task_struct."""

    @abstractmethod
    def regs_end(self, facts: KernelOffsets) -> int:
        """Return the address of the end of the running task's struct pt_regs.

        The task must be in user mode.
        """

    @abstractmethod
    def direct_map(self, facts: KernelOffsets) -> int:
        """Return the virtual address at which the kernel maps the physical address 0."""

    @abstractmethod
    def return_address(self) -> int:
        """Return the return address of the function whose first instruction the CPU has reached."""

    def argument(self, number: int) -> int:
        """Return argument `number` (from 0) of the function whose first instruction the CPU has reached."""
        return self.regs.get(self.model.arguments[number])

    def set_argument(self, number: int, value: int) -> None:
        """Set argument `number` (from 0) of the function whose first instruction the CPU has reached."""
        self.regs.set(self.model.arguments[number], value)

    def _per_cpu(self, facts: KernelOffsets) -> int:
        """Return the virtual address of the CPU's per-CPU area."""
        return self.memory.read_word(self.cpu.root, facts.symbols["__per_cpu_offset"])

    @abstractmethod
    def _is_idle(self) -> bool:
        """Return True if an interrupt can wake the CPU, after a halt has ended the run."""

    @abstractmethod
    def timer(self) -> None:
        """Advance the time to the timer's interrupt and deliver it; the next run begins with its handler.

        Raises: GuestFault (the timer is off or masked).
        """

    def _let_timer_fire(self) -> int:
        """Advance the time to the timer's interrupt; return the interrupt's number.

        Raises: GuestFault (the timer is off or masked).
        """
        number = self.pc.timer_vector
        if number is None:
            raise GuestFault(Trap(TrapKind.FAULT, self.regs.ip), "it waits, but its timer is off")
        self.pc.timer_fires()
        return number

    @abstractmethod
    def follow_text(self, symbols: Mapping[str, int], offsets: Mapping[str, int]) -> None:
        """From now on, drop translated code whenever the guest has changed its text.

        `symbols` and `offsets`: the fields of KernelOffsets with these names.
        """

    def execute(self, sites: Mapping[str, int]) -> None:  # noqa: B027 - only arm64 has such instructions
        """From now on, let the host execute the instructions at `sites` in place of the CPU.

        `sites`: address of an instruction, in hexadecimal -> its encoding; the map KernelOffsets.executed.
        This implementation does nothing, because only arm64 has such instructions.
        """

    def ease_user_access(self, sites: Mapping[str, int]) -> None:  # noqa: B027 - only riscv64 needs it
        """From now on, let the host change SUM at `sites` in place of the CPU.

        Unicorn changes SUM slowly. SUM is RISC-V's permission to access user memory. This implementation does
        nothing, because only riscv64 needs it.

        `sites`: address of an instruction, in hexadecimal -> its encoding; the map KernelOffsets.user_access.
        The memory of these instructions must be mapped.
        """

    def run_to_stub(self) -> None:
        """Run until a process waits at the stub; while the guest is idle, advance the time.

        Raises: GuestFault (the guest is dead, dies, or waits for an event that never comes).
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
