"""PcMachine: the PC with its x86-64 CPU."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from emulated_kernel.guests.linux.cpu.cpuid_answers import CpuidAnswers
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
from emulated_kernel.guests.linux.guest_abi import CURRENT_TASK, STACK_TOP, X86_64
from emulated_kernel.guests.linux.kernel_offsets import FREES_TEXT, POKED, TEXT_POKE, KernelOffsets
from emulated_kernel.guests.linux.pc.devices import Pc
from emulated_kernel.guests.linux.pc.emulated_cpuid import emulated_cpuid
from emulated_kernel.guests.linux.pc.linux_cpu import CPU_MODEL, PRODUCTION_MODEL, SYSCALL_SIZE, PcCpu
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu import x86
from emulated_kernel.machine.cpu.registers import FastRegs
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.interrupts.exceptions import LiveExceptionState
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.native.entry_words import KernelEntry
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.native.trap_words import TrapWords
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import (
    CODE_CALLBACK,
    HOOK_CODE,
    HOOK_INSN,
    IN_CALLBACK,
    INSN_CALLBACK,
    OUT_CALLBACK,
    Engine,
)
from emulated_kernel.util.abi import PAGE_SIZE, Vector

_DIRECTION_FLAG = 1 << 10
_FLUSH_FROM = 1000
"""Minimum number of writes to text after which do_sync_core() makes the host drop all translated code.

After fewer writes, only the code of the written text is dropped. The guest patches in batches of 256
addresses, and runs between the batches. If all code were dropped, Unicorn would translate the guest's code
again after each batch.
"""
_WRITTEN = 0x63
"""Bits of the page table entry of a page that the guest has written: present, writable, accessed, dirty."""
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
_UNKNOWN_ENTRY = 1
"""Value of TrapWords.entry_vector that makes the native routine for syscall call Python.

It is used while the kernel's entry point for system calls is unknown.
"""
_RDTSC = 608
"""Unicorn's instruction id of `rdtsc` (x86.h)."""
_RDTSCP = 609
"""Unicorn's instruction id of `rdtscp` (x86.h)."""


class PcMachine(LinuxMachine):
    """An emulated PC with one x86-64 CPU.

    Raises: HardwareError (Unicorn's CPU state cannot be found or has an unknown layout).
    """

    pc: Pc
    cpu: PcCpu

    def __init__(
        self,
        ram: mmap.mmap,
        seed: int,
        cells: Sequence[int],
        budget: float,
        cpu_model: int = CPU_MODEL,
    ) -> None:
        """Create the machine without starting it.

        `seed`: seed of the random steps of the time counter. `cells`: result of find_exception_cells().
        `budget`: seconds that one run may take. `cpu_model`: Unicorn's id of the CPU model.
        """
        engine = Engine(*X86_64Cpu.engine_mode, cpu_model)
        super().__init__(X86_64, X86_64Cpu(), engine, LinuxMemory(ram), budget)
        self.pc = Pc(seed)
        state = self._state
        self.cpu = PcCpu(engine, self.regs, self.memory, state)
        error, in_flight = cells
        exceptions = LiveExceptionState(state + error, state + in_flight)
        self.hooks = TrapHooks(engine, self.model, self.regs, exceptions, self._handler_time)
        self.hooks.dispatch = self._exception
        self.hooks.protection_faults[X86_64.stub.start] = self._come_to_stub
        self.hooks.end_runs_at(X86_64.stub.start, Vector.GENERAL_PROTECTION, state + in_flight)
        self._breakpoint_stub = range(0)
        """Addresses of the guest code that delivers breakpoints; empty before deliver_breakpoints()."""
        self._syscalls = TrapWords()
        """Host memory from which the native routine for the instruction syscall reads what to do."""
        self._entry: KernelEntry | None = None
        """Table by which the native routine enters the kernel at a syscall; None until it is known."""
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
            # Unicorn advances the instruction pointer over the instruction afterwards.
            regs.ip -= SYSCALL_SIZE
            if self._entry is None:
                self._see_entry()
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
            (_RDTSCP, INSN_CALLBACK(rdtscp)),
        ):
            self.engine.add_hook(HOOK_INSN, callback, instruction=number)
        self._hook_syscall(INSN_CALLBACK(syscall))
        self._hook_rdtsc(INSN_CALLBACK(rdtsc))

    def _hook_syscall(self, callback: Any) -> None:
        """Make Unicorn call the host's native routine at syscall, or the Python callback if there is none.

        The routine calls the Python callback until _see_entry() has found the kernel's entry point.
        """
        routine = routine_address("enter_insn")
        if routine is None:
            self.engine.add_hook(HOOK_INSN, callback, instruction=_SYSCALL)
            return
        words = self._syscalls
        words.routine = routine_address("enter")
        words.refused = ctypes.cast(callback, ctypes.c_void_p).value
        words.entry_vector = _UNKNOWN_ENTRY
        self._hook_routine(_SYSCALL, routine, words, callback)

    def _hook_routine(self, instruction: int, routine: int, words: ctypes.Structure, callback: Any) -> None:
        """Make Unicorn call the native routine at the address `routine` for an instruction.

        `instruction`: Unicorn's id of the instruction. `words`: the host memory that the routine reads.
        `callback`: the Python callback that the routine may call.
        """
        self.engine.add_hook(
            HOOK_INSN,
            ctypes.c_void_p(routine),
            instruction=instruction,
            data=ctypes.addressof(words),
            keep=(callback, words),
        )

    def _see_entry(self) -> None:
        """Look up the kernel's entry point for system calls.

        If it is known, the native routine that _hook_syscall() installed enters the kernel at later system
        calls, instead of calling Python.
        """
        self._entry = self.cpu.entry()
        if self._entry is not None:
            self._entry.show(self._syscalls)
            self._syscalls.entry_vector = 0

    def _hook_rdtsc(self, callback: Any) -> None:
        """Make Unicorn call the host's native routine at rdtsc, or the Python callback if there is none."""
        routine = routine_address("rdtsc")
        if routine is None:
            self.engine.add_hook(HOOK_INSN, callback, instruction=_RDTSC)
            return
        assert isinstance(self.regs, FastRegs)
        words = self.pc.words
        words.low = self.regs.address_of("ax")
        words.high = self.regs.address_of("dx")
        words.read_in_python = ctypes.cast(callback, ctypes.c_void_p).value
        self._hook_routine(_RDTSC, routine, words, callback)

    def show_cpu(self, cpu: ProductionCpu, rdmsr_sites: Sequence[int]) -> None:
        """Show the guest a production CPU: replace the results of cpuid and rdmsr.

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
        """Make the guest call other functions, once, before it first executes the function at `address`.

        `calls`: pairs (address of a function, its argument), in the order of the calls. The functions run as
        if the caller of the function at `address` had called them, and may sleep.
        """
        pending = list(calls)

        def arrive() -> None:
            if pending:
                function, argument = pending.pop(0)
                regs = self.regs
                regs.sp -= 8
                self.memory.write(self.cpu.root, regs.sp, address.to_bytes(8, "little"))
                regs.di = argument
                # Unicorn: a write of ip by reg_write() ends the current basic block; a write to regs.ip does
                # not.
                self.engine.reg_write(self.model.registers["ip"], function)

        self.call_at(address, arrive)

    def store_in_host(self, address: int) -> None:
        """From now on, execute the `rep stosb` at `address` in the host, with the same result.

        Unicorn takes 33 ns for each byte. If the guest has not written to a page before, the guest stores
        the first byte to it, because this changes the page table. The guest executes the whole instruction
        if it stores downwards, or stores more bytes than the RAM has.
        """
        regs = self.regs
        memory = self.memory

        def store() -> None:
            root = self.cpu.root
            if regs.flags & _DIRECTION_FLAG or regs.cx > len(memory.ram):
                return
            page = bytes([regs.ax & 0xFF]) * PAGE_SIZE
            while count := regs.cx:
                size = min(count, PAGE_SIZE - regs.di % PAGE_SIZE)
                try:
                    slot, _ = memory.last(root, regs.di)
                    if memory.words[slot] & _WRITTEN != _WRITTEN:
                        return
                    memory.write(root, regs.di, page[:size])
                except MemoryFault:
                    return
                regs.di += size
                regs.cx = count - size

        self.call_at(address, store)

    def follow_text(self, symbols: Mapping[str, int], offsets: Mapping[str, int]) -> None:
        """From now on, drop translated code when the guest runs do_sync_core(), as it does after patching.

        Unicorn does not notice a write of text through another mapping. If __text_poke() was called fewer
        than _FLUSH_FROM times since the last do_sync_core(), drop only the code of the text that these calls
        wrote. Drop all code if no calls were recorded, or if a call wrote something other than text. Also
        drop all code if memory for code was freed, because the memory's next user may write code in another
        way.

        `symbols`: symbol -> address. `offsets`: the map KernelOffsets.offsets; if it lacks the keys POKED, no
        calls are recorded.
        """
        poked: list[tuple[int, int]] | None = None
        registers = dict(enumerate(self.model.arguments))
        of_poke = [registers[offsets[key]] for key in POKED if key in offsets]
        frees = next((symbols[name] for name in FREES_TEXT if name in symbols), None)

        def write(*_arguments: int) -> None:
            if poked is not None and len(poked) < _FLUSH_FROM:
                poked.append((self.regs.get(of_poke[0]), self.regs.get(of_poke[1])))

        def free(*_arguments: int) -> None:
            nonlocal poked
            poked = None

        def sync(*_arguments: int) -> None:
            nonlocal poked
            changed, poked = poked, []
            # If this hook has stopped the run, the next run begins here and calls it a second time.
            if self._is_text_stale:
                self._is_text_stale = False
            elif changed and len(changed) < _FLUSH_FROM and self._are_text(changed):
                for each in changed:
                    self.engine.remove_code(*each)
            else:
                self._is_text_stale = True
                self.engine.stop()

        self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(sync), at=symbols["do_sync_core"])
        if len(of_poke) == len(POKED) and frees is not None and TEXT_POKE in symbols:
            self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(write), at=symbols[TEXT_POKE])
            self.engine.add_hook(HOOK_CODE, CODE_CALLBACK(free), at=frees)

    def _are_text(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return True if the CPU can execute the code in each of `ranges`, pairs (address, size).

        Return False if a range is larger than a page. Each page is checked only once.
        """
        pages = set[int]()
        for va, size in ranges:
            if size > PAGE_SIZE:
                return False
            pages.add(va & -PAGE_SIZE)
            pages.add(va + size - 1 & -PAGE_SIZE)
        root = self.cpu.root
        walks = (self.memory.walk(root, page) for page in pages)
        return all(walk is not None and self.memory.is_executable(walk[1]) for walk in walks)

    def deliver_breakpoints(self, stub: range, cells: int) -> None:
        """From now on, make the guest continue in `stub` at each breakpoint in kernel mode, without Python.

        `stub`: addresses of the guest code that delivers the exception to the guest's handler. `cells`:
        physical address of the words that this code pushes as the exception frame: stack segment, stack
        pointer, code segment and ip. At each breakpoint, the host writes them before the code runs.
        """
        words = self.hooks.words
        assert isinstance(self.regs, FastRegs)
        self._breakpoint_stub = stub
        self.cpu.watch_gate(words, Vector.BREAKPOINT, self._ram_address)
        words.sp = self.regs.address_of("sp")
        words.cells = self._ram_address + cells
        words.stub = stub.start

    def take_breakpoints(self) -> None:
        """From now on, make each breakpoint trap to Python first, because kprobefs probes the guest."""
        self.hooks.words.stub = 0

    @property
    def delivers_breakpoints(self) -> bool:
        """Whether breakpoints in kernel mode reach the guest's handler without Python.

        If False, each breakpoint traps to Python first.
        """
        return bool(self.hooks.words.stub)

    def _exception(self, trap: Trap) -> None:
        self.last_exception = trap
        if trap.address in self._breakpoint_stub:
            what = f"no stack for exception {Vector.BREAKPOINT}: {trap.cr2:#x} is not mapped"
            raise GuestFault(Trap(TrapKind.DOUBLE_FAULT, trap.address, Vector.BREAKPOINT), what)
        self.cpu.raise_exception(trap)

    @property
    def has_smap(self) -> bool:
        return bool(self.engine.reg_read(x86.CR4) & x86.CR4_SMAP)

    def running_task(self, facts: KernelOffsets) -> Callable[[], int]:
        """Return a function that returns the address of the running task's task_struct; see LinuxMachine."""
        cell = self._per_cpu(facts) + facts.per_cpu[CURRENT_TASK]
        index = self.memory.translate(self.cpu.root, cell) >> 3
        # Each request calls it several times. A function in Python would take longer.
        return partial(self.memory.words.__getitem__, index)

    def regs_end(self, facts: KernelOffsets) -> int:
        """Return the end of the running task's struct pt_regs; see LinuxMachine."""
        return self.memory.read_word(self.cpu.root, self._per_cpu(facts) + facts.per_cpu[STACK_TOP])

    def direct_map(self, facts: KernelOffsets) -> int:
        """Return the start of the direct map; see LinuxMachine."""
        return self.memory.read_word(self.cpu.root, facts.symbols["page_offset_base"])

    def return_address(self) -> int:
        """Return the return address, which is on the stack; see LinuxMachine."""
        return self.memory.read_word(self.cpu.root, self.regs.sp)

    def _is_idle(self) -> bool:
        return self.cpu.takes_interrupts

    def timer(self) -> None:
        """Deliver the timer's interrupt; see LinuxMachine."""
        self.cpu.interrupt(self._let_timer_fire())
