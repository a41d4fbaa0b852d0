"""What differs between instruction sets, as one list of hooks that work on bytes alone."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from emulated_kernel.arch.analysed import AnalysedImage
from emulated_kernel.arch.program import Fixup, HandlerCode, HostCall, Program
from emulated_kernel.errors import KernelError


class ByteMemory(Protocol):
    """Guest memory as emulation sees it; both raise the machine's fault error on a bad address."""

    def read(self, va: int, size: int, /) -> bytes:
        """`size` bytes at `va`."""

    def write(self, va: int, data: bytes, /) -> None:
        """Store `data` at `va`."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """An instruction that is executed in software instead of out of line; each architecture extends it."""

    next_ip: int
    """Address of the following instruction."""


@dataclass(frozen=True, slots=True)
class Prepared:
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
    """Guest code that a hit goes through: the handler, then instructions of the probed code.

    All offsets are in bytes from its start.
    """

    code: bytes
    trap: int | None
    """The breakpoint where a Python handler is called with sp at a struct pt_regs; None if it is compiled."""
    copied: int
    """What stands behind the handler: the replaced instructions and a jump back, or a jump to a slot."""
    entry: int = 0
    """Where a hit enters it."""
    host_calls: tuple[HostCall, ...] = ()
    fixups: tuple[Fixup, ...] = ()

    @classmethod
    def compiled(cls, handler: HandlerCode, rest: bytes) -> Detour:
        """A compiled handler, and what follows it."""
        return cls(
            code=handler.code + rest,
            trap=None,
            copied=len(handler.code),
            entry=handler.entry,
            host_calls=handler.host_calls,
            fixups=handler.fixups,
        )


@dataclass(frozen=True, slots=True)
class Live:
    """What the probed code may still read from an address on."""

    registers: frozenset[str]
    """pt_regs names."""
    flags: bool
    """Whether any of the status flags is live."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Registers that the jumps of an optimized probe may overwrite, by pt_regs name."""

    entry: str
    """Dead in front of the replaced instructions."""
    exit: str
    """Dead behind them."""


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
class CallSite:
    """A call instruction: of the function at `target`, of any where that is None."""

    target: int | None


class OptimizationRules(Protocol):
    """Which probes of an image can be jump-optimized; nothing is patched by asking."""

    def detoured_length(self, addr: int, /) -> int | str:
        """Bytes of the whole instructions that the jump replaces, or why it can't: address and rule.

        Mirrors: arch_prepare_optimized_kprobe, can_optimize.
        """

    def scratch_at(self, addr: int, /) -> Scratch | None:
        """Registers for the jumps of a probe that can be optimized; None where jumps need none."""

    def refresh(self) -> None:
        """A module came or went: what was said of its addresses is void."""

    def live_at(self, addr: int, /) -> Live:
        """What the function at `addr` may still read from there on; everything where that isn't known."""


@dataclass(frozen=True, slots=True)
class Registers:
    """The names of a register file: fetchargs on one side, attributes of the live registers on the other."""

    names: Mapping[str, str]
    """What may follow `%` in a fetcharg -> attribute of the register object."""
    arguments: tuple[str, ...]
    """Attributes that hold $arg1, $arg2, ... on function entry."""
    stack_argument: int
    """Index of the first stack argument, in words from the stack pointer on function entry."""
    ip: str
    sp: str
    flags: str | None
    return_value: str
    link: str | None = None
    """Attribute holding the return address on entry; None where it is on the stack."""


class Arch(ABC):
    """The hooks of one instruction set.

    `code` is always bytes that start at `addr`; more than one instruction may be given.
    """

    name: str
    """As in MachineConfig.arch."""
    bits: int
    registers: Registers
    breakpoint: bytes
    """The shortest breakpoint. Whoever meets one finds ip as many bytes behind its start."""
    seen_ip = 0
    """What a probe's handlers find in ip, in bytes from the probed address on."""
    max_insn_size: int
    """Bytes that a probe looks at, and the size of an insn slot."""
    min_insn_size: int
    jump_size: int
    """Bytes of `relative_jump`."""
    call_size: int
    """Bytes of `relative_call`, and of an fentry site."""
    optprobes_out_of_tree = False
    """Jump optimization is a patch that Linux doesn't have."""
    call_link: str | None = None
    """The register that `relative_call` leaves the return address in; None: it is pushed."""
    general_registers: frozenset[str]
    """The names that a handler program can ask for."""
    pt_regs: tuple[str, ...]
    """Register names in the order of struct pt_regs, one word each."""
    return_size: int
    """Bytes of the return instruction that ends the ftrace trampoline."""
    max_repetition: int
    """Bytes of `repetition`."""
    max_detour: int
    """Bytes that a detour buffer without a compiled handler can need."""
    max_copied: int
    """Bytes that a detour buffer can need behind its handler, and a stub as well."""
    max_detoured: int
    """Bytes that a probe's jump can replace at most, plus one."""
    task_size: int
    """The first address behind user space."""
    interrupt_flag: tuple[str, int] = ("flags", 1 << 9)
    """The pt_regs name and the bit that say whether interrupts are on."""
    trap_flag: int
    """The bit of the flags register that makes the CPU trap behind the next instruction."""

    @property
    def word_size(self) -> int:
        """Bytes of `unsigned long`."""
        return self.bits // 8

    @property
    def mask(self) -> int:
        """All ones in a register."""
        return (1 << self.bits) - 1

    @abstractmethod
    def decode_length(self, code: bytes, addr: int) -> int:
        """Length of the instruction at `addr`. Raises: KernelError(EINVAL) if it isn't decodable."""

    @abstractmethod
    def instruction_boundaries(self, code: bytes, addr: int) -> tuple[int, ...]:
        """Addresses of the instructions in `code`, up to its end or the first that isn't decodable."""

    @abstractmethod
    def is_breakpoint(self, code: bytes) -> bool:
        """Whether `code` starts with a breakpoint instruction of any length."""

    def breakpoint_for(self, length: int) -> bytes:  # noqa: ARG002 - one for all
        """The instruction that arms a probe on one of `length` bytes."""
        return self.breakpoint

    @abstractmethod
    def prepare(self, code: bytes, addr: int, slot_addr: int, *, may_fault: bool = False) -> Prepared:
        """Analyse and copy the instruction at `addr` for out-of-line execution at `slot_addr`.

        `may_fault`: an exception table entry exists for `addr`, so that it can't be boosted.
        Raises: KernelError(EINVAL) if it can't be copied, KernelError(EOPNOTSUPP) if neither stepping nor
        emulation handles it.
        """

    @abstractmethod
    def emulate(self, emulation: Emulation, regs: Any, memory: ByteMemory) -> None:
        """Execute a prepared instruction on the live registers, leaving `ip` where it would go on.

        Raises: what `memory` raises; the registers are unchanged then.
        """

    @abstractmethod
    def relative_jump(self, source: int, target: int) -> bytes:
        """`jump_size` bytes of a jump from `source` to `target`. Raises: KernelError(ERANGE) if too far."""

    @abstractmethod
    def relative_call(self, source: int, target: int) -> bytes:
        """A call for the fentry site at `source`. Raises: KernelError(ERANGE) if too far."""

    def detour_jump(self, addr: int, length: int, target: int, scratch: Scratch | None) -> bytes:  # noqa: ARG002
        """What replaces `length` bytes of an optimized probe. Raises: KernelError(ERANGE) if too far."""
        return self.relative_jump(addr, target)

    @abstractmethod
    def ftrace_trampoline(self) -> HandlerStub:
        """What armed fentry sites call; the saved ip is the address behind the call, and is returned to."""

    ftrace_regs: tuple[str, ...] = ()
    """What a function's entry needs: arguments, sp, ip. Mirrors: struct ftrace_regs."""
    return_regs: tuple[str, ...] = ()
    """What its exit needs: results and frame pointer. Mirrors: struct fgraph_ret_regs (v6.5)."""

    max_call_size = 0
    """Bytes of a call instruction; 0 where stacks can't be walked by looking for calls."""

    def call_before(self, code: bytes, address: int) -> CallSite | None:  # noqa: ARG002 - as above
        """The call that returns to `address`, where `code` ends."""
        return None

    def jump_targets(self, code: bytes, addr: int) -> Iterator[int]:  # noqa: ARG002 - as above
        """Where the function `code` may jump to, as to one that it calls last."""
        return iter(())

    no_return_hook: tuple[str, ...] = ()
    """Functions that come back on another stack than they were called on. Mirrors: kretprobe_blacklist."""

    def return_trampoline(self, address: int) -> HandlerStub | None:  # noqa: ARG002
        """At `address`, what hooked functions return to; None where a breakpoint has to do.

        The saved sp is that of the caller, the saved ip the trampoline. Behind the saved registers lies the
        word that is returned to in the end, for the handler to fill in.
        """
        return None

    live_at_return: Live | None = None
    """What the caller may read when a function has returned; None where Python handles all returns."""

    def return_dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        """The trampoline at `buffer` whose `program` ends in a JumpTo of a handler, if there is one.

        `own` is where functions return to, if not right to it. Registers are saved by the trampoline, with
        `saves_all`, or by the handler.
        """
        del program, buffer, own, saves_all
        raise KernelError(errno.EOPNOTSUPP, f"no return handlers in guest code on {self.name}")

    def return_handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        """A handler for a `return_dispatch` with the same `saves_all`. Raises: KernelError(EOPNOTSUPP)."""
        del program, saves_all
        raise KernelError(errno.EOPNOTSUPP, f"no return handlers in guest code on {self.name}")

    def placed_return_handler(self, handler: HandlerCode, buffer: int, finish: int | None) -> Detour:
        """Such a handler at `buffer`; `finish` is that of the dispatch, an address.

        Raises: KernelError(EOPNOTSUPP, ERANGE).
        """
        del handler, buffer, finish
        raise KernelError(errno.EOPNOTSUPP, f"no return handlers in guest code on {self.name}")

    @abstractmethod
    def handler_code(self, program: Program, addr: int, live: Live | None = None) -> HandlerCode:
        """Compile the handler of a probe at `addr`, for any number of detours and stubs.

        Only what is in `live` is kept, and of that what the program writes to. Without it every register
        is saved as a struct pt_regs, which sp is at when the host is called.
        """

    @abstractmethod
    def detour(
        self,
        code: bytes,
        addr: int,
        length: int,
        buffer: int,
        handler: HandlerCode | None = None,
        scratch: Scratch | None = None,
    ) -> Detour:
        """The detour buffer at `buffer` for `length` bytes of instructions at `addr`, which start `code`.

        Its handler is compiled, or reached by a breakpoint. `scratch`: as the rules say for `addr`.
        Raises: KernelError(EINVAL, ERANGE) if an instruction can't be moved that far.
        """

    @abstractmethod
    def handler_stub(self, handler: HandlerCode, buffer: int, target: int) -> Detour:
        """A compiled handler at `buffer` that goes on at `target`, such as an insn slot.

        Raises: KernelError(ERANGE) if it is too far away.
        """

    @abstractmethod
    def optimization_rules(self, image: AnalysedImage, *, ftrace: bool) -> OptimizationRules:
        """The rules for a KernelImage; without `ftrace` its fentry sites are plain nops."""

    def djprobe_rules(self, image: AnalysedImage) -> OptimizationRules:
        """The rules of djprobe's static analysis. Raises: KernelError(EOPNOTSUPP) where there are none."""
        del image
        raise KernelError(errno.EOPNOTSUPP, f"no djprobes on {self.name}")

    @abstractmethod
    def repetition(self, at: int, entry: int, turns: int) -> bytes:
        """Code at `at` that calls `entry` as often as the u64 cell at `turns` says, counting it down.

        It ends in a return instruction. Raises: KernelError(ERANGE) if `entry` is too far away.
        """

    @abstractmethod
    def is_call(self, code: bytes) -> bool:
        """Whether the first instruction is a call."""

    @abstractmethod
    def is_return(self, code: bytes) -> bool:
        """Whether the first instruction returns to the caller."""

    @abstractmethod
    def disassemble(self, code: bytes, addr: int) -> list[str]:
        """One line an instruction: address, bytes, mnemonic and operands."""
