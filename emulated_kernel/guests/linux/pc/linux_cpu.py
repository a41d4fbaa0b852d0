"""PcCpu: privilege levels, descriptor tables, system calls and exceptions of the PC's x86-64 CPU.

Unicorn 2.1 executes sysret, iret, swapgs, lidt, ltr, wrmsr and mov to control registers as a CPU does. It
leaves `syscall` and all exceptions to its hooks, and its API cannot set a privilege level. The hooks need to
set the level, so they write to Unicorn's own CPU state. The layout of this state is checked for each machine.
"""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

from emulated_kernel.guests.linux.pc.ram import FRAME, LinuxMemory
from emulated_kernel.machine.cpu import x86
from emulated_kernel.machine.cpu.registers import FastRegs, Regs
from emulated_kernel.machine.native.entry_words import LOW, WORD, Check, KernelEntry, moved, stored
from emulated_kernel.machine.native.trap_words import TrapWords
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.fast_named_tuple import NamedTuple

KERNEL_CS = 0x10
KERNEL_DS = 0x18
MSR_LSTAR = 0xC0000082
MSR_SYSCALL_MASK = 0xC0000084
MSR_EFER = 0xC0000080
EFER_LONG_NX = 0xD00
CPU_MODEL = 0
"""Unicorn's id of the CPU model QEMU64. This model has no rdrand, so two boots are equal.

The kernel uses no page table isolation on this model, so kernel entries are short.
"""
PRODUCTION_MODEL = 37
"""Unicorn's id of the CPU model EPYC-Rome, on which guests with a ProductionCpu run.

This model has the most features of server CPUs: SMAP, popcnt, rdtscp.
"""
_CS = 1
_SS = 2
_LONG_CODE = 0xAF9B00
"""Attributes of a 64-bit code segment, in the form in which Unicorn stores them."""
_DATA = 0xCF9300
"""Attributes of a data segment, in the form in which Unicorn stores them."""
_ALL = 0xFFFFFFFF
_ISOLATED = 1 << 12
"""Bit of CR3 that selects the page tables of user mode, if page table isolation is on."""
_CPL = 3
_CS32 = 1 << 4
"""Bit of the emulator's hflags: the code segment has at least 32 bits."""
_SS32 = 1 << 5
"""Bit of the emulator's hflags: the stack segment has at least 32 bits."""
_LONG_MODE = 1 << 14
"""Bit of the emulator's hflags: long mode is active."""
_CS64 = 1 << 15
"""Bit of the emulator's hflags: the code segment has 64 bits."""
_KERNEL_MODE = _CS64 | _CS32 | _SS32
_HAS_ERROR_CODE = frozenset((8, 10, 11, 12, 13, 14, 17))
_USER_ACCESS = 4
_GATE = struct.Struct("<QQ")
_GATE_SIZE = 16
_INTERRUPT_GATE = 14
_TSS_SP0 = 4
_TSS_IST = 0x24
SYSCALL_SIZE = 2
_TSS = 0x40


class _Segment(ctypes.Structure):
    _fields_ = (
        ("selector", ctypes.c_uint32),
        ("base", ctypes.c_uint64),
        ("limit", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class _State(ctypes.Structure):
    """Layout of the beginning of Unicorn's CPUX86State."""

    _fields_ = (
        ("registers", ctypes.c_uint64 * 17),
        ("eflags", ctypes.c_uint64),
        ("cc_dst", ctypes.c_uint64),
        ("cc_src", ctypes.c_uint64),
        ("cc_src2", ctypes.c_uint64),
        ("cc_op", ctypes.c_uint32),
        ("df", ctypes.c_int32),
        ("hflags", ctypes.c_uint32),
        ("hflags2", ctypes.c_uint32),
        ("segments", _Segment * 6),
        ("ldt", _Segment),
        ("tr", _Segment),
        ("gdt", _Segment),
        ("idt", _Segment),
        ("cr", ctypes.c_uint64 * 5),
    )


_CS_AND_SS_AT = _State.segments.offset + _CS * ctypes.sizeof(_Segment)
_CS_AND_SS = struct.Struct("I4xQII" * 2)
_FLAGS = struct.Struct("QQQQIiI")
"""Layout of _State from `eflags` to `hflags`. If `cc_op` is _COMPUTED, `cc_src` has the arithmetic flags."""
_COMPUTED = 1
_ARITHMETIC = 0x8D5
_DIRECTION = 0x400


class Gate(NamedTuple):
    """A decoded gate of the interrupt descriptor table. `entry`: address of the handler."""

    entry: int
    stack: int
    """Number (IST) of the interrupt stack that the gate switches to; 0 if it keeps the stack."""
    disables_interrupts: bool


class CpuTables(NamedTuple):
    """Registers and tables of a running kernel's CPU.

    `root`: physical address of the page tables. `per_cpu`: address of the per-CPU area. `gdt` and `idt`:
    (address, size in bytes). `tss`: (base, limit).
    """

    root: int
    cr4: int
    per_cpu: int
    gdt: tuple[int, int]
    idt: tuple[int, int]
    tss: tuple[int, int]


def _kernel_segments(stack_selector: int) -> bytes:
    return _CS_AND_SS.pack(KERNEL_CS, 0, _ALL, _LONG_CODE, stack_selector, 0, _ALL, _DATA)


_SEGMENTS_OF_SYSCALL = _kernel_segments(KERNEL_DS)
_SEGMENTS_OF_GATE = _kernel_segments(0)


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class LinuxCpu(ABC):
    """Interface of the live CPU of a machine.

    It may be used only while the guest is stopped, or in a hook.
    """

    regs: Regs
    exception_return: ClassVar[bytes] = b""
    """Code of the instruction that returns from exceptions.

    It is b"" on x86, where is_exception_entry() is not implemented.
    """

    def is_exception_entry(self, address: int) -> bool:  # noqa: ARG002
        """Return True if the CPU goes to `address` when an exception occurs in kernel mode.

        Return False for all addresses if exception_return is b"".
        """
        return False

    @property
    @abstractmethod
    def privilege(self) -> int:
        """Current privilege level, numbered as on x86: 0 in the kernel, 3 in user mode."""

    @property
    @abstractmethod
    def root(self) -> int:
        """Physical address of page tables that map the running task's user memory.

        Except on arm64, they map the kernel, too.
        """

    @property
    @abstractmethod
    def takes_interrupts(self) -> bool:
        """Whether interrupts are enabled in the CPU, so that it takes a pending one at once."""

    @abstractmethod
    def as_kernel(self) -> AbstractContextManager[None]:
        """Let the host access guest memory with the kernel's page tables and rights during the `with` block.

        The CPU must not run in the block.
        """

    @abstractmethod
    def set_call(self, values: tuple[int, ...]) -> None:
        """Set the registers of a system call.

        `values`: the arguments and number of the call, in the order of GuestAbi.call; then the values of the
        instruction pointer, and of the registers GuestAbi.counter and GuestAbi.kept. Each implementation sets
        the registers one by one, because a loop over the names would take five times as long.
        """

    @abstractmethod
    def syscall(self, ip: int, values: tuple[int, ...] | None = None) -> None:
        """Execute the system call instruction at `ip`, which user mode has reached.

        `values`: values that set_call() sets first; None: leave the registers unchanged.
        """


class PcCpu(LinuxCpu):
    """The x86-64 CPU of a PC. It may be used only while the guest is stopped, or in a hook.

    Raises: HardwareError (Unicorn's CPU state does not have the layout of `_State`).
    """

    def __init__(self, engine: Engine, regs: Regs, memory: LinuxMemory, state: int) -> None:
        self._engine = engine
        self.regs = regs
        self._memory = memory
        self._state = _State.from_address(state)
        self._code_and_stack = _bytes_at(state + _CS_AND_SS_AT, _CS_AND_SS.size)
        self._flags = _bytes_at(state + _State.eflags.offset, _FLAGS.size)
        self._system_call: tuple[int, int] | None = None
        """(entry point of system calls, mask of the flags to keep); None before the first system call.

        The values are LSTAR and the complement of SYSCALL_MASK, two MSRs, which a kernel sets before its
        first process.
        """
        self._isolates: bool | None = None
        """Whether page table isolation is on; None as long as CR3 has never had the bit _ISOLATED."""
        self._check_layout()

    def _check_layout(self) -> None:
        """Write known values with Unicorn's API, and check that they appear in the expected fields of _State.

        Raises: HardwareError (a field has another value).
        """
        engine = self._engine
        state = self._state
        kept = engine.reg_read(x86.CR3)
        flags = engine.reg_read(x86.EFLAGS)
        engine.reg_write(x86.CR3, 0x5A5A000)
        engine.reg_write(x86.FS_BASE, 0x5A5A0001)
        engine.reg_write_raw(x86.IDTR, x86.TableRegister(0, 0x5A5A0002, 0x123, 0))
        written = _DIRECTION | _ARITHMETIC | x86.FLAG_FIXED
        engine.reg_write(x86.EFLAGS, written)
        seen = state.cr[3], state.segments[4].base, state.idt.base, state.idt.limit
        seen_flags = state.eflags, state.cc_src, state.cc_op, state.df
        engine.reg_write(x86.EFLAGS, flags)
        engine.reg_write(x86.CR3, kept)
        engine.reg_write(x86.FS_BASE, 0)
        expected_flags = written, _ARITHMETIC, _COMPUTED, -1
        if (seen, seen_flags) != ((0x5A5A000, 0x5A5A0001, 0x5A5A0002, 0x123), expected_flags):
            raise HardwareError("unicorn: the layout of its CPU state differs from 2.1.3")

    # State

    @property
    def privilege(self) -> int:
        """Current privilege level: 0 in the kernel, 3 in user mode."""
        return int(self._state.hflags) & _CPL

    @property
    def root(self) -> int:
        """Physical address of page tables that map the kernel and the running task's user memory.

        With page table isolation, user mode uses other tables, in the page after the kernel's tables. The
        tables of user mode lack most of the kernel's memory, so the host never reads memory through them.
        Mirrors: arch/x86/entry/calling.h:PTI_USER_PGTABLE_MASK (v6.1).
        """
        root = int(self._state.cr[3]) & FRAME
        if not root & _ISOLATED:
            return root
        if self._isolates is None:
            self._isolates = not self._memory.maps_kernel_data(root)
        return root ^ _ISOLATED if self._isolates else root

    @property
    def takes_interrupts(self) -> bool:
        """Whether interrupts are enabled in the CPU, so that it takes a pending one at once; see LinuxCpu."""
        return bool(self.regs.flags & x86.FLAG_IF)

    @contextmanager
    def as_kernel(self) -> Iterator[None]:
        """Let the host access guest memory with the kernel's page tables and rights during the `with` block.

        The CPU must not run in the block. With page table isolation, the tables of user mode lack the host's
        own pages in guest memory. An access through these tables would leave a page fault pending in Unicorn,
        which turns the next exception into a double fault.
        """
        state = self._state
        kept = state.hflags
        tables = state.cr[3]
        state.hflags = kept & ~_CPL
        if tables & _ISOLATED:
            state.cr[3] = self.root
        try:
            yield
        finally:
            state.hflags = kept
            state.cr[3] = tables

    def power_on(self, entry: int, stack: int, root: int, gdt: tuple[int, int]) -> None:
        """Put the CPU into 64-bit kernel mode with paging, as the boot protocol requires.

        `entry`: address of the first instruction. `stack`: initial stack pointer. `root`: physical address
        of the page tables. `gdt`: (address, size in bytes).
        Source: Documentation/x86/boot.rst, "64-bit boot protocol".
        """
        engine = self._engine
        regs = self.regs
        self.write_msr(MSR_EFER, EFER_LONG_NX)
        engine.reg_write(x86.CR4, 0x20)
        engine.reg_write(x86.CR3, root)
        engine.reg_write(x86.CR0, x86.CR0_PAGED)
        address, size = gdt
        engine.reg_write_raw(x86.GDTR, x86.TableRegister(0, address, size - 1, 0))
        engine.reg_write_raw(x86.IDTR, x86.TableRegister(0, 0, 0, 0))
        for number in range(6):
            self._set_segment(number, KERNEL_DS, _DATA)
        self._enter_kernel(_SEGMENTS_OF_SYSCALL)
        self._state.hflags |= _LONG_MODE
        regs.flags = x86.FLAG_FIXED
        regs.sp = stack
        regs.ip = entry

    def enter_kernel(self, tables: CpuTables) -> None:
        """Put the CPU into kernel mode of a booted kernel, with interrupts on and the registers `tables`."""
        engine = self._engine
        regs = self.regs
        self.power_on(0, 0, tables.root, tables.gdt)
        engine.reg_write(x86.CR4, tables.cr4)
        engine.reg_write(x86.GS_BASE, tables.per_cpu)
        engine.reg_write_raw(x86.IDTR, x86.TableRegister(0, tables.idt[0], tables.idt[1] - 1, 0))
        self._state.tr.selector = _TSS
        self._state.tr.base, self._state.tr.limit = tables.tss
        regs.flags = x86.FLAG_FIXED | x86.FLAG_IF

    def write_msr(self, number: int, value: int) -> None:
        """Write `value` to the model-specific register `number`."""
        self._engine.reg_write_raw(x86.MSR, x86.Msr(number, value))

    def read_msr(self, number: int) -> int:
        """Return the value of the model-specific register `number`."""
        return int(self._engine.reg_read_raw(x86.MSR, x86.Msr(number, 0)).value)

    def _set_segment(self, number: int, selector: int, flags: int) -> None:
        segment = self._state.segments[number]
        segment.selector = selector
        segment.base = 0
        segment.limit = _ALL
        segment.flags = flags

    def _enter_kernel(self, segments: bytes) -> None:
        self._code_and_stack[:] = segments
        self._state.hflags = self._state.hflags & ~_CPL | _KERNEL_MODE

    # Instructions and exceptions that Unicorn does not execute

    def set_call(self, values: tuple[int, ...]) -> None:
        """Set the registers of a system call; see LinuxCpu."""
        regs = self.regs
        regs.di, regs.si, regs.dx, regs.r10, regs.r8, regs.r9, regs.ax, *rest = values
        regs.ip, regs.cx, regs.bx, regs.bp = rest

    def syscall(self, ip: int, values: tuple[int, ...] | None = None) -> None:
        """Execute the syscall instruction at `ip`; see LinuxCpu.

        Source: Intel SDM vol. 2, SYSCALL.
        """
        regs = self.regs
        if values is not None:
            # A call of set_call() would take longer.
            regs.di, regs.si, regs.dx, regs.r10, regs.r8, regs.r9, regs.ax, *rest = values
            regs.ip, regs.cx, regs.bx, regs.bp = rest
        if self._system_call is None:
            self._system_call = self.read_msr(MSR_LSTAR), ~self.read_msr(MSR_SYSCALL_MASK)
        regs.ip, kept = self._system_call
        # After a return to user mode the flags are in computed form. An API call would cost as much as the
        # rest.
        flags, _, arithmetic, _, form, direction, hidden = _FLAGS.unpack(self._flags)
        flags = flags | arithmetic | direction & _DIRECTION if form == _COMPUTED else regs.flags
        regs.cx = ip + SYSCALL_SIZE
        regs.r11 = flags
        flags = flags & kept | x86.FLAG_FIXED
        direction = -1 if flags & _DIRECTION else 1
        hidden = hidden & ~_CPL | _KERNEL_MODE
        _FLAGS.pack_into(self._flags, 0, flags, 0, flags & _ARITHMETIC, 0, _COMPUTED, direction, hidden)
        self._code_and_stack[:] = _SEGMENTS_OF_SYSCALL

    def entry(self) -> KernelEntry | None:
        """Return the steps by which the host's native code enters the kernel, as syscall() does.

        The steps set the ip to the kernel's entry point minus the size of the syscall instruction, because
        Unicorn adds this size later.
        Return None before the first system call, or if the kernel's mask for system calls does not clear the
        direction flag.
        """
        if self._system_call is None or self._system_call[1] & _DIRECTION:
            return None
        target, kept = self._system_call
        assert isinstance(self.regs, FastRegs)
        start = ctypes.addressof(self._state)
        at = {name: start + getattr(_State, name).offset for name, *_ in _State._fields_}
        at |= {name: self.regs.address_of(name) for name in ("ip", "cx", "r11")}
        segments = start + _CS_AND_SS_AT
        return KernelEntry(
            [Check(at["cc_op"], LOW, _COMPUTED)],
            [
                moved(at["cx"], at["ip"], added=SYSCALL_SIZE),
                moved(at["r11"], at["eflags"]),
                moved(at["r11"], at["cc_src"], kept=WORD),
                moved(at["r11"], at["df"], _DIRECTION, kept=WORD),
                moved(at["eflags"], at["r11"], kept & ~x86.FLAG_FIXED, added=x86.FLAG_FIXED),
                moved(at["cc_src"], at["eflags"], _ARITHMETIC),
                stored(at["cc_dst"], 0),
                stored(at["cc_src2"], 0),
                # The word after cc_op is the direction, 1.
                stored(at["cc_op"], _COMPUTED | 1 << 32),
                moved(
                    at["hflags"], at["hflags"], LOW & ~(_CPL | _KERNEL_MODE), added=_KERNEL_MODE, kept=~LOW
                ),
                *(
                    stored(segments + 8 * number, word)
                    for number, word in enumerate(memoryview(_SEGMENTS_OF_SYSCALL).cast("Q"))
                ),
                stored(at["ip"], target - SYSCALL_SIZE),
            ],
        )

    def raise_exception(self, trap: Trap) -> None:
        """Deliver an exception to the guest through its IDT.

        Raises: GuestFault (the IDT has no gate for the exception, or the stack is not mapped).
        """
        error = None
        if trap.vector in _HAS_ERROR_CODE:
            error = trap.error_code & ~_USER_ACCESS
            if trap.vector == Vector.PAGE_FAULT and self.privilege:
                error |= _USER_ACCESS
        self.regs.ip = trap.address
        if trap.vector == Vector.PAGE_FAULT:
            # An access that the host made for the guest has not set CR2; for the guest's own access it is
            # equal.
            self._state.cr[2] = trap.cr2
        self.interrupt(trap.vector, error)

    def interrupt(self, vector: int, error_code: int | None = None) -> None:
        """Take an interrupt or exception: switch the stack, push the frame, enter the gate.

        `error_code`: pushed after the frame; None if the exception has no error code.
        Source: Intel SDM vol. 3, 6.14.
        Raises: GuestFault (the IDT has no gate for `vector`, or the stack is not mapped).
        """
        regs = self.regs
        state = self._state
        memory = self._memory
        entry, ist, disables = self.gate(vector)
        flags = regs.flags
        stack = regs.sp
        cs = state.segments[_CS].selector
        ss = state.segments[_SS].selector
        frame = [regs.ip, cs, flags, stack, ss]
        if error_code is not None:
            frame.insert(0, error_code)
        tss = state.tr.base
        try:
            if ist:
                stack = memory.read_word(self.root, tss + _TSS_IST + 8 * (ist - 1))
            elif self.privilege:
                stack = memory.read_word(self.root, tss + _TSS_SP0)
            stack = (stack & ~15) - 8 * len(frame)
            memory.write(self.root, stack, struct.pack(f"<{len(frame)}Q", *frame))
        except MemoryFault as fault:
            raise GuestFault(
                Trap(TrapKind.DOUBLE_FAULT, regs.ip, vector), f"no stack for exception {vector}: {fault}"
            ) from None
        if self.privilege:
            self._enter_kernel(_SEGMENTS_OF_GATE)
        cleared = x86.FLAG_TF | x86.FLAG_NT | x86.FLAG_RF | (x86.FLAG_IF if disables else 0)
        regs.sp = stack
        regs.ip = entry
        regs.flags = flags & ~cleared

    def gate(self, vector: int) -> Gate:
        """Return the gate of `vector` in the guest's IDT. Raises: GuestFault (there is no gate)."""
        try:
            low, high = _GATE.unpack(
                self._memory.read(self.root, self._state.idt.base + _GATE_SIZE * vector, _GATE_SIZE)
            )
        except MemoryFault:
            low = 0
            high = 0
        if not low >> 47 & 1 or (vector + 1) * _GATE_SIZE > self._state.idt.limit + 1:
            raise GuestFault(
                Trap(TrapKind.DOUBLE_FAULT, self.regs.ip, vector), f"no gate for vector {vector}"
            )
        entry = low & 0xFFFF | low >> 48 << 16 | (high & 0xFFFFFFFF) << 32
        return Gate(entry, low >> 32 & 7, (low >> 40 & 15) == _INTERRUPT_GATE)

    def watch_gate(self, words: TrapWords, vector: int, ram: int) -> None:
        """Fill in `words`, from which the host's routine for traps learns if it may deliver `vector` itself.

        The words are host addresses of CPU state, and the present content of the IDT's gate for `vector`.
        `ram`: address of the guest's RAM in this process.
        """
        state = self._state
        start = ctypes.addressof(state)
        at = self._memory.translate(self.root, state.idt.base + _GATE_SIZE * vector)
        words.privilege = start + _State.hflags.offset
        words.stack_segment = ctypes.addressof(state.segments[_SS])
        words.code_segment = ctypes.addressof(state.segments[_CS])
        words.idt = ctypes.addressof(state.idt) + _Segment.base.offset
        words.idt_base = state.idt.base
        words.gate = ram + at
        words.gate_low, words.gate_high = _GATE.unpack_from(self._memory.ram, at)
