"""Fprobe events on top of fprobes: one function each, hooked while the event is enabled."""

from __future__ import annotations

import errno
from typing import Any

from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.fprobe import Fprobe, Fprobes
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.ports import ProbeHandle, ProbeSpec, ProbeUser
from emulated_kernel.wiring.probes import Hit


class EventFprobe:
    """Implements trace.ports.ProbeHandle."""

    is_gone = False

    def __init__(self, fprobe: Fprobe, address: int) -> None:
        self.fprobe = fprobe
        self.address = address
        self.maxactive = fprobe.nr_maxactive
        self.is_enabled = False
        self.missed_before = 0
        """Misses up to when it was enabled the last time."""

    @property
    def nmissed(self) -> int:
        return self.missed_before + self.fprobe.nmissed


class FprobeBackend:
    """Implements trace.ports.ProbeBackend."""

    def __init__(self, fprobes: Fprobes, kprobes: Kprobes, hit: Hit) -> None:
        """`hit` is filled in with each hit."""
        self._fprobes = fprobes
        self._kprobes = kprobes
        self._hit = hit

    def register(self, spec: ProbeSpec, user: ProbeUser, /) -> EventFprobe:
        """Raises: KernelError EINVAL (can't be traced), ENOENT, and as register_fprobe."""
        assert spec.symbol is not None, "a symbol was asked for"
        address = self._fprobes.functions.get(spec.symbol)
        if address is None:
            self._kprobes.on_func_entry(spec.symbol, 0)
            raise KernelError(errno.EINVAL, f"{spec.symbol} can't be traced")
        hit = self._hit

        def called(_fp: Fprobe, _address: int, regs: Any, _data: memoryview) -> None:
            # At the exit this is where the function returns to.
            hit.regs, hit.return_address = regs, regs.ip if spec.is_return else 0
            user.hit(hit)

        fprobe = Fprobe(
            spec.symbol,
            entry_handler=None if spec.is_return else called,
            exit_handler=called if spec.is_return else None,
            entry_program=None if spec.is_return else user.emit,
            exit_program=user.emit if spec.is_return else None,
            nr_maxactive=spec.maxactive,
        )
        handle = EventFprobe(fprobe, address)
        if not spec.disabled:
            self.enable(handle)
        return handle

    def unregister(self, handle: ProbeHandle, /) -> None:
        self.disable(handle)

    def enable(self, handle: ProbeHandle, /) -> None:
        """Raises: KernelError as register_fprobe."""
        event = _fprobe(handle)
        if not event.is_enabled:
            event.missed_before += event.fprobe.nmissed
            self._fprobes.register_fprobe(event.fprobe)
            event.is_enabled = True

    def disable(self, handle: ProbeHandle, /) -> None:
        event = _fprobe(handle)
        if event.is_enabled:
            self._fprobes.unregister_fprobe(event.fprobe)
            event.is_enabled = False

    def handler_changed(self, handle: ProbeHandle, /) -> None:
        """See trace.ports.ProbeBackend."""
        self._fprobes.handler_changed(_fprobe(handle).fprobe)

    def on_func_entry(self, symbol: str, offset: int, /) -> bool:
        """Raises: KernelError ENOENT."""
        return self._kprobes.on_func_entry(symbol, offset)


def _fprobe(handle: ProbeHandle) -> EventFprobe:
    assert isinstance(handle, EventFprobe), "a handle of another backend"
    return handle
