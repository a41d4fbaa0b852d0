"""ModuleNotifier: updates symbols, probes and events when the guest loads or unloads a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.util.abi import ModuleState


class ModuleNotifier:
    """Updates the symbol and text tables (LiveImage), probes and events when a module's state changes.

    Mirrors: kernel/kprobes.c:kprobes_module_callback,
    kernel/trace/trace_kprobe.c:trace_kprobe_module_callback (v6.1).
    """

    def __init__(
        self,
        read: Callable[[int], Module],
        name: Callable[[int], str],
        live: LiveImage[Any],
        kprobes: Kprobes,
        symbols: KernelSymbols,
        functions: KernelFunctions,
        arrays: TraceArrays,
        events: KprobeEvents,
        forget: Callable[[Sequence[tuple[int, int]], str], None],
        add_events: Callable[[Module], object] = lambda _module: None,
    ) -> None:
        """Store the registries that follow the guest's modules.

        `read` and `name` take the address of a struct module. `read` returns the struct's contents, and
        `name` only the module's name. `forget` is called with memory ranges that are about to be freed, as
        pairs (start, end), and with the module's name. `add_events` registers the trace events of a module.
        """
        self._add_events = add_events
        self._read = read
        self._name = name
        self._live = live
        self._kprobes = kprobes
        self._symbols = symbols
        self._functions = functions
        self._arrays = arrays
        self._events = events
        self._forget = forget

    def __call__(self, state: ModuleState, module: int) -> None:
        """Handle a module's new state; `module` is the address of its struct module.

        Raises: the errors of `read` and `name` (the module's data is corrupt).
        """
        match state:
            case ModuleState.COMING:
                self._arrive(self._read(module))
            case ModuleState.LIVE:
                self._settle(self._name(module))
            case ModuleState.GOING:
                self._leave(self._name(module))

    def _arrive(self, module: Module) -> None:
        """Add a new module's symbols and text tables, and register the event probes in the module."""
        self._live.put(module)
        self._tables_changed()
        self._functions.module_added(module.name, module.mcount)
        self._events.module_coming(module.name)
        self._add_events(module)
        self._arrays.module_added(module.name)

    def _settle(self, name: str) -> None:
        """Forget the symbols, functions and probes in a module's init memory, which is about to be freed."""
        module = self._live.find(name)
        if module is None:
            return
        left = module.without_init()
        self._functions.init_removed(name, module.mcount - left.mcount)
        self._forget((module.init_text, *module.init_data), name)
        self._kprobes.kill_within((module.init_text,))
        self._live.put(left)
        self._tables_changed()

    def _leave(self, name: str) -> None:
        """Remove an unloaded module's symbols and text tables; mark the probes in its text as gone."""
        module = self._live.find(name)
        if module is None:
            return
        self._functions.module_removed(name, module.mcount)
        self._forget((module.text, module.init_text, *module.data, *module.init_data), name)
        self._kprobes.kill_within((module.text, module.init_text))
        self._live.remove(name)
        self._tables_changed()

    def _tables_changed(self) -> None:
        """Empty the caches that were computed from the symbols and text tables before these changed."""
        self._kprobes.tables_changed()
        self._symbols.tables_changed()
