"""RiscvMachine: a RISC-V machine with one hart. The host executes the calls of its firmware (SBI)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence

from emulated_kernel.guests.linux.guest_abi import RISCV64
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.riscv_board import SbiBoard
from emulated_kernel.guests.linux.pc.riscv_cells import CPU_MODEL, RiscvCells
from emulated_kernel.guests.linux.pc.riscv_cpu import RiscvLinuxCpu
from emulated_kernel.guests.linux.pc.riscv_user_access import UserAccess
from emulated_kernel.guests.linux.pc.sv39_memory import Sv39Memory
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.cpu.riscv import CAUSE_ECALL, CAUSE_ILLEGAL, REPORTED_AHEAD, Riscv64Cpu
from emulated_kernel.machine.interrupts.riscv import RiscvTrapHooks
from emulated_kernel.machine.quirks.riscv import LiveBadAddress
from emulated_kernel.machine.traps.trap import MemoryFault, Trap
from emulated_kernel.machine.unicorn_engine import Engine

_THREAD_SIZE = 16 << 10
_SIZE = 4
"""Size in bytes of an uncompressed instruction."""
_RDTIME = 0xC0102073
"""Encoding of the instruction `rdtime`, with 0 as its destination register."""
_DESTINATION = 0xF80
_WORD = (1 << 64) - 1
_REGISTERS = tuple(Riscv64Cpu.registers)


class RiscvMachine(LinuxMachine):
    """One emulated RISC-V machine. RAM begins at the physical address 0.

    Raises: HardwareError (Unicorn's CPU state cannot be found).
    """

    pc: SbiBoard
    cpu: RiscvLinuxCpu

    def __init__(self, ram: mmap.mmap, seed: int, cells: Sequence[int], budget: float) -> None:
        """Create the machine without starting it.

        `seed`: seed of the random steps of the time counter. `cells`: result of find_riscv_cells().
        `budget`: seconds that one run may take.
        """
        engine = Engine(*Riscv64Cpu.engine_mode, CPU_MODEL)
        super().__init__(RISCV64, Riscv64Cpu(), engine, Sv39Memory(ram), budget)
        found = RiscvCells(*cells)
        self.pc = SbiBoard(seed)
        self.cpu = RiscvLinuxCpu(engine, self.regs, self._state, found)
        bad_address = LiveBadAddress(self._state + found.bad_address)
        hooks = RiscvTrapHooks(engine, self.model, self.regs, bad_address, self._handler_time)
        hooks.use_error_cell(engine.address + found.error)
        hooks.dispatch = self._exception
        hooks.call_from_user = self._call_from_user
        hooks.end_runs_at(RISCV64.stub.start, CAUSE_ILLEGAL)
        if hooks.is_native:
            hooks.enter_calls(CAUSE_ECALL, self.cpu.entry())
        self.hooks = hooks
        self._all = memoryview(ram)
        self.user_access = UserAccess(engine, self.regs, self._state, self._state + found.mstatus)

    def _call_from_user(self) -> bool:
        """If the ecall came from user mode, enter the kernel's handler of system calls, and return True.

        Return False if it came from the kernel; see TrapHooks.call_from_user.
        """
        if self.cpu.mode[0]:
            return False
        self.cpu.syscall(self.regs.ip - REPORTED_AHEAD)
        return True

    def _exception(self, trap: Trap) -> None:
        """Handle an exception that Unicorn reports.

        If a task has reached the user stub, end the run. If the exception is an SBI call or an rdtime,
        execute it. Deliver all other exceptions to the guest.
        """
        cause = trap.error_code
        in_kernel = self.cpu.mode[0]
        if cause == CAUSE_ECALL and in_kernel:
            self._call_firmware()
            self.regs.ip = trap.address + _SIZE
        elif cause == CAUSE_ILLEGAL and not in_kernel and trap.address == self.abi.stub.start:
            self._come_to_stub(self.regs)
        elif cause != CAUSE_ILLEGAL or not self._has_read_time(trap.address):
            self.last_exception = trap
            self.cpu.raise_exception(trap)

    def _call_firmware(self) -> None:
        """Execute the SBI call that the kernel has made by an ecall, and set its results."""
        regs = self.regs
        pc = self.pc
        arguments = regs.get("a0"), regs.get("a1")
        error, value = pc.call(regs.get("a7"), regs.get("a6"), arguments, self._all)
        regs.set("a0", error & _WORD)
        regs.set("a1", value)
        if pc.pending or pc.cleared:
            self.cpu.set_pending(pc.pending, cleared=pc.cleared)
        if pc.is_reset:
            self._is_reset = True
            self.engine.stop()

    def _has_read_time(self, ip: int) -> bool:
        """Execute the rdtime instruction at `ip`, and return True; return False for any other instruction."""
        try:
            code = int.from_bytes(self.memory.read(self.cpu.root, ip, _SIZE), "little")
        except MemoryFault:
            return False
        if code & ~_DESTINATION != _RDTIME:
            return False
        self.hooks.take_back_charge()
        time = self.pc.read_tsc()
        destination = code >> 7 & 31
        if destination:
            self.regs.set(_REGISTERS[destination - 1], time)
        self.regs.ip = ip + _SIZE
        return True

    def _is_idle(self) -> bool:
        # Linux halts with interrupts off, and enables them afterwards.
        return True

    def timer(self) -> None:
        """Make the timer's interrupt pending; see LinuxMachine."""
        self.cpu.set_pending(1 << self._let_timer_fire())

    def follow_text(self, symbols: Mapping[str, int], offsets: Mapping[str, int]) -> None:
        """Do nothing, because the kernel changes text through a page that it remaps.

        The change of the mapping makes Unicorn drop translated code.
        """

    def ease_user_access(self, sites: Mapping[str, int]) -> None:
        """From now on, keep cached address translations when the guest changes SUM at `sites`.

        See LinuxMachine.
        """
        self.user_access.take_over(sites, self.memory, self.cpu.root, self._ram_address)

    def running_task(self, facts: KernelOffsets) -> Callable[[], int]:  # noqa: ARG002 - x86 needs it
        """Return a function that returns the address of the running task's task_struct; see LinuxMachine.

        Mirrors: arch/riscv/kernel/entry.S:handle_exception (v6.12), which exchanges tp and sscratch.
        """
        mode = self.cpu.mode
        scratch = self.cpu.scratch
        regs = self.regs
        return lambda: regs.get("tp") if mode[0] else scratch[0]

    def regs_end(self, facts: KernelOffsets) -> int:
        """Return the address of the end of the running task's kernel stack, where its pt_regs ends.

        Mirrors: arch/riscv/include/asm/processor.h:task_pt_regs (v6.12).
        """
        stack = self.running_task(facts)() + facts.offsets["task_struct.stack"]
        return self.memory.read_word(self.cpu.root, stack) + _THREAD_SIZE

    def direct_map(self, facts: KernelOffsets) -> int:
        """Return the start of the direct map; see LinuxMachine."""
        mapping = facts.symbols["kernel_map"] + facts.offsets["kernel_mapping.va_pa_offset"]
        return self.memory.read_word(self.cpu.root, mapping)

    def direct_map_of(self, kernel: LinuxKernel) -> int:
        """Return the virtual address of the start of the direct map of `kernel`, which is running."""
        mapping = kernel.required("kernel_map") + kernel.btf.offset("kernel_mapping.va_pa_offset")
        return self.memory.read_word(self.cpu.root, mapping)

    def return_address(self) -> int:
        """Return the return address, which is in a register; see LinuxMachine."""
        return self.regs.get("ra")

    def close(self) -> None:
        """Free the engine and its memory; see LinuxMachine."""
        self._all.release()
        super().close()
