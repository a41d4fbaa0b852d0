"""One probe of a kprobe event: registered, shown, matched against commands, and hit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import to_text
from emulated_kernel.trace.definition import ProbeDefinition, Surroundings, split_symbol_offset
from emulated_kernel.trace.event import KprobeTraceEvent
from emulated_kernel.trace.fetch import FetchEnvironment, store
from emulated_kernel.trace.fetchargs import MAX_ARGSTR_LEN, ProbeArg
from emulated_kernel.trace.ports import ProbeHandle, ProbeHit, ProbeSpec, Recorder
from emulated_kernel.trace.symbols import sprint_symbol, within_notrace_func
from emulated_kernel.trace.types import FetchInsn, FetchOp


@dataclass(eq=False)
class TraceKprobe:
    """Mirrors: kernel/trace/trace_kprobe.c:struct trace_kprobe (v6.1)."""

    definition: ProbeDefinition
    event: KprobeTraceEvent
    around: Surroundings
    printk: Callable[[str], None]
    on_release: Callable[[TraceKprobe], None]
    """Removes it. Raises: KernelError EBUSY."""

    def __post_init__(self) -> None:
        self.args = self.definition.args
        """With the addresses of `@symbol` put in, once registered."""
        self.maxactive = self.definition.maxactive
        self.handle: ProbeHandle | None = None
        """None while the place doesn't exist (yet)."""
        self.hits = 0

    @property
    def is_return(self) -> bool:
        return self.definition.place.is_return

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
            self.printk(f"trace_kprobe: Could not probe notrace function {self.symbol}")
            raise KernelError(errno.EINVAL, f"{self.symbol} is a notrace function")
        self.args = tuple(self._resolve(arg) for arg in self.definition.args)
        disabled = not self.event.is_enabled
        spec = ProbeSpec(place.symbol, place.offset, place.address, place.is_return, self.maxactive, disabled)
        self.handle = self.around.backend.register(spec, self.hit)
        if place.is_return:
            self.maxactive = self.handle.maxactive

    def unregister(self) -> None:
        """Mirrors: kernel/trace/trace_kprobe.c:__unregister_trace_kprobe (v6.1)."""
        if self.handle is not None:
            self.around.backend.unregister(self.handle)
            self.handle = None

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

    def _resolve(self, arg: ProbeArg) -> ProbeArg:
        """Mirrors: kernel/trace/trace_probe.c:traceprobe_update_arg (v6.1)."""
        program = list(arg.program)
        for index, insn in enumerate(program):
            if insn.op is FetchOp.SYMBOL:
                program[index + 1] = FetchInsn(FetchOp.IMM, value=self._symbol_value(insn.name))
        return replace(arg, program=tuple(program))

    def _symbol_value(self, expression: str) -> int:
        name, offset = split_symbol_offset(expression, 8 * self.around.arch.word_size)
        address = self.around.symbols.lookup_name(name)
        if not address:
            raise KernelError(errno.ENOENT, f"no symbol named {name}")
        return address + offset

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
        self.on_release(self)

    def show(self) -> str:
        """Its line in kprobe_events. Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_show (v6.1)."""
        definition = self.definition
        head = f"r{self.maxactive or ''}" if self.is_return else "p"
        words = [f"{head}:{definition.group}/{definition.event}", self._place_text()]
        words += [f"{arg.name}={arg.expression}" for arg in self.args]
        return to_text(" ".join(words)) + "\n"

    def profile(self) -> str:
        """Its line in kprobe_profile."""
        return f"  {self.event.name:<44} {self.hits:>15} {self.nmissed:>15}\n"

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
        self.hits += 1
        if self.handle is None or not self.event.recorders:
            return
        payload = store(self.args, self._header(self.handle.address, hit), self._environment(hit))
        for recorder in tuple(self.event.recorders):
            if self._passes_filter(recorder, payload, hit):
                recorder.record(self.event, payload, hit)

    def _passes_filter(self, recorder: Recorder, payload: bytes, hit: ProbeHit) -> bool:
        event_filter = self.event.filters.get(recorder)
        if event_filter is None or event_filter.program is None:
            return True
        return event_filter.program.accepts(recorder.entry(self.event, payload, hit))

    def _header(self, address: int, hit: ProbeHit) -> bytes:
        words = (address, hit.return_address) if self.is_return else (address,)
        return b"".join(word.to_bytes(self.event.word_size, "little") for word in words)

    def _environment(self, hit: ProbeHit) -> FetchEnvironment:
        return FetchEnvironment(
            self.around.arch, hit, lambda address: sprint_symbol(self.around.symbols, address)
        )
