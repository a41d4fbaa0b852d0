"""TrapHandlers: a map from the address of a trap to its handler, a Python function or a Redirect."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import NamedTuple, Self

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.native.trap_words import LINKED, LinkWords, TrapTable

TrapHandler = Callable[[Regs], object]
_WORD = (1 << 64) - 1


class Redirect(partial[object]):
    """Handler of a trap after which the guest continues at the address `target`.

    The host's routine for traps sets the instruction pointer without Python. If the host has no such routine,
    or while Python handles a hit, the function `in_python` is called instead, with the constructor's
    arguments `given`, followed by the registers. The redirect of a debug trap also clears the trap flag,
    unless `target` is the trap's own address.
    """

    __slots__ = ("target",)
    target: int

    def __new__(cls, target: int, in_python: Callable[..., object], *given: object) -> Self:
        self = super().__new__(cls, in_python, *given)
        self.target = target
        return self


class LinkedJump(NamedTuple):
    """Instruction that jumps by a register and stores a return address: jalr (RISC-V) or blr (arm64)."""

    register: str
    offset: int
    """Number that is added to the register's value."""
    kept_bits: int
    """Mask for the sum of the register's value and `offset`; the masked sum is the jump's target."""
    link_register: str
    """Register that receives the return address; it may be the register `register`."""
    link: int
    """The return address."""


class LinkedRedirect(Redirect):
    """Handler of a trap that emulates the instruction `jump`; the guest continues at the jump's target."""

    __slots__ = ("_jump", "_words")
    _jump: LinkedJump
    _words: LinkWords

    def __new__(cls, jump: LinkedJump) -> Self:
        self = super().__new__(cls, 0, _jump_and_link, jump)
        self._jump = jump
        return self

    def bind(self, address_of: Callable[[str], int]) -> None:
        """Set `target` to a pointer to new LinkWords, which describe the jump, with the bit LINKED added.

        The host's routine for traps reads them. `address_of` returns the address in this process of a
        register's value.
        """
        register, offset, kept_bits, link_register, link = self._jump
        added = offset & _WORD
        self._words = LinkWords(address_of(register), added, kept_bits, address_of(link_register), link)
        self.target = ctypes.addressof(self._words) | LINKED


def _jump_and_link(jump: LinkedJump, regs: Regs) -> None:
    target = regs.get(jump.register) + jump.offset & jump.kept_bits
    regs.set(jump.link_register, jump.link)
    regs.ip = target


class TrapHandlers(MutableMapping[int, TrapHandler]):
    """The handlers of one kind of trap, such as breakpoints: address of the trap -> handler.

    The table that the host's routine for traps reads follows each change. It contains those addresses whose
    handler is a Redirect.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, TrapHandler] = {}
        self.find = self._handlers.get
        """Function that returns the handler of an address, or None. For speed, it is a method of a dict."""
        self._native: TrapTable | None = None
        self._address_of: Callable[[str], int] | None = None

    def use(self, native: TrapTable, address_of: Callable[[str], int] | None = None) -> None:
        """Keep `native`, the table of the host's routine, up to date from now on.

        `address_of` returns the address in this process of a register's value; only LinkedRedirects need it.
        """
        self._native = native
        self._address_of = address_of
        for address, handler in self._handlers.items():
            self._follow(native, address, handler)

    def __getitem__(self, address: int) -> TrapHandler:
        return self._handlers[address]

    def __setitem__(self, address: int, handler: TrapHandler) -> None:
        self._handlers[address] = handler
        if self._native is not None:
            self._follow(self._native, address, handler)

    def __delitem__(self, address: int) -> None:
        del self._handlers[address]
        if self._native is not None and address in self._native:
            self._native.drop(address)

    def __iter__(self) -> Iterator[int]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def _follow(self, native: TrapTable, address: int, handler: TrapHandler) -> None:
        if isinstance(handler, LinkedRedirect):
            assert self._address_of is not None, "the routine needs the register's address"
            handler.bind(self._address_of)
        if isinstance(handler, Redirect) and address:
            native.put(address, handler.target)
        elif address in native:
            native.drop(address)
