"""ModuleEvents: adds and removes the trace events of a distribution's modules."""

from __future__ import annotations

import logging
from collections import ChainMap
from functools import cache, partial

from emulated_kernel.guests.linux.probing.kernel_tracepoints import (
    EventBatch,
    KernelStaticEvent,
    KernelTracepoints,
)
from emulated_kernel.guests.linux.probing.loaded_modules import LoadedModules
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import Module
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.trace.events.print_fmt import KernelNames
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace

log = logging.getLogger("kprobefs.linux")


class ModuleEvents:
    """Keeps the trace events of loaded modules.

    Mirrors: kernel/trace/trace_events.c:trace_module_notify (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        kernel: LinuxKernel,
        points: KernelTracepoints,
        registry: EventRegistry,
        loaded: LoadedModules,
    ) -> None:
        self._machine = machine
        self._kernel = kernel
        self._points = points
        self._registry = registry
        self._loaded = loaded
        self._there: dict[str, tuple[EventBatch, list[KernelStaticEvent]]] = {}
        """Name of a loaded module -> the batch of its events, and the events."""

    def came(self, module: Module) -> None:
        """Add the events of a module that is being loaded; its init function has not run yet.

        Log a warning for events that cannot be read or added.

        Mirrors: kernel/trace/trace_events.c:trace_module_add_events (v6.1).
        """
        try:
            events = self._loaded.events(module.address)
        except (KernelError, MemoryFault) as error:
            log.warning("%s: its trace events cannot be read: %s", module.name, error)
            return
        if not events:
            return
        references = module.address + self._kernel.btf.offset("module.refcnt")
        batch = EventBatch(self._machine, cache(partial(self._names, module)), references, module.name)
        added: list[KernelStaticEvent] = []
        self._there[module.name] = batch, added
        for event in self._points.of_module(events, batch):
            try:
                self._registry.add(event)
            except KernelError as error:
                # Linux: the other events are added.
                log.warning(
                    "%s: %s/%s is not added: %s", module.name, event.group, event.name, error.strerror
                )
            else:
                added.append(event)

    def _names(self, module: Module) -> KernelNames:
        names = self._points.names
        try:
            own = self._loaded.constants(module.address)
        except (KernelError, MemoryFault) as error:
            log.warning("%s: its types cannot be read: %s", module.name, error)
            return names
        return replace(names, constants=ChainMap(own, dict(names.constants)))

    def goes(self, name: str) -> None:
        """Remove the events of the module `name`, which is being unloaded.

        No task runs in the module any more, and the kernel has not yet checked whether the module's
        tracepoints are used.
        Linux empties each buffer that may have records of these events. Deviates: the events' triggers are
        removed too.
        Mirrors: kernel/trace/trace_events.c:trace_module_remove_events (v6.1).
        """
        batch, events = self._there.pop(name, (None, []))
        if batch is None:
            return
        batch.is_going = True
        try:
            for event in events:
                for file in event.files.values():
                    for trigger in tuple(file.triggers):
                        file.remove(trigger)
                for recorder in event.recorders:
                    event.disable(recorder)
        finally:
            # Do this even if disabling failed, because the module's memory will be reused.
            for event in events:
                self._registry.remove(event)
                for recorder in event.ever_enabled_in:
                    recorder.event_removed(event)
            batch.is_gone = True
            self._points.forget(batch)
