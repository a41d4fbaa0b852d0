"""ModuleWatch: reads the modules that a distribution's kernel loads, so that their text can be probed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from struct import error as StructError
from struct import pack
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.guests.linux.probing.loaded_modules import LoadedModules
from emulated_kernel.guests.linux.probing.replaced_calls import ReplacedCalls
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import Module
from emulated_kernel.image.text_tables import JumpLabel
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.trace.events.static_keys import StaticKeys
from emulated_kernel.util.abi import PAGE_SIZE, ModuleState
from emulated_kernel.util.errors import KernelError

_FIRST = (1 << 31) - 1
"""Priority of the notifier that is called first, before other notifiers check the module's tracepoints."""
_LAST = -(1 << 31)
"""Priority of the notifier that is called last, after all other notifiers have patched the module."""
Notify = Callable[[ModuleState, int], None]
_LIMIT = 1 << 10
"""Maximum number of module notifiers in the guest's chain."""
log = logging.getLogger("kprobefs.linux")


class ModuleWatch:
    """Reads modules, and keeps their text in the ledger of patched text while they are loaded."""

    def __init__(self, machine: ProbedMachine, kernel: LinuxKernel) -> None:
        self._machine = machine
        self._kernel = kernel
        self.loaded = LoadedModules(kernel, machine.memory, machine.damage)
        self.name = self.loaded.name
        """Function that returns the name of the module whose struct module is at an address."""
        self._adopted: set[int] = set()
        self._labels: list[JumpLabel] = []
        self._keys: StaticKeys | None = None

    def follow(self, keys: StaticKeys) -> None:
        """Add the jump labels of all modules to the static keys `keys`.

        From now on, also add those of each module that is loaded.
        """
        self._keys = keys
        keys.add(self._labels)

    def there(self) -> list[Module]:
        """Return the modules that are loaded now, the oldest first. Log modules that cannot be read."""
        found: list[Module] = []
        with self._logged():
            for module in self.loaded.addresses():
                with self._logged():
                    found.append(self.read(module))
        return found

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log and suppress an error that reading a module raises in the `with` block.

        The module then stays unknown.
        """
        try:
            yield
        except (KernelError, MemoryFault, HardwareError, ValueError, StructError) as error:
            log.warning("%s: a module cannot be read: %s", self._kernel.release, error)

    def read(self, module: int) -> Module:
        """Return the complete module whose struct module is at `module`.

        The ledger, which records patched text, takes over the module's present text as original text. Raises:
        as LoadedModules.
        """
        found = self.loaded.read(module)
        text = self._machine.text
        for start, code in found.code.items():
            text.adopt(start, code)
            self._adopted.add(start)
            # Code that was translated for the previous user of these pages must not run.
            text.substitute(start, code)
        self._labels += found.jump_labels
        if self._keys is not None:
            self._keys.add(found.jump_labels)
        return found

    def forget(self, spans: Iterable[tuple[int, int]], _module: str) -> None:
        """Forget a module's text in the ranges `spans`, because the kernel is about to free this memory.

        `spans`: pairs (start, end).
        """
        ranges = [range(*span) for span in spans]
        gone = list[JumpLabel]()
        left = list[JumpLabel]()
        for label in self._labels:
            (gone if any(label.code in span for span in ranges) else left).append(label)
        self._labels = left
        if self._keys is not None:
            self._keys.remove(gone)
        for start in self._adopted.intersection(span.start for span in ranges):
            self._adopted.remove(start)
            self._machine.text.disown(start)

    def begin(self, arch: Arch, first: Notify, last: Notify) -> None:
        """From now on, call `first` and `last` whenever a module gets the state COMING, LIVE or GOING.

        Their arguments are the state and the address of the struct module. The kernel calls `first` before
        all other notifiers, `last` after them. If the kernel's list of notifiers is missing or damaged, log a
        warning and do nothing.
        Mirrors: kernel/module/main.c:register_module_notifier, kernel/notifier.c:notifier_chain_register
        (v6.1).
        """
        head = self._kernel.kallsyms.lookup_name("module_notify_list")
        if head is None:
            log.warning("%s: modules are not followed: no module_notify_list", self._kernel.release)
            return
        machine = self._machine
        memory = machine.memory
        btf = self._kernel.btf
        following = btf.offset("notifier_block.next")
        start = head + btf.offset("blocking_notifier_head.head")
        link = start
        try:
            reader = GuestReader(memory, "list of module notifiers", machine.damage)
            for block in reader.chain(reader.word(start), link=following, limit=_LIMIT):
                link = block + following
            memory.write(link, pack("<Q", self._block(arch, last, _LAST)))
            block = self._block(arch, first, _FIRST)
            memory.write(block + following, pack("<Q", memory.read_word(start)))
            memory.write(start, pack("<Q", block))
        except MemoryFault as fault:
            log.warning("%s: modules are not followed: module_notify_list: %s", self._kernel.release, fault)

    def _block(self, arch: Arch, notify: Notify, priority: int) -> int:
        """Return the address of a new notifier_block that calls `notify`.

        `priority`: the guest calls notifiers with a higher priority first.
        """
        machine = self._machine
        memory = self._machine.memory
        btf = self._kernel.btf
        calls = ReplacedCalls(arch, memory)

        def called(regs: Any) -> None:
            _, state, module = calls.arguments(regs)
            calls.end(regs, 0)
            with self._logged():
                notify(ModuleState(state & 0xFFFFFFFF), module)

        stub = machine.text.alloc_text(len(arch.breakpoint))
        machine.breakpoints[stub] = called
        block = machine.alloc_pages(PAGE_SIZE)
        memory.write(block + btf.offset("notifier_block.notifier_call"), pack("<Q", stub))
        memory.write(block + btf.offset("notifier_block.priority"), pack("<i", priority))
        return block
