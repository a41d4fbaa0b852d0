"""Machine: the emulated computer, put together; runs the guest and says why it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import monotonic
from typing import Self

from emulated_kernel.abi import PAGE_SIZE, Hypercall
from emulated_kernel.config import MachineConfig
from emulated_kernel.machine import boot, cpu_x86, layout, loader, quirks
from emulated_kernel.machine.calls import DataSnapshot, HostCalls, map_stack
from emulated_kernel.machine.clock import make_clock
from emulated_kernel.machine.delivery import Delivery
from emulated_kernel.machine.engine import ARCH_X86, MODE_64, Engine
from emulated_kernel.machine.exceptions import NoExceptionState
from emulated_kernel.machine.guest_image import GuestImage
from emulated_kernel.machine.hooks import Breakpoints, TrapHooks
from emulated_kernel.machine.memory import Memory
from emulated_kernel.machine.paging import Prot, X86PageTables
from emulated_kernel.machine.region import Region
from emulated_kernel.machine.registers import ApiRegs, FastRegs, RegisterSet, Regs
from emulated_kernel.machine.runner import Runner
from emulated_kernel.machine.text import Text
from emulated_kernel.machine.traps import GuestFault, HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.machine.vcpu import VCpu

_HOST_SHARE = 4
_HOST_LIMIT = 16 << 20
_BOOT_LIMIT = 10.0
"""Seconds that booting may take, whatever the run budget."""
_ANSWER = ("di", "si", "dx", "r10", "r8", "r9")


class Machine:
    """One emulated computer with a booted kernel, stopped at Hypercall.BOOTED when the constructor returns.

    Not thread-safe: one thread at a time runs or inspects it. While the guest runs, other Python threads run.

    Raises:
        HardwareError: the image does not fit, the architecture is unknown, or the library is broken.
        GuestFault: the kernel stopped otherwise than booted.
    """

    def __init__(self, config: MachineConfig, image: GuestImage) -> None:
        if image.arch != "x86_64":
            raise HardwareError(f"no machine for {image.arch}")
        self.config = config
        self.image = image
        with ExitStack() as unless_built:
            self._resources = unless_built
            self._build_memory()
            self._build_cpu()
            self._build_devices()
            self._boot()
            self._resources = unless_built.pop_all()

    def _build_memory(self) -> None:
        size = self.config.ram_size
        self._engine = Engine(ARCH_X86, MODE_64)
        self._resources.callback(self._engine.close)
        self.memory = Memory(size, min(size // _HOST_SHARE, _HOST_LIMIT), X86PageTables)
        self._ram_address = self._engine.map_ram(0, self.memory.ram)
        self.memory.on_remap = self._engine.flush_tlb
        self._free_ram = loader.load(self.memory, self.image)
        self._pad = layout.HOST_TEXT
        page = self.memory.host_pages.alloc(PAGE_SIZE)
        self.memory.ram[page : page + PAGE_SIZE] = bytes([cpu_x86.HLT]) * PAGE_SIZE
        self.memory.map(self._pad, page, PAGE_SIZE, Prot.READ | Prot.EXEC)
        gdt = layout.DIRECT_MAP + self.memory.host_pages.alloc(PAGE_SIZE)
        self.memory.write(gdt, cpu_x86.gdt())
        cpu_x86.enter_long_mode(self._engine, self.memory.tables.root, gdt)
        self._stack = map_stack(self.memory, 0)

    def _build_cpu(self) -> None:
        """Registers and hooks, the quick way if the self-test finds it."""
        found = quirks.find_cpu_state(self._engine) if self.config.fast_registers else None
        self.regs: Regs = ApiRegs(self._engine) if found is None else FastRegs.at(self._engine, found)
        self._resources.callback(self.regs.close)
        self._hooks = TrapHooks(self._engine, self.regs, NoExceptionState())
        bench = quirks.Bench(self._engine, self.memory, self._hooks, self.regs, self._stack)
        self._self_test = quirks.adapt(bench, found)
        self.cpus = [VCpu(self._engine, 0)]
        self.cpus[0].gs_base = boot.per_cpu_base(self.image)

    def _build_devices(self) -> None:
        image, memory = self.image, self.memory
        lookup = image.kallsyms.lookup_name
        self.text = Text(self._engine, memory)
        for va, data, _, rights in image.segments:
            if rights & Prot.EXEC:
                self.text.adopt(va, data)
        self.user_buffers = Region(
            memory,
            layout.USER_BUFFERS,
            layout.USER_BUFFERS_SIZE,
            unit=PAGE_SIZE,
            prot=Prot.READ | Prot.WRITE | Prot.USER,
        )
        cells = lookup("host_clock")
        view = memory.view(cells, 16) if cells is not None else memoryview(bytearray(16))
        self.clock = make_clock(self.config.clock, view.cast("Q"), self.config.seed)
        cr2 = boot.per_cpu_address(image, "host_cr2")
        self._delivery = Delivery(memory, self.regs, lookup("asm_host_interrupt"), cr2)
        self._hooks.dispatch = self._deliver_or_stop
        self._runner = Runner(
            self._engine, memory, self.regs, self._hooks, clock=self.clock, budget=self.config.run_budget
        )
        self._resources.callback(self._runner.close)
        self.calls = HostCalls(
            self._runner, dict(image.ex_table), return_pad=self._pad, stack_top=self._stack - 24
        )

    def _boot(self) -> None:
        params = boot.write_boot_params(self.memory, self.config, self._free_ram)
        boot.enter(self.regs, self.image, params, self._stack)
        until = monotonic() + _BOOT_LIMIT
        trap = self.run()
        while trap.kind is TrapKind.BUDGET and monotonic() < until:
            trap = self.run()
        if trap.number != Hypercall.BOOTED:
            raise GuestFault(trap)

    @property
    def breakpoints(self) -> Breakpoints:
        """Address of an int3 to its handler, which is called within the run with regs.ip behind the int3."""
        return self._hooks.breakpoints

    @property
    def fault_hook(self) -> Callable[[Trap, Regs], bool] | None:
        """Offered each exception (int3 without a handler too) before the guest gets it; True: dealt with."""
        return self._hooks.fault_hook

    @fault_hook.setter
    def fault_hook(self, hook: Callable[[Trap, Regs], bool] | None) -> None:
        self._hooks.fault_hook = hook

    @property
    def is_running(self) -> bool:
        """Whether this is asked from within a run: in a breakpoint handler or the fault hook."""
        return self._runner.is_running

    def self_test(self) -> list[quirks.SelfTest]:
        """What the start-up self-test found, one entry a deviation of the library."""
        return list(self._self_test)

    def run(self, budget: float | None = None) -> Trap:
        """Run the guest until it stops by itself, or for `budget` seconds instead of the configured ones.

        Raises:
            HardwareError: called from within a run; the emulator failed.
            Exception: what a breakpoint handler or the fault hook raised; the guest stands where it was.
        """
        return self._runner.run(budget=budget)

    def _deliver_or_stop(self, trap: Trap) -> None:
        stop = self._delivery.deliver(trap)
        if stop is not None:
            self._hooks.stop(stop)

    def answer(self, value: int, *args: int) -> None:
        """Answer the hypercall that the guest stopped at (USER: system call number, then its arguments)."""
        regs = self.regs
        regs.ax = value
        for name, argument in zip(_ANSWER, args, strict=False):
            setattr(regs, name, argument)

    def deliver(self, vector: int, error_code: int = 0, cr2: int = 0) -> None:
        """Interrupt the stopped guest: it enters its handler at the next run.

        Raises:
            GuestFault: its stack can't take the frame (DOUBLE_FAULT).
            HardwareError: the image has no interrupt handler.
        """
        if not self._delivery.possible:
            raise HardwareError("the image has no asm_host_interrupt")
        try:
            self._delivery.enter(vector, error_code, cr2)
        except MemoryFault as fault:
            trap = Trap(TrapKind.DOUBLE_FAULT, self.regs.ip, vector, error_code, cr2)
            raise GuestFault(trap) from fault

    def raise_fault(self, fault: MemoryFault) -> None:
        """Within a breakpoint handler: the instruction at regs.ip faults, as by an access of its own."""
        present = self.memory.find(fault.address) is not None
        trap = cpu_x86.access_fault(self.regs.ip, fault.address, write=fault.write, present=present)
        self._hooks.raise_exception(trap)

    def alloc_pages(self, size: int) -> int:
        """Zeroed pages of the host's that the guest can read and write (ring buffers); a direct-map address.

        Raises:
            HardwareError: none left.
        """
        pages = self.memory.host_pages.alloc(size)
        self.memory.write(layout.DIRECT_MAP + pages, bytes(loader.page_up(size)))
        return layout.DIRECT_MAP + pages

    def free_pages(self, va: int) -> None:
        """Give back what `alloc_pages` returned.

        Raises:
            HardwareError: not allocated.
        """
        self.memory.host_pages.free(va - layout.DIRECT_MAP)

    @property
    def interrupts_enabled(self) -> bool:
        """Whether an interrupt may be delivered now (IF); exceptions and WATCHDOG always may."""
        return bool(self.regs.flags & cpu_x86.FLAG_IF)

    def call(self, address: int, *args: int) -> int:
        """Call a guest function; see `HostCalls.call`."""
        return self.calls.call(address, *args)

    def execute(self, start: RegisterSet) -> RegisterSet:
        """Run a guest function from a complete register state; see `HostCalls.execute`."""
        return self.calls.execute(start)

    def trap_of(self, start: RegisterSet, *, fixup: bool = False) -> tuple[Trap, RegisterSet]:
        """Run from a complete register state until anything stops it; see `HostCalls.trap_of`."""
        return self.calls.trap_of(start, fixup=fixup)

    def data_snapshot(self, spans: Iterable[tuple[int, int]] | None = None) -> DataSnapshot:
        """Snapshot of (va, size) spans; by default the image's writable pages and the host-call stack."""
        if spans is None:
            spans = [
                (va, loader.page_up(size))
                for va, _, size, rights in self.image.segments
                if rights & Prot.WRITE
            ]
            spans.append((self._stack - 4 * PAGE_SIZE, 4 * PAGE_SIZE))
        return DataSnapshot(self.memory, self._ram_address, spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the emulator and end the watchdog; the machine can't be used afterwards."""
        self._resources.close()
