"""The hooks of an instruction set: all operations that differ between architectures.

Most hooks work on bytes and need no machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import AddressName, Disassembler, unnamed
from emulated_kernel.arch.analysis.probe_rules import ProbeRules
from emulated_kernel.arch.analysis.stack_frames import CFA, IP, Frame, FrameInsn
from emulated_kernel.arch.probe_checks import OptimizationPolicy, ProbeChecker
from emulated_kernel.arch.program.asm_source import Assembler
from emulated_kernel.arch.program.ir import HandlerCode, Program
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple


class ByteMemory(Protocol):
    """Guest memory as an emulation accesses it.

    Both methods raise the machine's fault error on a bad address.
    """

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes at `va`."""

    def write(self, va: int, data: bytes, /) -> None:
        """Store `data` at `va`."""


@dataclass(frozen=True, slots=True)
class Emulation(ABC):
    """A probed instruction that is executed in software instead of out of line."""

    next_ip: int
    """Address of the instruction after the emulated one."""

    @abstractmethod
    def run(self, regs: Any, memory: ByteMemory) -> None:
        """Execute the instruction on the registers `regs`, and set their `ip` to the next address to execute.

        Raises: the errors of `memory`; in that case, the registers are unchanged.
        """


@dataclass(frozen=True, slots=True)
class ArchSpecificInsn:
    """A probed instruction, prepared for execution at a hit (struct arch_specific_insn)."""

    length: int
    """Length of the probed instruction in bytes."""
    slot_bytes: bytes
    """Content of the insn slot: a copy of the instruction that works there, and a breakpoint after it."""
    boostable: bool
    """Whether a jump back to the probed function may replace the breakpoint after the copy."""
    emulate: Emulation | None
    """Emulation of the instruction; None if the insn slot is executed.

    If the instruction is emulated, its insn slot is never executed.
    """


@dataclass(frozen=True, slots=True)
class HandlerStub:
    """Guest code that saves a struct pt_regs, hits a breakpoint, and restores all registers.

    sp points at the struct pt_regs when the breakpoint is hit.
    """

    code: bytes
    trap: int
    """Offset of the breakpoint in the code, in bytes."""


@dataclass(frozen=True, slots=True)
class Detour:
    """Guest code of an optimized probe: it calls a handler in Python, and runs the replaced instructions.

    All offsets are in bytes from the start of the code.
    """

    code: bytes
    trap: int
    """Offset of the breakpoint at which the handler is called; sp points at a struct pt_regs there."""
    copied: int
    """Offset of the copied instructions, which are followed by a jump back."""


class OriginalPlace(NamedTuple):
    """Place in the probed code that corresponds to an address in relocated instructions.

    `address`: address of the original instruction.
    """

    address: int
    pushed: int = 0
    """Number of bytes that the relocated instruction's code before the address has pushed."""
    is_calling: bool = False
    """Whether the address is in a relocated call that has stored its return address but has yet to jump."""


class StubEnd(NamedTuple):
    """Code at the end of a stub, with the effect of the emulated instruction at the probed address.

    A stub is the compiled handlers of a breakpoint hit.
    """

    code: bytes
    leads: Mapping[int, int | LinkedJump] = MappingProxyType({})
    """Address of a breakpoint in the code -> where the guest continues: an address, or a jump to emulate.

    If there are such breakpoints, each hit runs exactly one of them.
    """
    by_python: int | None = None
    """Address of a breakpoint at which Python must emulate the instruction; None if there is none."""


@dataclass(frozen=True, slots=True)
class CodePart:
    """A named part of generated code, for listings."""

    name: str
    start: int
    """Address or offset of the part's first byte."""


@dataclass(frozen=True, slots=True)
class ReturnDispatch:
    """Code of a return trampoline that looks for a compiled handler, and traps to Python if it finds none.

    Offsets are in bytes from the start of the code.
    """

    code: bytes
    entry: int
    """Offset of the address that hooked functions return to."""
    trap: int
    """Offset of the breakpoint where Python handles the return; sp points at a struct pt_regs there."""
    finish: int | None
    """Offset of the code that restores the registers from the trampoline's register frame, and returns.

    Each handler ends in a jump to this code. The value is None if handlers do not use the frame. Then each
    handler saves the registers that it needs, and returns by itself.
    """


@dataclass(frozen=True, slots=True)
class Registers:
    """Names of an architecture's registers: in fetchargs, and as attributes of the object that holds them."""

    names: Mapping[str, str]
    """Name after `%` in a fetcharg -> attribute of the object that holds the registers."""
    arguments: tuple[str, ...]
    """Attributes of the registers that hold $arg1, $arg2, ... on function entry."""
    ip: str
    sp: str
    flags: str | None
    return_value: str
    link: str | None = None
    """Attribute of the register with the return address on function entry; None if it is on the stack."""


class TextReturns(ABC):
    """Generator of code for unused bytes of the kernel's text.

    Hooked functions return to this code, which enters the return trampoline.
    """

    @abstractmethod
    def filler_size(self, code: bytes) -> int:
        """Return the number of unused bytes at the end of a function's code."""

    @abstractmethod
    def trampoline_entry(self, source: int, trampoline: int) -> bytes:
        """Return code to put at `source` in the kernel's text: it enters the return trampoline `trampoline`.

        A function's return through `source` takes no more instructions than a return directly to
        `trampoline`. The code has Arch.call_size bytes. Raises: KernelError ERANGE (too far).
        """


class ReturnCode(ABC):
    """Generator of return handlers in guest code.

    If the parameter `saves_all` of the methods is True, the trampoline saves all registers. If it is False,
    each handler saves the registers that it uses.
    """

    live: LiveRegisters
    """Registers that the caller may read after a function has returned."""
    preserves_all = False
    """Whether the code preserves all registers except those that a return itself uses, without `saves_all`.

    If False, handlers are compiled without `saves_all` only for functions whose callers follow the calling
    convention. Other callers may rely on registers that the convention lets a function change.
    """

    @abstractmethod
    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        """Return the return trampoline for the address `buffer`.

        `program` looks for a compiled handler; if there is one, the program goes to it by the op JumpTo.
        `own`: address to which hooked functions return; None: the entry of this trampoline. `saves_all`: if
        True, the trampoline saves all registers; if False, each handler saves those that it uses.
        """

    @abstractmethod
    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        """Return the code of a return handler to which the trampoline of dispatch() can jump.

        `saves_all` must be the same as for dispatch(). If the result of dispatch() has a `finish`, the caller
        must append a jump to `finish` to the handler.
        """


class Arch(ABC):
    """The hooks of one instruction set.

    In all methods, `code` is the machine code at `addr`. It may contain more than one instruction.
    """

    name: str
    """Name of the architecture, as in MachineConfig.arch."""
    bits: int
    word_size: int
    """Size of `unsigned long` in bytes."""
    registers: Registers
    breakpoint: bytes
    """The shortest breakpoint instruction. When it traps, the CPU reports the address after it as ip."""
    handler_ip_offset = 0
    """The ip that a probe's handlers see, minus the probed address, in bytes."""
    max_insn_size: int
    """Size of an insn slot in bytes; prepare() needs as many bytes of code at the probed address."""
    jump_size: int
    """Size in bytes of the code that `relative_jump` returns."""
    jump_back_size: int
    """Size in bytes of the jump to a detour, and of the jump at the end of a detour."""
    call_size: int
    """Size in bytes of the code that `relative_call` returns, and of an fentry site."""
    strategies: Mapping[str, OptimizationPolicy[Any]]
    """Name -> optimization policy: the rules that decide where a jump may replace a breakpoint."""
    disassembler: Disassembler
    assembler: Assembler
    current_register: str | None = None
    """Register that holds the running task's address in the kernel; None if a per-CPU variable holds it."""
    call_link: str | None = None
    """Register in which `relative_call` stores the return address; None if the call pushes it."""
    handler_call_link: str | None = None
    """Register with the address after the fentry site, while a compiled handler called from the site runs.

    The value is None if `call_link` is this register.
    """
    general_registers: frozenset[str]
    """Names of the registers that a handler program may read."""
    pt_regs: tuple[str, ...]
    """Register names in the order of struct pt_regs, one word each."""
    fixed_registers: Mapping[str, int]
    """pt_regs name -> value, for the fields that have the same value at every hit."""
    return_size: int
    """Size in bytes of the return instruction at the end of the ftrace trampoline."""
    routine_return: bytes
    """Code that returns from guest code which ir.CallPerCpu has called."""
    max_repetition: int
    """Maximum size in bytes of the code that `repetition` returns."""
    max_detour: int
    """Maximum size in bytes of a detour buffer without a compiled handler."""
    max_copied: int
    """Maximum size in bytes of the code after the handler in a detour buffer or a stub."""
    max_detoured: int
    """Upper limit, exclusive, of the length in bytes of a region that a jump replaces."""
    task_size: int
    """The first address above user space."""
    thread_size = 16 << 10
    """Size in bytes of a kernel stack, which is aligned to this size."""
    interrupt_flag: tuple[str, int] = ("flags", 1 << 9)
    """pt_regs name and bit mask of the flag that masks or enables interrupts; see has_interrupt_mask."""
    has_interrupt_mask = False
    """True: `interrupt_flag` is set while interrupts are masked. False: it is set while they are enabled."""
    is_breakpoint_nmi = True
    """Whether Linux counts a breakpoint in kernel mode as an NMI; trace records then show NMI context."""
    has_ops_trampolines = False
    """Whether Linux makes an ftrace trampoline for each ftrace_ops. Mirrors: ARCH_SUPPORTS_FTRACE_OPS."""
    reads_user = True
    """Whether kernel code can read user memory at any time, without functions such as copy_from_user().

    If False, a compiled handler may load from user memory only between the ops UserAccessBegin and
    UserAccessEnd; any other such load faults. Addresses in the lower half are then those of user memory.
    """
    user_access = b""
    """Code that handlers call to allow loads from user memory, and to forbid them again; see reads_user.

    The value is empty if handlers contain these instructions themselves.
    """
    user_access_sites: tuple[int, ...] = ()
    """Offsets in `user_access` of the instructions that the host can execute in place of the CPU."""
    trap_flag: int
    """Mask of the flag that makes the CPU trap after the next instruction; 0 if the CPU has no such flag."""
    trap_flag_lead = b""
    """Code that sets the trap flag for the instruction that follows, with no other visible effect."""

    @property
    def mask(self) -> int:
        """Value of a register with all bits set."""
        return (1 << self.bits) - 1

    @property
    def valid_at_return(self) -> frozenset[str]:
        """Registers that keep their values from a function's return until a return handler reads them."""
        returns = self.returns
        return frozenset() if returns is None else returns.live.registers | {self.registers.sp, "ip"}

    def share_user_access(self, address: int) -> None:  # noqa: B027 - most architectures have none
        """Set the address of a copy of the code `user_access`.

        Handlers that are compiled later call this copy.
        """

    def load_decoder(self) -> None:  # noqa: B027 - not every instruction set has a library for it
        """Import the library that decodes instructions, so that no later call opens files.

        Raises: ImportError, OSError, MemoryError.
        """

    @abstractmethod
    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        """Return the addresses of the instructions in `code`, up to the first undecodable instruction."""

    def breakpoint_for(self, length: int) -> bytes:  # noqa: ARG002 - most architectures have only one
        """Return the breakpoint instruction with which a probe replaces an instruction of `length` bytes."""
        return self.breakpoint

    @abstractmethod
    def prepare(
        self,
        code: bytes,
        addr: int,
        slot_addr: int,
        *,
        rules: ProbeRules = frozenset(),
        may_fault: bool = False,
    ) -> ArchSpecificInsn:
        """Analyse the instruction at `addr`, and copy it for out-of-line execution at `slot_addr`.

        `may_fault`: True if an exception table entry exists for `addr`; then the instruction can't be
        boosted. `rules`: as for probe_checker().

        Raises: KernelError EINVAL (the instruction can't be copied), EOPNOTSUPP (the instruction can be
        neither stepped nor emulated).
        """

    @abstractmethod
    def relative_jump(self, source: int, target: int) -> bytes:
        """Encode a jump of `jump_size` bytes from `source` to `target`.

        Raises: KernelError ERANGE (too far).
        """

    @abstractmethod
    def relative_call(self, source: int, target: int) -> bytes:
        """Encode a call from the fentry site at `source` to `target`.

        Raises: KernelError ERANGE (too far).
        """

    def relative_calls(self, targets: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
        """Yield (fentry site, encoded call) for each item of `targets`: fentry site -> target of its call.

        Raises: KernelError ERANGE (too far).
        """
        return ((site, self.relative_call(site, target)) for site, target in targets.items())

    def detour_jump(self, region: Region, target: int) -> bytes:
        """Encode the jump to `target` that replaces a region. Raises: KernelError ERANGE (too far)."""
        return self.relative_jump(region.addr, target)

    def detour_starts(self, region: Region) -> range | None:  # noqa: ARG002 - most jumps reach everything
        """Return the addresses at which the detour of `region` can start; None if nothing restricts them."""
        return None

    @abstractmethod
    def ftrace_trampoline(self) -> HandlerStub:
        """Return the trampoline to which armed fentry sites make a call.

        The saved ip is the address after the call. The trampoline returns to the saved ip, which handlers may
        change.
        """

    ftrace_regs: tuple[str, ...] = ()
    """Registers that a function's entry handler may read: arguments, sp, ip. Mirrors: struct ftrace_regs."""
    return_regs: tuple[str, ...] = ()
    """Registers that a function's exit handler may read: results, frame pointer.

    Mirrors: struct fgraph_ret_regs (v6.5).
    """

    unwind_roots = frozenset((
        *("startup_64", "startup_32", "_start", "_text", "_stext", "host_secondary_entry", "host_return"),
        *("ret_from_fork", "host_user_mode", "host_user_hlt", "host_user_resume", "host_syscall_return"),
    ))  # fmt: skip
    """Symbols at which unwinding ends: entry points and their labels, whose code no function calls."""
    interrupt_entries = frozenset(("asm_host_interrupt", "handle_exception"))
    """Symbols at which interrupts enter the kernel."""
    callee_saved: frozenset[str]
    """Names of the registers that a called function preserves."""
    stack_switches = frozenset(("__switch_to_asm",))
    """Functions that save sp, load an sp that an earlier call has saved, and return on that stack."""

    @abstractmethod
    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        """Yield the address of each instruction of a function, and its effect on the function's stack frame.

        `switches_stack`: True if the function is one of `stack_switches`. Such a function loads the stack
        pointer from memory, and returns on another stack, which an earlier call of it has left.
        """

    @abstractmethod
    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        """Return the stack frame before a function's first instruction.

        `by_interrupt`: True if an interrupt enters the function, False if a call does.
        """

    def traced_entry(self) -> Frame:
        """Return the stack frame before the first instruction of a trampoline that an fentry site calls.

        If there is a `call_link` register, it holds the return address into the traced function.
        """
        frame = self.entry_frame(by_interrupt=False)
        if self.call_link is not None and self.registers.link is not None:
            link = self.registers.link
            frame.regs |= {self.call_link: (IP, 0), link: (link, 0)}
        return frame

    def detour_entry(self) -> Frame:
        """Return the stack frame before the first instruction of code that a jump enters, such as a detour.

        No register is known to hold a return address, because a jump stores none.
        """
        regs = {name: (name, 0) for name in self.entry_frame(by_interrupt=False).regs}
        return Frame(regs | {self.registers.sp: (CFA, 0)}, {})

    no_return_hook: tuple[str, ...] = ()
    """Functions that can't be return-probed, because they return on another stack than that of their call.

    Mirrors: kretprobe_blacklist.
    """

    trampoline_slot: int
    """Offset in bytes, from the caller's sp, of the real return address in a return trampoline's frame."""

    @property
    def returned_at(self) -> int:
        """Distance in bytes from a return handler's sp to the word with the real return address."""
        return self.trampoline_slot + (self.word_size if self.registers.link is None else 0)

    def hooked_slot(self, pointer: int, slots: Iterable[int]) -> int | None:  # noqa: ARG002 - some need them
        """Return the stack slot of the hooked call that the kernel's unwinder has found; None if none fits.

        `slots`: stack slots of all pending calls. `pointer`: address that the unwinder passes to
        ftrace_graph_ret_addr(). In this base class, that address is the slot itself.
        """
        return pointer

    @abstractmethod
    def return_trampoline(self, address: int) -> HandlerStub:
        """Return the return trampoline for the address `address`. Hooked functions return to it.

        The saved sp is the caller's, and the saved ip is the trampoline's address. The handler must store the
        real return address in the word above the saved registers.
        """

    text_returns: TextReturns | None = None
    """Generator of code in the kernel's text to which hooked calls return; None if that is unnecessary."""
    returns: ReturnCode | None = None
    """Generator of return handlers in guest code; None if Python handles every return."""

    @abstractmethod
    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        """Compile the handler of a probe at `addr` into code that works in any number of detours and stubs.

        `live`: the code saves only the registers that are in `live` and that the program writes. None: the
        code saves every register in a struct pt_regs, to which sp points during host calls.
        """

    def called_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        """Compile the handler `program` for calls from the fentry site at `addr`; see handler_code()."""
        return self.handler_code(program, addr, live)

    def detour(self, region: Region, buffer: int) -> Detour:
        """Return the detour of a region for the address `buffer`.

        A breakpoint in it calls the handler in Python, which finds the probe by the breakpoint's address. So
        the detour has no operand for the probe, and no call of optimized_callback().
        Raises: KernelError EINVAL, ERANGE; see relocated().
        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe, optprobe_template_val,
        optprobe_template_call, optprobe_template_end (v6.1).
        """
        save, restore = self.around_handler(region)
        template = save + self.breakpoint + restore
        code = template + self.relocated(region, buffer + len(template))
        assert len(code) <= self.max_detour
        return Detour(code, len(save), len(template))

    def detour_parts(self, start: int, trap: int, copied: int, end: int) -> tuple[CodePart, ...]:
        """Return the parts of a detour from `start` to `end`. `trap` and `copied`: see Detour.

        All arguments are addresses, or all are offsets in bytes from the start of the detour.
        """
        return (
            CodePart("save the registers", start),
            CodePart("call the handlers", trap),
            CodePart("restore the registers", trap + len(self.breakpoint)),
            *self.copied_parts(copied, end),
        )

    def copied_parts(self, copied: int, end: int) -> tuple[CodePart, ...]:
        """Return the parts at the end of a detour: the instructions from `copied` on, and the jump back."""
        return CodePart("copied instructions", copied), CodePart("jump back", end - self.jump_back_size)

    @abstractmethod
    def around_handler(self, region: Region) -> tuple[bytes, bytes]:
        """Return the code before a detour's breakpoint, and the code after it.

        The first code saves a struct pt_regs on the stack, and the second code restores the registers from
        it.
        """

    @abstractmethod
    def relocated(self, region: Region, to: int) -> bytes:
        """Return the region's instructions, relocated to the address `to`, and a jump to the region's end.

        Raises: KernelError EINVAL (an instruction cannot be moved), ERANGE (a target is out of reach).
        """

    @abstractmethod
    def emulated_region(self, code: bytes, addr: int) -> Region | None:
        """Return a region that consists of the emulated instruction at `addr`, for stub_end().

        A stub is the compiled handlers of a breakpoint hit. Return None if code at the end of a stub cannot
        have the effect of the instruction in all cases. Then Python emulates the instruction after the stub.
        """

    def stub_end(self, region: Region, to: int) -> StubEnd:
        """Return the code that ends a stub: it has the effect of the emulated instruction in `region`.

        `region`: a result of emulated_region(). `to`: address at which the code will be placed.
        Raises: KernelError EINVAL, ERANGE; see relocated().
        """
        return StubEnd(self.relocated(region, to))

    @abstractmethod
    def original_place(self, region: Region, copied: int, address: int) -> OriginalPlace:
        """Return the place in the probed code that corresponds to `address` in relocated instructions.

        `copied`: address of the first relocated instruction.
        """

    @abstractmethod
    def probe_checker(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Any] | None,
        *,
        ftrace: bool,
        rules: ProbeRules = frozenset(),
    ) -> ProbeChecker[Any]:
        """Return a checker that decides where probes can be placed and optimized in the kernel of `image`.

        `strategy`: optimization policy; None if no jump is allowed. `ftrace`: True if ftrace calls the probes
        on fentry sites; False if the sites count as plain nops. `rules`: the rules that the kernel has in
        addition to those of Linux 6.1.
        """

    def strategy(self, names: Iterable[str]) -> OptimizationPolicy[Any] | None:
        """Return the first optimization policy in `names` that this architecture has; None if it has none."""
        return next((self.strategies[name] for name in names if name in self.strategies), None)

    @abstractmethod
    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        """Return the code of a loop at `at`: it calls `entry` again and again, and then returns.

        The u64 at address `turns` is the number of calls. The loop decrements it after each call.
        Raises: KernelError ERANGE (`entry` is too far away).
        """

    def disassemble(self, code: bytes, addr: int, name: AddressName = unnamed) -> list[str]:
        """Disassemble `code` into one line per instruction: address, bytes, mnemonic and operands.

        The operands have names instead of the addresses that `name` knows.
        """
        return self.disassembler.lines(code, addr, name)
