"""Stages 1 and 2 of a fetch program, which load a value from registers, the stack and memory."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram
from emulated_kernel.trace.symbols import KernelSymbols

_PAGE_SIZE = 4096

Value = int | bytes
"""A loaded value: a number, or bytes that stand for an address of kernel memory with these contents."""


class EntryAddress(int):
    """Placeholder for the address of a string in the entry that an event probe receives.

    The entry is not in guest memory, so only FetchEnvironment.read() can read at the address.
    Linux: the entry is in the ring buffer or in trace_buffered_event.
    """

    @staticmethod
    def of(offset: int, mask: int) -> EntryAddress:
        """Return the placeholder for the address of the string at byte `offset` of the received entry.

        The placeholder is an address in the last page of the address space, which is the page of error
        pointers (ERR_PTR) and is never mapped. `mask`: a word with all bits set.
        """
        return EntryAddress((mask & -_PAGE_SIZE) + offset)


def read_string(read: Callable[[int, int], bytes | None], address: int, limit: int) -> bytes | None:
    """Return the string at `address` including its NUL, or None if it cannot be read.

    `read` takes an address and a size. The result has at most `limit` bytes, of which the last is a NUL. No
    read crosses a page boundary, so that a string before an unmapped page can be read.
    """
    text = b""
    while len(text) < limit:
        chunk = min(_PAGE_SIZE - (address & _PAGE_SIZE - 1), limit - len(text))
        data = read(address, chunk)
        if data is None:
            return None
        head, end, _ = data.partition(b"\0")
        text += head
        if end:
            return text + end
        address += chunk
    return text[: limit - 1] + b"\0"


class FetchEnvironment:
    """The data that fetch programs read at a hit: registers, memory, symbols, and an event probe's entry."""

    __slots__ = ("_arch", "_entry", "_field", "_hit", "_regs", "mask", "symbols", "word_size")

    def __init__(
        self,
        arch: Arch,
        hit: ProbeHit,
        symbols: KernelSymbols,
        field: Callable[[str], Value] | None = None,
        entry: bytes = b"",
    ) -> None:
        """Create the environment of a hit.

        `field` and `entry` are for event probes. `entry` is the received entry. `field` maps the name of a
        field to its value in the entry. For a string, the value is an EntryAddress.
        """
        self._arch = arch
        self._hit = hit
        self._regs = hit.regs
        self._field = field
        self._entry = entry
        self.symbols = symbols
        self.word_size = arch.word_size
        self.mask = (1 << 8 * arch.word_size) - 1

    def load(self, insn: FetchInsn) -> Value:
        """Run stage 1: return the value that the operation `insn` loads."""
        match insn.op:
            case FetchOp.REG | FetchOp.STACKP | FetchOp.RETVAL:
                value: int = getattr(self._regs, insn.name)
                return value & self.mask
            case FetchOp.STACK:
                return self._stack_word(insn.value)
            case FetchOp.EDATA:
                at = insn.value * self.word_size
                return int.from_bytes(self._hit.entry_data[at : at + self.word_size], "little")
            case FetchOp.COMM:
                return self._hit.comm
            case FetchOp.CURRENT:
                return self._hit.current
            case FetchOp.DATA:
                return insn.data
            case FetchOp.TP_ARG if self._field is not None:
                return self._field(insn.name)
        return insn.value & self.mask

    def _stack_word(self, number: int) -> int:
        """Return word `number` from the stack pointer on, or 0 if it is outside of the kernel stack.

        Mirrors: arch/x86/include/asm/ptrace.h:regs_get_kernel_stack_nth (v6.1).
        """
        arch = self._arch
        top: int = getattr(self._regs, arch.registers.sp) & self.mask
        address = top + number * self.word_size & self.mask
        if (address ^ top) & ~(arch.thread_size - 1) & self.mask:
            return 0
        return int.from_bytes(self._hit.read(address, self.word_size) or b"", "little")

    def follow(self, value: Value | None, derefs: FetchProgram) -> Value | None:
        """Run stage 2: apply the dereferences `derefs` to a value, and return the result.

        Return None if `value` is None, or if memory that a dereference reads is unreadable. Also return None
        if there is a dereference and `value` is bytes, because these have no address.
        """
        for insn in derefs:
            if not isinstance(value, int):
                return None
            if insn.op is FetchOp.CPU_PTR:
                value = value + self._hit.per_cpu_base & self.mask
                continue
            data = self.read(value + insn.value, self.word_size, insn.op is FetchOp.UDEREF)
            value = None if data is None else int.from_bytes(data, "little")
        return value

    def is_user(self, address: int) -> bool:
        """Return True if the address is in user space."""
        return address & self.mask < self._arch.task_size

    def read(self, address: int, size: int, user: bool) -> bytes | None:
        """Return `size` bytes at `address`, in kernel or user memory, or None if they cannot be read.

        If `user` is set, an address in kernel space cannot be read. At an EntryAddress, the bytes are those
        of the entry that the event probe has received, and zeros after the entry's end.
        """
        address &= self.mask
        if user and not self.is_user(address):
            return None
        if self._entry and address > self.mask - _PAGE_SIZE:
            at = address & _PAGE_SIZE - 1
            return self._entry[at : at + size].ljust(size, b"\0")
        return self._hit.read(address, size)
