"""The components of kprobefs's own running kernel; its file trees and its API use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from emulated_kernel.components.clock_switch import ClockSwitch
from emulated_kernel.components.records import KernelComponents
from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.modules import Modules
from emulated_kernel.guests.common.request_clock import RequestObserver
from emulated_kernel.guests.common.workloads import Workloads
from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.machine.machine import Machine
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class BuiltinKernelComponents(KernelComponents):
    """The components of a booted kernel of kprobefs's own."""

    config: MachineConfig
    lock: ControlLock
    live: LiveImage[KernelImage]
    machine: Machine
    guest: Guest
    modules: Modules
    requests: RequestObserver
    clock: ClockSwitch
    loads: Workloads

    def replace_kernel(
        self, old: BuiltinKernelComponents, define: Callable[[], Iterable[None]]
    ) -> Iterator[None]:
        """Replace the kernel `old`: take over its time and its trace records, and stop its workloads.

        `define`: function that defines the probes of `old` in this kernel. The method yields whenever
        `define` does. See Kernel.replace_kernel.
        """
        self.lock.assert_held()
        self._go_on_from(old)
        with self.tracing.system.events.keeping(old.tracing.system.events.ids()):
            yield from define()
        self._go_on_from(old)
        self.tracing.arrays.take_records(old.tracing.arrays)
        old.loads.stop()

    def _go_on_from(self, old: BuiltinKernelComponents) -> None:
        """Advance this kernel's clock to the time of the kernel `old`.

        Change nothing if this kernel's clock is ahead already.
        """
        self.machine.clock.advance(max(0, old.machine.clock.now_ns() - self.machine.clock.now_ns()))
