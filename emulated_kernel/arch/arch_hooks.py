"""The hooks of an instruction set: the list of everything that differs between architectures.

Most hooks work on bytes and need no machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.stack_frames import CFA, IP, Frame, FrameInsn
from emulated_kernel.arch.probe_checks import OptimizationPolicy, ProbeChecker
from emulated_kernel.arch.program.asm_source import Assembler
from emulated_kernel.arch.program.ir import HandlerCode, Program
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.fast_dataclass import dataclass


class ByteMemory(Protocol):
    """Guest memory as seen by an emulation. Both methods raise the machine's fault error on a bad address."""

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes at `va`."""

    def write(self, va: int, data: bytes, /) -> None:
        """Store `data` at `va`."""


@dataclass(frozen=True, slots=True)
class Emulation(ABC):
    """An instruction that is executed in software instead of out of line."""

    next_ip: int
    """Address of the following instruction."""

    @abstractmethod
    def run(self, regs: Any, memory: ByteMemory) -> None:
        """Execute the instruction on the live registers and set `ip` to the next address to execute.

        Raises: the errors of `memory`. The registers are unchanged then.
        """


@dataclass(frozen=True, slots=True)
class ArchSpecificInsn:
    """The prepared form of a probed instruction (struct arch_specific_insn)."""

    length: int
    """Bytes of the probed instruction."""
    slot_bytes: bytes
    """The insn slot's content: the copy, its displacement fixed up, and the breakpoint that ends the step."""
    boostable: bool
    """Whether a jump back may follow the copy in place of the breakpoint."""
    emulate: Emulation | None
    """Set if the instruction must be emulated; its insn slot is never executed then."""


@dataclass(frozen=True, slots=True)
class HandlerStub:
    """Guest code that saves a struct pt_regs, hits a breakpoint, and restores all registers.

    sp points at the struct pt_regs when the breakpoint is hit.
    """

    code: bytes
    trap: int
    """Offset of the breakpoint, in bytes."""


@dataclass(frozen=True, slots=True)
class Detour:
    """Guest code of an optimized probe: the path to a handler in Python, then the replaced instructions.

    All offsets are in bytes from the start of the code.
    """

    code: bytes
    trap: int
    """Offset of the breakpoint at which the handler is called; sp points at a struct pt_regs there."""
    copied: int
    """Offset of the replaced instructions, which a jump back follows."""


@dataclass(frozen=True, slots=True)
class ReturnDispatch:
    """A return trampoline that first looks for a handler in guest code.

    Offsets are in bytes from the start of the code.
    """

    code: bytes
    entry: int
    """Offset of the address that hooked functions return to."""
    trap: int
    """Offset of the breakpoint where Python handles the return; sp points at a struct pt_regs there."""
    finish: int | None
    """Offset at which handlers that use the trampoline's register frame continue.

    None if each handler saves the registers that it needs and returns by itself.
    """


@dataclass(frozen=True, slots=True)
class Registers:
    """Names of a register file: register names in fetchargs -> attributes of the live registers."""

    names: Mapping[str, str]
    """Name after `%` in a fetcharg -> attribute of the register object."""
    arguments: tuple[str, ...]
    """Attributes that hold $arg1, $arg2, ... on function entry."""
    ip: str
    sp: str
    flags: str | None
    return_value: str
    link: str | None = None
    """Attribute holding the return address on function entry; None if the return address is on the stack."""


class ReturnCode(ABC):
    """Generator of return handlers in guest code.

    With `saves_all`, the trampoline saves all registers; otherwise each handler saves the ones that it uses.
    """

    live: LiveRegisters
    """Registers that the caller may read after a function has returned."""

    @abstractmethod
    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        """Return the trampoline for the address `buffer`.

        If `program` finds a handler, it ends in a JumpTo of that handler. `own` is the address that functions
        return to, if it differs from the entry of this trampoline.
        """

    @abstractmethod
    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        """Return a handler for a `dispatch` made with the same `saves_all`.

        If the dispatch has a `finish`, the handler falls off its end into a jump there.
        """


class Arch(ABC):
    """The hooks of one instruction set.

    `code` is always bytes that start at `addr`; it may hold more than one instruction.
    """

    name: str
    """Name of the architecture, as in MachineConfig.arch."""
    bits: int
    word_size: int
    """Bytes of `unsigned long`."""
    registers: Registers
    breakpoint: bytes
    """The shortest breakpoint instruction; when it traps, the CPU reports the ip after it."""
    seen_ip = 0
    """Bytes that the ip seen by a probe's handlers is above the probed address."""
    max_insn_size: int
    """Bytes that preparing a probe reads at its address, and the size of an insn slot."""
    jump_size: int
    """Bytes of a `relative_jump`."""
    call_size: int
    """Bytes of a `relative_call`, and of an fentry site."""
    strategies: Mapping[str, OptimizationPolicy[Any]]
    """Name -> policy by which a jump may replace a breakpoint."""
    disassembler: Disassembler
    assembler: Assembler
    call_link: str | None = None
    """The register in which `relative_call` leaves the return address; None if it is pushed."""
    general_registers: frozenset[str]
    """The register names that a handler program may read."""
    pt_regs: tuple[str, ...]
    """Register names in the order of struct pt_regs, one word each."""
    fixed_registers: Mapping[str, int]
    """pt_regs name -> value, for the registers that have the same value at every hit."""
    return_size: int
    """Bytes of the return instruction that ends the ftrace trampoline."""
    max_repetition: int
    """Maximum size in bytes of the code made by `repetition`."""
    max_detour: int
    """Maximum size in bytes of a detour buffer without a compiled handler."""
    max_copied: int
    """Maximum size in bytes of the code after the handler in a detour buffer; also the maximum for a stub."""
    max_detoured: int
    """Length in bytes of the longest region that a jump can replace, plus one."""
    task_size: int
    """The first address above user space."""
    thread_size = 16 << 10
    """Size in bytes of a kernel stack, which is aligned to this size."""
    interrupt_flag: tuple[str, int] = ("flags", 1 << 9)
    """pt_regs name and bit mask of the interrupt flag, which is set while interrupts are enabled."""
    has_ops_trampolines = False
    """Whether Linux makes a trampoline for each user of fentry sites. Mirrors: ARCH_SUPPORTS_FTRACE_OPS."""
    trap_flag: int
    """Mask of the flag that makes the CPU trap after the next instruction."""
    trap_flag_lead = b""
    """Code that sets the trap flag for the instruction that follows, with no other visible effect."""

    @property
    def mask(self) -> int:
        """The value of a register with all bits set."""
        return (1 << self.bits) - 1

    @property
    def kept_at_return(self) -> frozenset[str]:
        """Attributes of the live registers that hold a function's values after it has returned."""
        returns = self.returns
        return frozenset() if returns is None else returns.live.registers | {self.registers.sp, "ip"}

    def load_decoder(self) -> None:  # noqa: B027 - not every instruction set has a library for it
        """Import the library that decodes instructions. Raises: ImportError, OSError, MemoryError."""

    @abstractmethod
    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        """Return the addresses of the instructions in `code`, up to its end or the first undecodable one."""

    def breakpoint_for(self, length: int) -> bytes:  # noqa: ARG002 - most architectures have only one
        """Return the breakpoint that arms a probe on an instruction of `length` bytes."""
        return self.breakpoint

    @abstractmethod
    def prepare(self, code: bytes, addr: int, slot_addr: int, *, may_fault: bool = False) -> ArchSpecificInsn:
        """Analyse and copy the instruction at `addr` for out-of-line execution at `slot_addr`.

        `may_fault`: an exception table entry exists for `addr`, so the instruction can't be boosted.

        Raises: KernelError EINVAL (the instruction can't be copied), KernelError EOPNOTSUPP (it can be
        neither stepped nor emulated).
        """

    @abstractmethod
    def relative_jump(self, source: int, target: int) -> bytes:
        """Encode a jump of `jump_size` bytes from `source` to `target`.

        Raises: KernelError ERANGE (too far).
        """

    @abstractmethod
    def relative_call(self, source: int, target: int) -> bytes:
        """Encode a call for the fentry site at `source`. Raises: KernelError ERANGE (too far)."""

    def detour_jump(self, region: Region, target: int) -> bytes:
        """Encode the jump that replaces the bytes of a region. Raises: KernelError ERANGE (too far)."""
        return self.relative_jump(region.addr, target)

    @abstractmethod
    def ftrace_trampoline(self) -> HandlerStub:
        """Return the trampoline that armed fentry sites call.

        The saved ip is the address after the call, and the trampoline returns to it.
        """

    ftrace_regs: tuple[str, ...] = ()
    """Registers that matter at a function's entry: arguments, sp, ip. Mirrors: struct ftrace_regs."""
    return_regs: tuple[str, ...] = ()
    """Registers that matter at a function's exit: results, frame pointer.

    Mirrors: struct fgraph_ret_regs (v6.5).
    """

    unwind_roots = frozenset((
        *("startup_64", "startup_32", "_start", "_text", "_stext", "host_secondary_entry", "host_return"),
        *("ret_from_fork", "host_user_mode", "host_user_hlt", "host_user_resume", "host_syscall_return"),
    ))  # fmt: skip
    """Symbols of the image that no function calls, so unwinding ends there; labels inside them count too."""
    interrupt_entries = frozenset(("asm_host_interrupt", "handle_exception"))
    """Symbols that interrupts enter."""
    kept_by_calls: frozenset[str]
    """Registers that a called function preserves."""
    stack_switches = frozenset(("__switch_to_asm",))
    """Functions that save one stack pointer and return on another stack, which they left earlier."""

    @abstractmethod
    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        """Iterate over a function's instructions: address, and effect on the function's stack frame.

        `switches_stack`: the function loads the stack pointer of another stack, which the same code left
        earlier.
        """

    @abstractmethod
    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        """Return the frame that is known before a function's first instruction."""

    def traced_entry(self) -> Frame:
        """Return the frame before the first instruction of a trampoline that an fentry site calls.

        If there is a `call_link`, it holds the return address into the traced function.
        """
        frame = self.entry_frame(by_interrupt=False)
        if self.call_link is not None and self.registers.link is not None:
            link = self.registers.link
            frame.regs |= {self.call_link: (IP, 0), link: (link, 0)}
        return frame

    def detour_entry(self) -> Frame:
        """Return the frame before the first instruction of code that a jump enters.

        No register is known to hold a return address, because code that is jumped to doesn't return.
        """
        regs = {name: (name, 0) for name in self.entry_frame(by_interrupt=False).regs}
        return Frame(regs | {self.registers.sp: (CFA, 0)}, {})

    no_return_hook: tuple[str, ...] = ()
    """Functions that return on a different stack than they were called on. Mirrors: kretprobe_blacklist."""

    trampoline_slot: int
    """Offset from the caller's stack pointer to the real return address in a return trampoline's frame."""

    @property
    def returned_at(self) -> int:
        """Offset from a return handler's stack pointer to the word of the real return address."""
        return self.trampoline_slot + (self.word_size if self.registers.link is None else 0)

    @abstractmethod
    def return_trampoline(self, address: int) -> HandlerStub:
        """Return the return trampoline for `address`, where hooked functions return to.

        The saved sp is that of the caller, the saved ip that of the trampoline. The word above the saved
        registers receives the real return address: the handler stores it there.
        """

    returns: ReturnCode | None = None
    """Generator of return handlers in guest code; None if Python handles all returns."""

    @abstractmethod
    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        """Compile the handler of a probe at `addr` into code that works in any number of detours and stubs.

        With `live`, the code saves only registers that are both in `live` and written by the program. Without
        it, the code saves every register as a struct pt_regs, and sp points at that when the host is called.
        """

    def detour(self, region: Region, buffer: int) -> Detour:
        """Return the detour buffer at `buffer`, whose handler is reached by a breakpoint.

        Raises: KernelError EINVAL, ERANGE (an instruction cannot be moved that far).
        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe (v6.1).
        """
        save, restore = self.around_handler(region)
        template = save + self.breakpoint + restore
        code = template + self.relocated(region, buffer + len(template))
        assert len(code) <= self.max_detour
        return Detour(code, len(save), len(template))

    @abstractmethod
    def around_handler(self, region: Region) -> tuple[bytes, bytes]:
        """Return the code before a detour's breakpoint, and the code after it.

        The first part saves a struct pt_regs, the second restores it.
        """

    @abstractmethod
    def relocated(self, region: Region, to: int) -> bytes:
        """Return the region's instructions for the address `to`, followed by a jump to the end of the region.

        Raises: KernelError EINVAL, ERANGE.
        """

    @abstractmethod
    def probe_checker(
        self, image: ProbedTables, strategy: OptimizationPolicy[Any] | None, *, ftrace: bool
    ) -> ProbeChecker[Any]:
        """Return the probe checker for the kernel of `image`; see ProbeChecker."""

    def strategy(self, names: Iterable[str]) -> OptimizationPolicy[Any] | None:
        """Return the first of the named policies that this architecture has, or None."""
        return next((self.strategies[name] for name in names if name in self.strategies), None)

    @abstractmethod
    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        """Return code for address `at` that calls `entry` as often as the u64 at address `turns` says.

        Each call counts the u64 down. The code ends with a return instruction.
        Raises: KernelError ERANGE (`entry` is too far away).
        """

    def disassemble(self, code: bytes, addr: int) -> list[str]:
        """Disassemble `code` into one line per instruction: address, bytes, mnemonic and operands."""
        return self.disassembler.lines(code, addr)
