"""What differs between instruction sets, as one list of hooks that work on bytes alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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
class Detour(HandlerStub):
    """A detour buffer's content: around the handler, then the replaced instructions and a jump back."""

    copied: int
    """Offset of the copied instructions, in bytes."""


class OptimizationRules(Protocol):
    """Which probes of an image can be jump-optimized; nothing is patched by asking."""

    def detoured_length(self, addr: int, /) -> int | str:
        """Bytes of the whole instructions that the jump replaces, or why it can't: address and rule.

        Mirrors: arch_prepare_optimized_kprobe, can_optimize.
        """


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
    """The instruction that arms a probe."""
    max_insn_size: int
    """Bytes that a probe looks at, and the size of an insn slot."""
    min_insn_size: int
    jump_size: int
    """Bytes of the jump that replaces the probed instruction(s) of an optimized probe."""
    pt_regs: tuple[str, ...]
    """Register names in the order of struct pt_regs, one word each."""
    max_detour: int
    """Bytes that a detour buffer can need."""
    max_detoured: int
    """Bytes that a probe's jump can replace at most, plus one."""
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
        """A call of the same size, for fentry sites. Raises: KernelError(ERANGE) if too far."""

    @abstractmethod
    def ftrace_trampoline(self) -> HandlerStub:
        """What armed fentry sites call; the saved ip is the address behind the call, and is returned to."""

    @abstractmethod
    def detour(self, code: bytes, addr: int, length: int, buffer: int) -> Detour:
        """The detour buffer at `buffer` for `length` bytes of instructions at `addr`, which start `code`.

        Raises: KernelError(EINVAL, ERANGE) if an instruction can't be moved that far.
        """

    @abstractmethod
    def optimization_rules(self, image: Any, *, ftrace: bool) -> OptimizationRules:
        """The rules for a KernelImage; without `ftrace` its fentry sites are plain nops."""

    @abstractmethod
    def is_call(self, code: bytes) -> bool:
        """Whether the first instruction is a call."""

    @abstractmethod
    def is_return(self, code: bytes) -> bool:
        """Whether the first instruction returns to the caller."""

    @abstractmethod
    def disassemble(self, code: bytes, addr: int) -> list[str]:
        """One line an instruction: address, bytes, mnemonic and operands."""
