"""One probe of a kprobe event: registered, shown, matched against commands, and hit."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from emulated_kernel.arch.program import AddToPerCpu
from emulated_kernel.arch.program_builder import HitWay, ProgramBuilder
from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import to_text
from emulated_kernel.trace.compile import compiled_event, emit_event
from emulated_kernel.trace.definition import ProbeDefinition, Surroundings, resolve_symbols
from emulated_kernel.trace.event import KprobeTraceEvent
from emulated_kernel.trace.fetch import FetchEnvironment, store
from emulated_kernel.trace.fetchargs import MAX_ARGSTR_LEN
from emulated_kernel.trace.guest import GuestPlaces, HitCounter, RecordTarget
from emulated_kernel.trace.ports import ProbeHandle, ProbeHit, ProbeSpec
from emulated_kernel.trace.symbols import sprint_symbol, within_notrace_func

_PROFILE_LINE = "  %-44s %15d %15d\n"
"""Event, hits and misses; takes half as long as an f-string, and there are thousands of lines."""


class ProbeOwner(Protocol):
    """Who made a probe."""

    def printk(self, text: str, /) -> None:
        """Say something in the kernel's log."""

    def remove(self, probe: TraceKprobe, /) -> None:
        """Raises: KernelError EBUSY."""


class TraceKprobe:
    """Implements trace.ports.ProbeUser. Mirrors: kernel/trace/trace_kprobe.c:struct trace_kprobe (v6.1)."""

    __slots__ = (
        "_counter",
        "_hits",
        "_owner",
        "_shown",
        "args",
        "around",
        "definition",
        "event",
        "handle",
        "maxactive",
    )

    def __init__(
        self,
        definition: ProbeDefinition,
        event: KprobeTraceEvent,
        around: Surroundings,
        owner: ProbeOwner,
    ) -> None:
        self.definition = definition
        self.event = event
        self.around = around
        self._owner = owner
        self.args = definition.args
        """With the addresses of `@symbol` put in, once registered."""
        self.maxactive = definition.maxactive
        self.handle: ProbeHandle | None = None
        """None while the place doesn't exist (yet)."""
        self._hits = 0
        """Those that the counter doesn't have."""
        self._counter: HitCounter | None = None
        self._shown = ""
        """What a definition never changes, once shown: its line behind what maxactive is a part of."""

    @property
    def is_return(self) -> bool:
        return self.definition.place.is_return

    @property
    def hits(self) -> int:
        """Hits since it was made, or since they were reset."""
        return self._hits + (0 if self._counter is None else self._counter.value)

    @hits.setter
    def hits(self, value: int) -> None:
        self._hits = value
        if self._counter is not None:
            self._counter.reset()

    @property
    def nmissed(self) -> int:
        """Missed hits since it was registered."""
        return 0 if self.handle is None else self.handle.nmissed

    # Registration

    def register(self) -> None:
        """Probe the place, armed if the event is enabled.

        Raises: KernelError EINVAL (a function that tracing needs), ENOENT (a symbol in an argument, or the
        place, doesn't exist), and what the backend raises.
        Mirrors: kernel/trace/trace_kprobe.c:__register_trace_kprobe (v6.1).
        """
        if self.handle is not None:
            raise KernelError(errno.EINVAL, "the probe is registered already")
        place = self.definition.place
        if within_notrace_func(self.around.symbols, self._wanted_address()):
            self._owner.printk(f"trace_kprobe: Could not probe notrace function {self.symbol}")
            raise KernelError(errno.EINVAL, f"{self.symbol} is a notrace function")
        symbols, bits = self.around.symbols, 8 * self.around.arch.word_size
        self.args = resolve_symbols(self.definition.args, symbols, bits)
        disabled = not self.event.is_enabled
        spec = ProbeSpec(place.symbol, place.offset, place.address, place.is_return, self.maxactive, disabled)
        self.handle = self.around.backend.register(spec, self)
        if place.is_return:
            self.maxactive = self.handle.maxactive

    def unregister(self) -> None:
        """Mirrors: kernel/trace/trace_kprobe.c:__unregister_trace_kprobe (v6.1)."""
        if self.handle is not None:
            self.around.backend.unregister(self.handle)
            self.handle = None
        if self._counter is not None:
            self._hits += self._counter.value
            self._counter.release()
            self._counter = None

    @property
    def symbol(self) -> str:
        """Linux: what stands in messages and comparisons for a probe by address."""
        return self.definition.place.symbol or "unknown"

    def _wanted_address(self) -> int:
        place = self.definition.place
        if place.symbol is None:
            return place.address or 0
        address = self.around.symbols.lookup_name(place.symbol)
        return address + place.offset if address else 0

    def is_in_module(self, module: str) -> bool:
        """Whether the place was given as one of that module."""
        return self.symbol.startswith(f"{module}:")

    def awaits_module(self) -> bool:
        """Whether a place that doesn't exist may come with a module; Linux grants that to any raw address.

        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_module_exist (v6.1), negated.
        """
        symbol = self.definition.place.symbol
        if symbol is None:
            return True
        module, colon, _ = symbol.partition(":")
        return bool(colon) and not self.around.symbols.has_module(module)

    # Enabling

    def enable(self) -> None:
        """Raises: KernelError of the backend."""
        if self.handle is not None and not self.handle.is_gone:
            self.around.backend.enable(self.handle)

    def disable(self) -> None:
        """Raises: KernelError of the backend."""
        if self.handle is not None and not self.handle.is_gone:
            self.around.backend.disable(self.handle)

    # On the list of dynamic events

    def is_busy(self) -> bool:
        """Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_is_busy (v6.1)."""
        return self.event.is_enabled

    def release(self) -> None:
        """Remove it. Raises: KernelError EBUSY."""
        self._owner.remove(self)

    def show(self) -> str:
        """Its line in kprobe_events. Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_show (v6.1)."""
        if not self._shown:
            self._shown = self._definition_text()
        return self._head() + self._shown

    def _definition_text(self) -> str:
        definition = self.definition
        words = [f":{definition.group}/{definition.event}", self._place_text()]
        words += [f"{arg.name}={arg.expression}" for arg in definition.args]
        return to_text(" ".join(words)) + "\n"

    def _head(self) -> str:
        return f"r{self.maxactive or ''}" if self.is_return else "p"

    def profile(self) -> str:
        """Its line in kprobe_profile."""
        counter, handle = self._counter, self.handle
        counted = 0 if counter is None else counter.value
        missed = 0 if handle is None else handle.nmissed
        return _PROFILE_LINE % (self.event.name, self._hits + counted, missed)

    def _place_text(self) -> str:
        return self.definition.place.show(self.around.arch.word_size)

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Whether `-:[group/][event] [PLACE [ARGS]]` means this probe; the ARGS may be its first ones.

        Linux: compares at most 63 bytes of what the probe would show.
        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_match (v6.1).
        """
        definition = self.definition
        if event not in ("", definition.event) or group not in (None, definition.group):
            return False
        own = [self._place_text(), *(f"{arg.name}={arg.expression}" for arg in self.args)]
        if len(words) > len(own):
            return False
        return all(mine[:MAX_ARGSTR_LEN] == given for mine, given in zip(own, words, strict=False))

    def is_same_as(self, other: TraceKprobe) -> bool:
        """Whether both probe the same place for the same arguments. Linux: all raw addresses count as one."""
        if (self.symbol, self.definition.place.offset) != (other.symbol, other.definition.place.offset):
            return False
        return [arg.expression for arg in self.args] == [arg.expression for arg in other.args]

    # Hits

    def hit(self, hit: ProbeHit) -> None:
        """Count the hit and record it where the event is enabled and no filter rejects it.

        Mirrors: kernel/trace/trace_kprobe.c:kprobe_dispatcher, kretprobe_dispatcher (v6.1).
        """
        self._hits += 1
        if self.handle is None or not self.event.recorders:
            return
        payload = store(self.args, self._header(self.handle.address, hit), self._environment(hit))
        self.event.record(payload, hit)

    def emit(self, builder: ProgramBuilder, way: HitWay) -> bool:
        """Add what hit() does to a program of guest code; False where it takes Python."""
        places, handle, arch = self.around.guest, self.handle, self.around.arch
        if places is None or handle is None:
            return False
        compiled = compiled_event(self.event, self.args, arch)
        self._counter = self._counter or places.new_counter()
        if compiled is None or self._counter is None:
            return False
        builder.emit(AddToPerCpu(self._counter.offset, 1))
        emit_event(builder, compiled, way, handle.address, arch, places)
        return True

    def rehearse(
        self, builder: ProgramBuilder, way: HitWay, places: GuestPlaces, target: RecordTarget, counter: int
    ) -> bool:
        """As emit(), but all that is written to is given: every record goes to `target`.

        False for a return probe too, whose entry is the smaller part of it.
        """
        handle, arch = self.handle, self.around.arch
        compiled = compiled_event(self.event, self.args, arch)
        if compiled is None or handle is None or self.is_return:
            return False
        recordings = tuple(replace(recording, target=target) for recording in compiled.recordings)
        builder.emit(AddToPerCpu(counter, 1))
        emit_event(builder, replace(compiled, recordings=recordings), way, handle.address, arch, places)
        return True

    def handler_changed(self) -> None:
        """What is done at a hit differs from now on."""
        if self.handle is not None and not self.handle.is_gone:
            self.around.backend.handler_changed(self.handle)

    def _header(self, address: int, hit: ProbeHit) -> bytes:
        words = (address, hit.return_address) if self.is_return else (address,)
        return b"".join(word.to_bytes(self.event.word_size, "little") for word in words)

    def _environment(self, hit: ProbeHit) -> FetchEnvironment:
        return FetchEnvironment(
            self.around.arch, hit, lambda address: sprint_symbol(self.around.symbols, address)
        )
