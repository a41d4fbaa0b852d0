"""Machine: the complete emulated computer. It runs the guest and reports the reason of each stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Self

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.machine import boot_params, loader
from emulated_kernel.machine.cpu.registers import Regs, api_regs, fast_regs
from emulated_kernel.machine.cpu.vcpu import VCpu
from emulated_kernel.machine.cpu_parts import cpu_parts
from emulated_kernel.machine.guest_calls import HostCalls, map_stack
from emulated_kernel.machine.guest_clock import MachineClock, compare_loops
from emulated_kernel.machine.host_copies import HostCopies
from emulated_kernel.machine.instruction_count import InstructionCount
from emulated_kernel.machine.instruction_time import InstructionTime
from emulated_kernel.machine.interrupts.exceptions import NoExceptionState
from emulated_kernel.machine.memory.guest_memory import GuestPool
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.record_memory import RecordMemory, extra_size
from emulated_kernel.machine.memory_layout import USER_BUFFERS_SIZE
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.quantum import Quantum
from emulated_kernel.machine.quirks import harness as quirks
from emulated_kernel.machine.run_watchdog import HandlerTime
from emulated_kernel.machine.runner import Runner
from emulated_kernel.machine.text.module_space import ModuleSpace
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import PAGE_SIZE, Hypercall, Prot
from emulated_kernel.util.config import MachineConfig

if TYPE_CHECKING:
    from emulated_kernel.machine.text.stale_fetch import StaleFetch

_HOST_SHARE = 4
_HOST_LIMIT = 16 << 20
_BOOT_LIMIT = 5.0
"""Maximum time for booting in seconds, independent of the run budget."""


class Machine(ProbedMachine):
    """An emulated computer with a booted kernel; after the constructor it is stopped at Hypercall.BOOTED.

    Only one thread at a time may run or inspect the machine. Other Python threads can work while the guest
    runs.
    Raises: HardwareError (the image does not fit, the architecture is unknown, or Unicorn is broken),
    GuestFault (the kernel stopped before it had booted).
    """

    memory: Memory
    clock: MachineClock

    def __init__(self, config: MachineConfig, image: KernelImage) -> None:
        super().__init__()
        self._parts = cpu_parts(image.arch)
        self.model = self._parts.model
        self.config = config
        self.image = image
        self._quantum: Quantum | None = None
        with ExitStack() as unless_built:
            self._resources = unless_built
            self._build_memory()
            self._build_cpu()
            self._build_devices()
            self._boot()
            self._resources = unless_built.pop_all()

    def _build_memory(self) -> None:
        size = self.config.ram_size
        self._engine = Engine(*self.model.engine_mode)
        self._resources.callback(self._engine.close)
        host_size = min(size // _HOST_SHARE, _HOST_LIMIT)
        self.memory = Memory(
            size,
            host_size,
            self.model.page_tables,
            self._engine.flush_tlb,
            self.model.word_size,
            extra_size(self.model.layout),
        )
        self._ram_at = self._engine.map_ram(0, self.memory.ram)
        self._free_ram = loader.load(self.memory, self.image, self.model.layout)
        self.records = RecordMemory(
            self.memory, self.model.layout, self.image.abi, lambda: self.per_cpu_bases
        )
        self._pad = self.model.layout.host_text
        page = self.memory.host_pages.alloc(PAGE_SIZE)
        self.memory.ram[page : page + PAGE_SIZE] = self.model.halt * (PAGE_SIZE // len(self.model.halt))
        self.memory.map(self._pad, page, PAGE_SIZE, Prot.READ | Prot.EXEC)
        self.model.power_on(self._engine, self.memory, boot_params.per_cpu_base(self.image))
        self._stack = map_stack(self.memory, self.model, 0)

    def _build_cpu(self) -> None:
        """Create registers and hooks.

        The registers access Unicorn's CPU structure directly if MachineConfig.fast_registers is set and the
        structure's address is found.
        """
        cpu = self.model
        engine = self._engine
        found = quirks.find_cpu_state(engine, cpu) if self.config.fast_registers else None
        self.regs: Regs = api_regs(cpu, engine) if found is None else fast_regs(cpu, engine, found)
        self._resources.callback(self.regs.close)
        self.handler_time = HandlerTime()
        self.hooks = self._parts.hooks(engine, cpu, self.regs, NoExceptionState(), self.handler_time)
        bench = quirks.Bench(self.hooks, self.memory, self._stack)
        self.self_test = self._parts.adapt(bench, found)
        """Results of the start-up self-test, one for each known deviation of Unicorn from a real CPU."""
        self.cpus = [VCpu(engine, cpu, number) for number in range(self.config.cpus)]
        self.cpu = 0
        """Number of the current CPU, which `regs` and `deliver` refer to; `switch_to` changes it."""

    def _build_devices(self) -> None:
        image = self.image
        memory = self.memory
        lookup = image.kallsyms.lookup_name
        self.text = Text(self._engine, self.model, memory, self.config.cpus)
        cells = lookup("host_clock")
        for va, data, _, rights in image.segments:
            if rights & Prot.EXEC:
                self.text.adopt(va, data)
                if cells is not None and self.model.word_size == 4:
                    self.clock_loops += compare_loops(va, data, cells)
        self.host_copies = HostCopies(self.regs, self.model, self.memory, self._ram_at)
        if not self.config.quantum:
            self.host_copies.take_over(self._engine, dict(image.ex_table))
        self.modules = ModuleSpace(self.model, memory, self.text)
        self.user_buffers = GuestPool(
            memory,
            self.model.layout.user_buffers,
            USER_BUFFERS_SIZE,
            unit=PAGE_SIZE,
            prot=Prot.READ | Prot.WRITE | Prot.USER,
        )
        view = memory.view(cells, 16) if cells is not None else memoryview(bytearray(16))
        self.clock = MachineClock(view.cast("Q"), self.config.clock, self.config.seed, self._counting(cells))
        handler = lookup("asm_host_interrupt")
        cr2_cell = boot_params.per_cpu_address(image, "host_cr2")
        self._delivery = self._parts.delivery(self.hooks, memory, handler, cr2_cell)
        self.hooks.dispatch = self._deliver_or_stop
        self._runner = Runner(self.hooks, memory, self.clock, self._stop_run, self.config.run_budget)
        self._resources.callback(self._runner.close)
        self.calls = HostCalls(
            self._runner,
            dict(image.ex_table),
            self.on_leave,
            self.on_give_up,
            return_pad=self._pad,
            stack_top=self._stack - self.model.call_stack_gap,
        )
        self.call = self.calls.call
        self.execute = self.calls.execute
        self.trap_of = self.calls.trap_of

    def _counting(self, cells: int | None) -> InstructionTime | None:
        """Return an object that can advance the guest's clock with each instruction, or None.

        `cells`: address of the clock in the guest; None if the guest has no host_clock. The result is None in
        that case, and for a 32-bit guest. A 32-bit guest reads the time in a loop, which repeats if the time
        has changed during the reading. The loop would never end if each instruction advanced the time.
        """
        if cells is None or self.model.word_size == 4:
            return None
        time = self._ram_at + self.memory.translate(cells)
        return InstructionTime(self._engine, self.hooks, time, self.host_copies)

    def _boot(self) -> None:
        self._stale: StaleFetch | None = None
        self._is_preempted = False
        """Whether the last run was preempted.

        If True, the next run continues it, and doesn't advance the clock first.
        """
        self.boot_ns = time_ns() if self.config.clock == "real" else 0
        """Wall time of the guest's boot in nanoseconds since the epoch; 0 if the clock isn't real."""
        params = boot_params.write_boot_params(
            self.memory, self.model, self.config, self._free_ram, self.boot_ns
        )
        boot_params.enter(self.regs, self.model, self.image, params, self._stack)
        until = monotonic() + _BOOT_LIMIT
        trap = self.run()
        while trap.kind is TrapKind.BUDGET and monotonic() < until:
            trap = self.run()
        if trap.number != Hypercall.BOOTED:
            raise GuestFault(trap, self._panic_message(trap))
        self.per_cpu_bases = boot_params.per_cpu_bases(self.memory, self.image, self.config.cpus)
        if self.config.stale_fetch:
            from emulated_kernel.machine.text.stale_fetch import StaleFetch

            self._stale = StaleFetch(
                self.text, self.model.breakpoints, self.model.fetch_unit, self.config.seed
            )
            self.text.watcher = self._stale
        if self.config.quantum:
            self._quantum = Quantum(self._engine, self.hooks, self.config.quantum, self.config.seed)
        self._cr2_offset = self.image.abi.get("percpu.host_cr2")

    def _panic_message(self, trap: Trap) -> str:
        """Return the message of the kernel panic that ended a run.

        Return "" if `trap` is not a panic, or if the message cannot be read.
        """
        with suppress(MemoryFault):
            if trap.number == Hypercall.PANIC:
                return self.memory.read_cstring(trap.args[0], 200).decode("ascii", "replace")
        return ""

    @property
    def is_running(self) -> bool:
        """Whether the guest runs. The value is True also inside breakpoint handlers and fault hooks."""
        return self._runner.is_running

    def count_instructions(self) -> InstructionCount:
        """Count the instructions of all later runs, for benchmarks; return the object with the count."""
        self.host_copies.leave_to_guest()
        return InstructionCount(self._engine)

    @property
    def run_budget(self) -> float:
        """Maximum CPU time, in seconds, of each later run for which run() gets no `budget`."""
        return self._runner.watchdog.budget

    @run_budget.setter
    def run_budget(self, seconds: float) -> None:
        self._runner.watchdog.budget = seconds

    def run(self, budget: float | None = None) -> Trap:
        """Run the guest until it stops, and return the trap with the reason.

        `budget`: maximum CPU time of the run in seconds; None selects `run_budget`. Raises: HardwareError
        (called during a run; the emulator failed), KernelError EBUSY (a debugger holds the guest), Exception
        (raised by a breakpoint handler or fault hook; the guest remains at its instruction).
        """
        if self._quantum is None:
            return self._runner.run(budget=budget)
        fetched = self._stale.show(self.cpu, self.regs.ip) if self._stale is not None else None
        self._quantum.arm(fetched)
        try:
            # If time advanced at each turn, the compare-and-exchange of the guest's clock might fail forever.
            trap = self._runner.run(tick=not self._is_preempted, budget=budget)
        finally:
            self._quantum.disarm()
            if self._stale is not None:
                self._stale.hide()
        self._is_preempted = trap.kind is TrapKind.PREEMPTED
        if self._stale is not None:
            self._stale.stopped(self.cpu, self.regs.ip, self._is_preempted)
        return trap

    def _stop_run(self) -> None:
        """Stop the current run; called in the watchdog's thread."""
        if self._quantum is None:
            self._engine.stop()
        else:
            self._quantum.stop_soon()

    @property
    def stops_exactly(self) -> bool:
        """Whether a run that exceeds its budget ends between instructions.

        If False, the run can end inside an instruction; the next run then repeats effects of the instruction.
        """
        return self._quantum is not None or self._engine.stops_between_blocks

    def preempt_if(self, may_end: Callable[[], bool]) -> None:
        if self._quantum is not None:
            self._quantum.may_end.append(may_end)

    def finish_interrupt(self, returns_to: int) -> None:
        """Make the next run end when the delivered interrupt has returned to the address `returns_to`.

        The run may end earlier, for example at a trap. If CPUs are never preempted (MachineConfig.quantum is
        0), do nothing.
        """
        if self._quantum is not None:
            self._quantum.stop_at(returns_to)

    def leave(self, within: Callable[[int], bool]) -> None:
        """Run the current CPU, which was preempted, until it leaves the code that `within` describes.

        `within(ip)`: returns True while ip is in this code. Precondition: MachineConfig.quantum is not 0.
        """
        assert self._quantum is not None, "CPUs are only preempted with a quantum"
        self._quantum.stop_outside(within)
        try:
            self._runner.run(tick=False)
        finally:
            self._quantum.disarm()

    def serialise(self) -> None:
        """Drop the prefetched bytes of all CPUs, as a serialising instruction does.

        All CPUs must be stopped. Without MachineConfig.stale_fetch, do nothing.
        """
        if self._stale is not None:
            self._stale.serialise_all()

    def _deliver_or_stop(self, trap: Trap) -> None:
        stop = self._delivery.deliver(trap)
        if stop is not None:
            self.hooks.stop(stop)

    def switch_to(self, number: int) -> None:
        """Save the state of the current CPU, and make CPU `number` the current one.

        Raises: HardwareError (called from within a run), KernelError EBUSY (a debugger holds the guest).
        """
        if number == self.cpu:
            return
        self._runner.check_stopped()
        self.cpus[self.cpu].save()
        self.cpus[number].restore()
        self._look_from(number)

    def _look_from(self, number: int) -> None:
        self.cpu = number
        offset = self._cr2_offset
        self._delivery.use(None if offset is None else self.per_cpu_bases[number] + offset)
        for callback in self.on_switch:
            callback(number)

    def start_cpu(self, number: int, entry: int, stack: int) -> None:
        """Prepare CPU `number`, which is not current: after `switch_to` it starts at `entry`.

        The CPU starts with interrupts off, and with `stack` as its stack pointer.
        """
        here = self.cpus[self.cpu]
        cpu = self.cpus[number]
        here.save()
        self.model.power_on(self._engine, self.memory, self.per_cpu_bases[number])
        area = {self.model.boot_argument: self.per_cpu_bases[number]}
        self.regs.restore(self.model.register_set(ip=entry, sp=stack, **area))
        cpu.save()
        here.restore()

    def at_close(self, action: Callable[[], object], /) -> None:
        self._resources.callback(action)

    @property
    def engine(self) -> Engine:
        return self._engine

    def positions(self) -> list[tuple[int, int]]:
        """Return (instruction pointer, stack pointer) of each CPU, indexed by the CPU's number."""
        here = self.cpu
        return [
            (self.regs.ip, self.regs.sp) if cpu.number == here else (cpu.saved("ip"), cpu.saved("sp"))
            for cpu in self.cpus
        ]

    def all_registers(self) -> list[dict[str, int]]:
        numbers = self.model.all_registers
        here = self.cpu
        return [
            {
                name: self._engine.reg_read(register) if cpu.number == here else cpu.saved_register(register)
                for name, register in numbers.items()
            }
            for cpu in self.cpus
        ]

    def send_back(self, number: int, ip: int) -> None:
        if self.is_running and number != self.cpu:
            self.cpus[number].put("ip", ip)

    def register_values(self) -> list[int]:
        """Return one list with the values of the registers of all CPUs.

        The values are in the order of the CPUs, and for each CPU in the order of CpuModel.registers, with ip
        but without the flags.
        """
        values: list[int] = []
        for cpu in self.cpus:
            read = self.regs.get if cpu.number == self.cpu else cpu.saved
            values += [read(name) for name in self.model.registers]
        return values

    def answer(self, value: int, *args: int) -> None:
        """Answer the hypercall at which the guest stopped.

        `value`: answer in the hypercall's register. For Hypercall.USER, it is the number of a system call,
        and `args` are the call's arguments.
        """
        regs = self.regs
        setattr(regs, self.model.hypercall_register, value)
        for name, argument in zip(self.model.syscall_arguments, args, strict=False):
            setattr(regs, name, argument)

    def deliver(self, vector: int, error_code: int = 0, cr2: int = 0) -> None:
        """Interrupt the stopped guest with `vector`; its interrupt handler begins in the next run.

        `error_code`: the exception's error code. `cr2`: faulting address of a page fault.
        Raises: GuestFault (DOUBLE_FAULT: the guest's stack can't take the frame), HardwareError (the image
        has no interrupt handler).
        """
        if not self._delivery.possible:
            raise HardwareError("the image takes no interrupts")
        if self._stale is not None:
            self._stale.serialise(self.cpu)
        try:
            self._delivery.enter(vector, error_code, cr2)
        except MemoryFault as fault:
            trap = Trap(TrapKind.DOUBLE_FAULT, self.regs.ip, vector, error_code, cr2)
            raise GuestFault(trap) from fault

    def alloc_pages(self, size: int) -> int:
        va = self.model.layout.direct_map + self.memory.host_pages.alloc(size)
        self.memory.write(va, bytes(loader.page_up(size)))
        return va

    def free_pages(self, va: int) -> None:
        self.memory.host_pages.free(va - self.model.layout.direct_map)

    @property
    def interrupts_enabled(self) -> bool:
        """Whether interrupts of the current CPU are enabled (x86: IF, riscv64: SIE).

        Exceptions and WATCHDOG can always be delivered.
        """
        return bool(self.regs.flags & self.model.interrupt_flag)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the emulator and end the watchdog's thread; the machine can't be used afterwards."""
        self._resources.close()
