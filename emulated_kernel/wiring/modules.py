"""What happens to symbols, probes and events when a module comes, is complete, or goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from emulated_kernel.abi import ModuleState
from emulated_kernel.image.modules import LiveImage, Module


class StructReader(Protocol):
    def name(self, module: int, /) -> str: ...

    def read(self, module: int, /) -> Module: ...


class ModuleProbes(Protocol):
    """The probe engine."""

    def tables_changed(self) -> None: ...

    def kill_within(self, spans: tuple[tuple[int, int], ...], /) -> None: ...


class ModuleTables(Protocol):
    """Whoever looks at the image's tables for tracing."""

    def tables_changed(self) -> None: ...


class TracedFunctions(Protocol):
    """The functions whose calls can be traced."""

    def module_came(self, name: str, fentry: frozenset[int], /) -> None: ...

    def init_goes(self, name: str, fentry: frozenset[int], /) -> None: ...

    def module_goes(self, name: str, fentry: frozenset[int], /) -> None: ...


class ModuleNotifier:
    """Keeps a LiveImage and the probes in step with the guest's modules.

    Mirrors: kernel/kprobes.c:kprobes_module_callback (v6.1), and those of tracing behind `coming`.
    """

    def __init__(
        self,
        reader: StructReader,
        live: LiveImage,
        probes: ModuleProbes,
        symbols: ModuleTables,
        functions: TracedFunctions,
        coming: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._live = live
        self._probes = probes
        self._symbols = symbols
        self._functions = functions
        self._coming = coming

    def __call__(self, state: ModuleState, module: int) -> None:
        """Raises: MemoryFault where the guest shows no sound module."""
        match state:
            case ModuleState.COMING:
                self._arrive(self._reader.read(module))
            case ModuleState.LIVE:
                self._settle(self._reader.name(module))
            case ModuleState.GOING:
                self._leave(self._reader.name(module))

    def _arrive(self, module: Module) -> None:
        self._live.put(module)
        self._tables_changed()
        self._functions.module_came(module.name, module.mcount)
        self._coming(module.name)

    def _settle(self, name: str) -> None:
        """Its init text is about to be freed."""
        module = self._live.find(name)
        if module is None:
            return
        left = module.without_init()
        self._functions.init_goes(name, module.mcount - left.mcount)
        self._probes.kill_within((module.init_text,))
        self._live.put(left)
        self._tables_changed()

    def _leave(self, name: str) -> None:
        module = self._live.find(name)
        if module is None:
            return
        self._functions.module_goes(name, module.mcount)
        self._probes.kill_within((module.text, module.init_text))
        self._live.remove(name)
        self._tables_changed()

    def _tables_changed(self) -> None:
        self._probes.tables_changed()
        self._symbols.tables_changed()
