"""TrapHandlers: address of a trap -> handler: a function in Python, or an address in guest code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Self

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.native.trap_words import TrapTable

TrapHandler = Callable[[Regs], object]


class Redirect(partial[object]):
    """Handler of a trap after which the guest continues at the address `target`.

    The host's routine for traps sets the instruction pointer without Python. If the host has no such routine,
    or while Python handles a hit, `in_python` is called with `given` and the registers instead. A redirected
    debug trap also clears the trap flag, unless `target` is the trap's own address.
    """

    __slots__ = ("target",)
    target: int

    def __new__(cls, target: int, in_python: Callable[..., object], *given: object) -> Self:
        self = super().__new__(cls, in_python, *given)
        self.target = target
        return self


class TrapHandlers(MutableMapping[int, TrapHandler]):
    """The handlers of one kind of trap.

    The table of the host's routine follows each change: an address has an entry in it if and only if its
    handler is a Redirect.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, TrapHandler] = {}
        self.find = self._handlers.get
        """Function that returns the handler of an address, or None. For speed, it is a method of a dict."""
        self._native: TrapTable | None = None

    def use(self, native: TrapTable) -> None:
        """Keep `native`, the table of the host's routine, up to date from now on."""
        self._native = native
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

    @staticmethod
    def _follow(native: TrapTable, address: int, handler: TrapHandler) -> None:
        if isinstance(handler, Redirect) and address:
            native.put(address, handler.target)
        elif address in native:
            native.drop(address)
