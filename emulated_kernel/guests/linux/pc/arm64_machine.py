"""Arm64Machine: an arm64 machine with one CPU. The host executes the calls of its firmware (PSCI)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence

from emulated_kernel.guests.linux.guest_abi import ARM64, ENTRY_TASK
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.arm64_cells import CPU_MODEL, Arm64Cells
from emulated_kernel.guests.linux.pc.arm64_cpu import Arm64LinuxCpu
from emulated_kernel.guests.linux.pc.arm64_memory import Arm64Memory
from emulated_kernel.guests.linux.pc.gic_board import (
    CONSOLE,
    CPU_INTERFACE,
    DISTRIBUTOR,
    GicBoard,
)
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.cpu import arm64
from emulated_kernel.machine.cpu.arm64 import Arm64Cpu
from emulated_kernel.machine.interrupts.arm64 import Arm64TrapHooks, Syndrome
from emulated_kernel.machine.traps.trap import MemoryFault, Trap
from emulated_kernel.machine.unicorn_engine import (
    HOOK_INSN,
    SYSTEM_REGISTER_CALLBACK,
    Engine,
)

_THREAD_SIZE = 16 << 10
_SIZE = 4
_WORD = (1 << 64) - 1
_LOW = 0xFFFFFFFF
_HVC = 0xD4000002
_IMMEDIATE = 0x1FFFE0
_RT = 31
"""Mask of the general register's number in mrs and msr. The value 31 means the zero register."""
_MRS = 1
_MSR = 2
"""Unicorn's number of the instruction msr, for HOOK_INSN. _MRS is the number of mrs."""
_DEVICE_SIZE = 0x1000
_PSCI_VERSION = 0x84000000
_PSCI_MIGRATE_INFO_TYPE = 0x84000006
_PSCI_ENDS = 0x84000008, 0x84000009
_PSCI_ANSWERS = {_PSCI_VERSION: 0x10001, _PSCI_MIGRATE_INFO_TYPE: 2}
"""Number of a function of the firmware (PSCI) -> the function's result.

The results mean: version 1.1, and no trusted operating system.
Source: Arm Power State Coordination Interface (DEN 0022).
"""
_NOT_SUPPORTED = -1
_USER_BITS = 48


class Arm64Machine(LinuxMachine):
    """One emulated arm64 machine. RAM begins at the physical address 0.

    Raises: HardwareError (Unicorn's CPU state cannot be found).
    """

    pc: GicBoard
    cpu: Arm64LinuxCpu
    memory: Arm64Memory

    def __init__(self, ram: mmap.mmap, seed: int, cells: Sequence[int], budget: float) -> None:
        """Create the machine without starting it.

        `ram`: the machine's RAM. `seed`: seed of the random steps of the time counter. `cells`: result of
        find_arm64_cells(). `budget`: seconds that one run may take.
        """
        engine = Engine(*Arm64Cpu.engine_mode, CPU_MODEL)
        super().__init__(ARM64, Arm64Cpu(), engine, Arm64Memory(ram), budget)
        self.pc = GicBoard(seed)
        self.cpu = cpu = Arm64LinuxCpu(engine, self.regs, self._state, Arm64Cells(*cells))
        self.memory.kernel_tables = cpu.kernel_tables
        state = Syndrome(cpu.syndrome, cpu.bad_address)
        hooks = Arm64TrapHooks(engine, self.model, self.regs, state, self._handler_time)
        hooks.dispatch = self._exception
        hooks.call_from_user = self._call_from_user
        hooks.end_runs_at(ARM64.stub.start, arm64.BRK_EXCEPTION)
        if hooks.is_native:
            hooks.enter_calls(arm64.SVC_EXCEPTION, cpu.entry(ARM64.stub.syscall))
        self.hooks = hooks
        self._map_devices()

    # Devices

    def _map_devices(self) -> None:
        pc = self.pc
        nothing: Callable[[int, int], None] = lambda _offset, _value: None  # noqa: E731 - a table of functions
        for address, read, write in (
            (DISTRIBUTOR, pc.read_distributor, pc.write_distributor),
            (CPU_INTERFACE, pc.read_interface, nothing),
            (CPU_INTERFACE + _DEVICE_SIZE, lambda _offset: 0, nothing),
            (CONSOLE, pc.read_console, pc.write_console_register),
        ):
            self.engine.map_device(address, _DEVICE_SIZE, self._reading(read), self._writing(write))

    def _reading(self, read: Callable[[int], int]) -> Callable[[int], int]:
        def function(offset: int) -> int:
            value = read(offset)
            self.update_interrupt()
            return value

        return function

    def _writing(self, write: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def function(offset: int, value: int) -> None:
            write(offset, value)
            self.update_interrupt()

        return function

    def update_interrupt(self) -> None:
        """Make an interrupt pending in the CPU if the interrupt controller has a pending interrupt.

        Otherwise, make no interrupt pending.
        """
        self.cpu.see_interrupt(self.pc.has_interrupt)

    # Instructions that the host executes

    def execute(self, sites: Mapping[str, int]) -> None:
        """Make the host execute the accesses to the counter and the timer; see LinuxMachine.

        Unicorn's own counter is the host's clock, and Unicorn's timer raises no interrupt.
        """
        for place, code in sites.items():
            address = int(place, 16)
            kind = code & _ENCODING
            if kind in _READS:
                callback = SYSTEM_REGISTER_CALLBACK(self._read_of(code))
                self.engine.add_hook(HOOK_INSN, callback, at=address, instruction=_MRS)
            elif kind in _WRITES:
                callback = SYSTEM_REGISTER_CALLBACK(self._write_of(code))
                self.engine.add_hook(HOOK_INSN, callback, at=address, instruction=_MSR)
        self.update_interrupt()

    def _read_of(self, code: int) -> Callable[..., int]:
        """Return a callback that executes the mrs instruction `code`.

        The callback returns 1, so Unicorn does not execute the instruction.
        """
        regs = self.regs
        read = _READS[code & _ENCODING]
        pc = self.pc
        name = _name(code)

        def mrs(*_arguments: int) -> int:
            value = read(pc)
            if name is not None:
                regs.set(name, value & _WORD)
            return 1

        return mrs

    def _write_of(self, code: int) -> Callable[..., int]:
        """Return a callback that executes the msr instruction `code`.

        The callback returns 1, so Unicorn does not execute the instruction.
        """
        regs = self.regs
        write = _WRITES[code & _ENCODING]
        pc = self.pc
        name = _name(code)

        def msr(*_arguments: int) -> int:
            write(pc, 0 if name is None else regs.get(name))
            return 1

        return msr

    # Exceptions

    def _call_from_user(self) -> bool:
        """Enter the kernel's handler of system calls, and return True.

        Return False, and do nothing, if the CPU is in the kernel; see TrapHooks.call_from_user.
        """
        if not self.cpu.privilege:
            return False
        # Unicorn reports the address after the svc.
        self.cpu.syscall(self.regs.ip - _SIZE)
        return True

    def _exception(self, trap: Trap) -> None:
        """Handle an exception that Unicorn reports.

        If a task has reached the user stub, end the run. If the kernel calls the firmware, execute the call.
        Deliver all other exceptions to the guest.
        """
        kind = arm64.syndrome_class(trap.error_code)
        if not self.cpu.privilege:
            self.cpu.note_kernel()
            if kind == arm64.CLASS_UNKNOWN and self._calls_firmware(trap.address):
                self._call_firmware()
                self.regs.ip = trap.address + _SIZE
                return
        elif kind == arm64.CLASS_BRK and trap.address == self.abi.stub.start:
            self._come_to_stub(self.regs)
            return
        self.last_exception = trap
        self.cpu.raise_exception(trap)

    def _calls_firmware(self, ip: int) -> bool:
        try:
            code = int.from_bytes(self.memory.read(self.cpu.root, ip, _SIZE), "little")
        except MemoryFault:
            return False
        return code & ~_IMMEDIATE == _HVC

    def _call_firmware(self) -> None:
        """Execute the function of the firmware (PSCI) that an hvc instruction calls.

        x0 contains the function's number; store the result there. The CPU reports hvc as an undefined
        instruction, because there is no hypervisor.
        """
        function = self.regs.get("x0") & _LOW
        if function in _PSCI_ENDS:
            self._is_reset = True
            self.engine.stop()
        self.regs.set("x0", _PSCI_ANSWERS.get(function, _NOT_SUPPORTED) & _WORD)

    def _is_idle(self) -> bool:
        # Linux executes wfi with interrupts masked, and enables them afterwards.
        return True

    def timer(self) -> None:
        """Advance the time to the timer's interrupt, and make this interrupt pending; see LinuxMachine."""
        self._let_timer_fire()
        self.update_interrupt()

    def follow_text(self, symbols: Mapping[str, int], offsets: Mapping[str, int]) -> None:
        """Do nothing, because the kernel writes text through a second mapping.

        Unicorn drops translated code at such writes.
        """

    # The kernel's data

    def running_task(self, facts: KernelOffsets) -> Callable[[], int]:
        """Return a function that returns the address of the running task's task_struct; see LinuxMachine.

        In the kernel, the address is in sp_el0. In user mode, it is in a per-CPU variable.
        Mirrors: arch/arm64/include/asm/current.h:get_current, arch/arm64/kernel/entry.S:kernel_entry (v6.12).
        """
        cpu = self.cpu
        entry_task = self._per_cpu(facts) + facts.per_cpu[ENTRY_TASK]
        slot = self.memory.translate(cpu.root, entry_task) >> 3
        words = self.memory.words
        pstate = cpu.pstate
        stack = cpu.user_stack
        return lambda: stack[0] if pstate[0] & arm64.LEVEL else words[slot]

    def regs_end(self, facts: KernelOffsets) -> int:
        """Return the address of the end of the running task's kernel stack, where its pt_regs ends.

        Mirrors: arch/arm64/include/asm/processor.h:task_pt_regs (v6.12).
        """
        stack = self.running_task(facts)() + facts.offsets["task_struct.stack"]
        return self.memory.read_word(self.cpu.root, stack) + _THREAD_SIZE

    def direct_map(self, facts: KernelOffsets) -> int:  # noqa: ARG002 - others look it up
        """Return the virtual address at which the direct map starts; see LinuxMachine.

        The address is the start of the kernel's half, because RAM starts at the physical address 0.
        Mirrors: arch/arm64/mm/init.c:arm64_memblock_init, without KASLR (v6.12).
        """
        return -(1 << _USER_BITS) & _WORD

    def return_address(self) -> int:
        """Return the return address, which is in a register; see LinuxMachine."""
        return self.regs.get("x30")


def _name(code: int) -> str | None:
    """Return the name of the general register in the mrs or msr `code`, or None for the zero register."""
    number = code & _RT
    return None if number == _RT else f"x{number}"


def _left(pc: GicBoard) -> int:
    return pc.compare - pc.tsc & _LOW


def _set_left(pc: GicBoard, value: int) -> None:
    value &= _LOW
    pc.set_timer(pc.control, pc.tsc + value - (value >> 31 << 32))


_ENCODING = ~_RT & _LOW
_READS: Mapping[int, Callable[[GicBoard], int]] = {
    0xD53BE000: lambda pc: pc.khz * 1000,  # cntfrq_el0
    0xD53BE020: lambda pc: pc.read_tsc(),  # cntpct_el0
    0xD53BE040: lambda pc: pc.read_tsc(),  # cntvct_el0
    0xD53BE300: _left,  # cntv_tval_el0
    0xD53BE320: lambda pc: pc.timer_status,  # cntv_ctl_el0
    0xD53BE340: lambda pc: pc.compare,  # cntv_cval_el0
}
"""Encoding of an mrs instruction, with 0 as general register -> function that returns the value to read."""
_WRITES: Mapping[int, Callable[[GicBoard, int], None]] = {
    0xD51BE300: _set_left,  # cntv_tval_el0
    0xD51BE320: lambda pc, value: pc.set_timer(value, pc.compare),  # cntv_ctl_el0
    0xD51BE340: lambda pc, value: pc.set_timer(pc.control, value),  # cntv_cval_el0
}
"""Encoding of an msr instruction, with 0 as general register -> function that writes the value."""
