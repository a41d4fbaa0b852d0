"""What differs between instruction sets, as one list of hooks that work on bytes alone."""

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
    """Guest memory as emulation sees it; both raise the machine's fault error on a bad address."""

    def read(self, va: int, size: int, /) -> bytes:
        """`size` bytes at `va`."""

    def write(self, va: int, data: bytes, /) -> None:
        """Store `data` at `va`."""


@dataclass(frozen=True, slots=True)
class Emulation(ABC):
    """An instruction that is executed in software instead of out of line."""

    next_ip: int
    """Address of the following instruction."""

    @abstractmethod
    def run(self, regs: Any, memory: ByteMemory) -> None:
        """Execute it on the live registers, leaving `ip` where it would go on.

        Raises: what `memory` raises. The registers are unchanged then.
        """


@dataclass(frozen=True, slots=True)
class ArchSpecificInsn:
    """What a kprobe keeps of the probed instruction (struct arch_specific_insn)."""

    length: int
    """Bytes of the probed instruction."""
    slot_bytes: bytes
    """The copy for the insn slot, displacement fixed, with the breakpoint that ends the step behind it."""
    boostable: bool
    """A jump back may stand behind the copy instead of the breakpoint."""
    emulate: Emulation | None
    """Set if the instruction must be emulated; the slot isn't executed then."""


@dataclass(frozen=True, slots=True)
class HandlerStub:
    """Guest code that saves a struct pt_regs, meets a breakpoint with sp at it, and restores all."""

    code: bytes
    trap: int
    """Offset of the breakpoint, in bytes."""


@dataclass(frozen=True, slots=True)
class Detour:
    """Guest code that a hit goes through: the way to a handler in Python, then what the jump has replaced.

    All offsets are in bytes from its start.
    """

    code: bytes
    trap: int
    """The breakpoint where the handler is called with sp at a struct pt_regs."""
    copied: int
    """The replaced instructions and a jump back."""


@dataclass(frozen=True, slots=True)
class ReturnDispatch:
    """A return trampoline that looks for a handler in guest code first; offsets in bytes from its start."""

    code: bytes
    entry: int
    """What hooked functions return to."""
    trap: int
    """The breakpoint where Python handles the return, with sp at a struct pt_regs, as in HandlerStub."""
    finish: int | None
    """Where handlers go on that stand in its frame; None where each saves what it needs, and returns."""


@dataclass(frozen=True, slots=True)
class Registers:
    """The names of a register file: fetchargs on one side, attributes of the live registers on the other."""

    names: Mapping[str, str]
    """What may follow `%` in a fetcharg -> attribute of the register object."""
    arguments: tuple[str, ...]
    """Attributes that hold $arg1, $arg2, ... on function entry."""
    ip: str
    sp: str
    flags: str | None
    return_value: str
    link: str | None = None
    """Attribute holding the return address on entry; None where it is on the stack."""


class ReturnCode(ABC):
    """Return handlers in guest code; registers are saved by the trampoline, with `saves_all`, or by them."""

    live: LiveRegisters
    """What the caller may read when a function has returned."""

    @abstractmethod
    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        """The trampoline at `buffer` whose `program` ends in a JumpTo of a handler, if there is one.

        `own` is where functions return to, if not right to it.
        """

    @abstractmethod
    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        """A handler for a `dispatch` with the same `saves_all`; it goes on at its `finish`, if it has one."""


class Arch(ABC):
    """The hooks of one instruction set.

    `code` is always bytes that start at `addr`; more than one instruction may be given.
    """

    name: str
    """As in MachineConfig.arch."""
    bits: int
    word_size: int
    """Bytes of `unsigned long`."""
    registers: Registers
    breakpoint: bytes
    """The shortest breakpoint; the CPU reports its trap with ip behind it."""
    seen_ip = 0
    """Address in ip when a probe's handlers are called, minus the probed address, in bytes."""
    max_insn_size: int
    """Bytes that a probe looks at, and the size of an insn slot."""
    jump_size: int
    """Bytes of `relative_jump`."""
    call_size: int
    """Bytes of `relative_call`, and of an fentry site."""
    strategies: Mapping[str, OptimizationPolicy[Any]]
    """The ways in which a jump can take a breakpoint's place, by name."""
    disassembler: Disassembler
    assembler: Assembler
    call_link: str | None = None
    """The register that `relative_call` leaves the return address in; None: it is pushed."""
    general_registers: frozenset[str]
    """The names that a handler program can ask for."""
    pt_regs: tuple[str, ...]
    """Register names in the order of struct pt_regs, one word each."""
    fixed_registers: Mapping[str, int]
    """Those of them that are the same at every hit."""
    return_size: int
    """Bytes of the return instruction that ends the ftrace trampoline."""
    max_repetition: int
    """Bytes of the code that `repetition` makes."""
    max_detour: int
    """Bytes that a detour buffer without a compiled handler can need."""
    max_copied: int
    """Bytes that a detour buffer can need behind its handler, and a stub as well."""
    max_detoured: int
    """Bytes of the longest region that a jump can replace, plus one."""
    task_size: int
    """The first address behind user space."""
    thread_size = 16 << 10
    """Bytes of a kernel stack, which is aligned to its size."""
    interrupt_flag: tuple[str, int] = ("flags", 1 << 9)
    """The pt_regs name and the bit that say whether interrupts are on."""
    has_ops_trampolines = False
    """Whether Linux makes a trampoline for each user of fentry sites. Mirrors: ARCH_SUPPORTS_FTRACE_OPS."""
    trap_flag: int
    """The bit of the flags register that makes the CPU trap behind the next instruction."""
    trap_flag_lead = b""
    """Code that sets it for the instruction behind, and changes nothing else that anybody may see."""

    @property
    def mask(self) -> int:
        """All ones in a register."""
        return (1 << self.bits) - 1

    @property
    def kept_at_return(self) -> frozenset[str]:
        """Attributes that have a function's values when it has returned."""
        returns = self.returns
        return frozenset() if returns is None else returns.live.registers | {self.registers.sp, "ip"}

    @abstractmethod
    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        """Addresses of the instructions in `code`, up to its end or the first that isn't decodable."""

    def breakpoint_for(self, length: int) -> bytes:  # noqa: ARG002 - one for all
        """The instruction that arms a probe on one of `length` bytes."""
        return self.breakpoint

    @abstractmethod
    def prepare(self, code: bytes, addr: int, slot_addr: int, *, may_fault: bool = False) -> ArchSpecificInsn:
        """Analyse and copy the instruction at `addr` for out-of-line execution at `slot_addr`.

        `may_fault`: an exception table entry exists for `addr`, so that it can't be boosted.
        Raises: KernelError EINVAL (it can't be copied), KernelError EOPNOTSUPP (neither stepping nor
        emulation handles it).
        """

    @abstractmethod
    def relative_jump(self, source: int, target: int) -> bytes:
        """`jump_size` bytes of a jump from `source` to `target`. Raises: KernelError ERANGE (too far)."""

    @abstractmethod
    def relative_call(self, source: int, target: int) -> bytes:
        """A call for the fentry site at `source`. Raises: KernelError ERANGE (too far)."""

    def detour_jump(self, region: Region, target: int) -> bytes:
        """What replaces the bytes of a region. Raises: KernelError ERANGE (too far)."""
        return self.relative_jump(region.addr, target)

    @abstractmethod
    def ftrace_trampoline(self) -> HandlerStub:
        """What armed fentry sites call; the saved ip is the address behind the call, and is returned to."""

    ftrace_regs: tuple[str, ...] = ()
    """What a function's entry needs: arguments, sp, ip. Mirrors: struct ftrace_regs."""
    return_regs: tuple[str, ...] = ()
    """What its exit needs: results and frame pointer. Mirrors: struct fgraph_ret_regs (v6.5)."""

    unwind_roots = frozenset((
        *("startup_64", "startup_32", "_start", "_text", "_stext", "host_secondary_entry", "host_return"),
        *("ret_from_fork", "host_user_mode", "host_user_hlt", "host_user_resume", "host_syscall_return"),
    ))  # fmt: skip
    """The image's functions that nobody has called, with the labels in them."""
    interrupt_entries = frozenset(("asm_host_interrupt", "handle_exception"))
    """Where an interrupt leads to."""
    kept_by_calls: frozenset[str]
    """Registers that a called function leaves as they were."""
    stack_switches = frozenset(("__switch_to_asm",))
    """What leaves one stack and returns on another, which it has left before."""

    @abstractmethod
    def frame_insns(self, code: bytes, addr: int, *, switches_stack: bool) -> Iterator[tuple[int, FrameInsn]]:
        """What the instructions of a function do to its stack frame.

        `switches_stack`: a stack pointer that it loads is that of a stack which the same code has left.
        """

    @abstractmethod
    def entry_frame(self, *, by_interrupt: bool) -> Frame:
        """What is known in front of a function's first instruction."""

    def traced_entry(self) -> Frame:
        """In front of the first instruction of what an fentry site calls: `call_link` leads to the site."""
        frame = self.entry_frame(by_interrupt=False)
        if self.call_link is not None and self.registers.link is not None:
            link = self.registers.link
            frame.regs |= {self.call_link: (IP, 0), link: (link, 0)}
        return frame

    def detour_entry(self) -> Frame:
        """The same for what is jumped to: where it goes on, code doesn't say."""
        regs = {name: (name, 0) for name in self.entry_frame(by_interrupt=False).regs}
        return Frame(regs | {self.registers.sp: (CFA, 0)}, {})

    no_return_hook: tuple[str, ...] = ()
    """Functions that come back on another stack than they were called on. Mirrors: kretprobe_blacklist."""

    trampoline_slot: int
    """Bytes from the caller's stack pointer to where a return trampoline stores the real return address."""

    @property
    def returned_at(self) -> int:
        """The same from the stack pointer that a return handler sees."""
        return self.trampoline_slot + (self.word_size if self.registers.link is None else 0)

    @abstractmethod
    def return_trampoline(self, address: int) -> HandlerStub:
        """At `address`, what hooked functions return to.

        The saved sp is that of the caller, the saved ip the trampoline. Behind the saved registers lies the
        word that is returned to in the end, for the handler to fill in.
        """

    returns: ReturnCode | None = None
    """None where Python handles all returns."""

    @abstractmethod
    def handler_code(self, program: Program, addr: int, live: LiveRegisters | None = None) -> HandlerCode:
        """Compile the handler of a probe at `addr`, for any number of detours and stubs.

        Only what is in `live` is kept, and of that what the program writes to. Without it every register
        is saved as a struct pt_regs, which sp is at when the host is called.
        """

    def detour(self, region: Region, buffer: int) -> Detour:
        """The detour buffer at `buffer`, whose handler is reached by a breakpoint.

        Raises: KernelError EINVAL, ERANGE (an instruction can't be moved that far).
        """
        save, restore = self.around_handler(region)
        template = save + self.breakpoint + restore
        code = template + self.relocated(region, buffer + len(template))
        assert len(code) <= self.max_detour
        return Detour(code, len(save), len(template))

    @abstractmethod
    def around_handler(self, region: Region) -> tuple[bytes, bytes]:
        """What saves a struct pt_regs in front of a detour's breakpoint, and what restores it behind that."""

    @abstractmethod
    def relocated(self, region: Region, to: int) -> bytes:
        """Its instructions for `to`, and a jump to what follows them. Raises: KernelError EINVAL, ERANGE."""

    @abstractmethod
    def probe_checker(
        self, image: ProbedTables, strategy: OptimizationPolicy[Any] | None, *, ftrace: bool
    ) -> ProbeChecker[Any]:
        """Where the kernel of these tables can be probed, and how; see ProbeChecker."""

    def strategy(self, names: Iterable[str]) -> OptimizationPolicy[Any] | None:
        """The first of these that there is for this architecture."""
        return next((self.strategies[name] for name in names if name in self.strategies), None)

    @abstractmethod
    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        """Code at `at` that calls `entry` as often as the u64 at `turns` says, counting it down.

        It ends in a return instruction. Raises: KernelError ERANGE (`entry` is too far away).
        """

    def disassemble(self, code: bytes, addr: int) -> list[str]:
        """One line an instruction: address, bytes, mnemonic and operands."""
        return self.disassembler.lines(code, addr)
