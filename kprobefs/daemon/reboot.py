"""Reboots the kernel of a mount through machine/power. Definitions and trace records survive a reboot."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from emulated_kernel.guests.builtin.modules import ModuleFile
from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.guests.common.host_processes import HostProcesses, ProcessWatch
from emulated_kernel.guests.common.workloads import WorkloadOrder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import PAUSE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import SteppedFile, explained_steps
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import Steps
from emulated_kernel.vfs.core.seq_file import SeqFile, StreamFile, listing
from emulated_kernel.vfs.trees.stats import HistoryFile, probe_switches, probes_file
from kprobefs.common.errors import escape_for_terminal
from kprobefs.common.mountpoints import LOST
from kprobefs.daemon.state import previous_boot
from kprobefs.daemon.state.hit_counters import counts, set_counts
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.saver import saved_in_steps
from kprobefs.definitions.syntax import Line
from kprobefs.definitions.tracefs_files import TreeFiles, host_error

if TYPE_CHECKING:
    from kprobefs.daemon.state.saved_state import SavedState

RETURN_HOOK = "kprobes/return_hook"
"""Path of the file that chooses the implementation of return probes."""
PLACE = "the kernel before this one"
"""Name of the source of the definitions, in messages about definitions that fail after a reboot."""


class PowerFile(SteppedFile):
    """The file machine/power. Writing `reboot` replaces the kernel by a new one.

    Reading returns the state of the kernel, the number of boots, and messages about what the last reboot has
    lost.
    """

    replaces_kernel = True
    __slots__ = ()


class KernelFiles(TreeFiles):
    """The control files of a kernel in this process, for functions that read and write the files of a mount.

    The object uses no file descriptors, even for thousands of definitions and events.
    """

    def __init__(self, tree: NodeTree, client: Client, kernel: Kernel) -> None:
        super().__init__(tree, client)
        self._kernel = kernel

    def define(self, name: str, text: str) -> None:
        """Execute the definition `text` in the same way as a write to dynamic_events. `name` is ignored."""
        del name
        try:
            self._kernel.tracing.dynamic_events.write(text.encode("utf-8", "surrogateescape"))
        except KernelError as error:
            # host_errors() would double the time of this method, and there may be 32,000 definitions.
            raise host_error(error) from error

    def configured_events(self, directory: str) -> Iterator[str]:
        """Yield group/name of each event that may have a filter, triggers or soft mode in a trace array.

        `directory`: directory of the trace array; see Files.configured_events.
        """
        name = directory.partition("instances/")[2].rstrip("/")
        arrays = self._kernel.trace_arrays
        tracing = arrays.find(name) if name else arrays.top
        assert tracing is not None
        array = tracing.array
        found = [
            f"{event.group}/{event.name}"
            for event in self._kernel.tracing.system.events
            if array in event.filters or (array in event.files and event.files[array].is_special)
        ]
        yield from sorted(found, key=lambda event: event.split("/"))


class RebootableKernel:
    """A mount and its current kernel, which reboot() replaces."""

    def __init__(
        self,
        config: MachineConfig,
        layout: RootLayout,
        owner: Owner,
        watch: Callable[[], ProcessWatch] = HostProcesses,
        state: SavedState | None = None,
    ) -> None:
        """Boot the first kernel, and restore what an earlier daemon has saved in `state`.

        `state`: also saves the state of the kernel from now on; None without option --state. `layout`,
        `owner`: directories and owner of the mount's files. `watch` is called for each kernel, and returns
        the kernel's view of the host's processes. Raises: as Kernel.
        """
        self._watch = watch
        self._layout = layout
        self._owner = owner
        self._boots = 1
        self._lost: list[str] = []
        """Messages about what the last reboot has lost: modules, definitions, settings and workloads."""
        self._state = state
        self._processes = watch()
        self._kernel = Kernel(config, self._processes)
        self._return_hook = self._kernel.kretprobes.hooks.return_hook
        """Name of the default implementation of return probes. A reboot keeps the choice of another one."""
        is_restored = state is not None and self._restore(state)
        self.mount = self._kernel.mounted(self._files(self._kernel))
        if state is not None:
            kernel = self._kernel
            with kernel.lock:
                state.keep(kernel, self.mount, lambda: self._lines(kernel), is_fresh=not is_restored)

    def _restore(self, state: SavedState) -> bool:
        """Restore the saved state in the current kernel, and return True. Return False if there is no state.

        If restoring the state fails, boot another kernel, make it the current kernel, and return False.
        """
        kernel = self._kernel
        try:
            with kernel.lock:
                return state.restore(kernel, self._tree(kernel))
        # The daemon must start even if the state's files are damaged.
        except Exception as error:
            state.refuse(error)
        self._kernel = Kernel(kernel.config, self._processes)
        kernel.close()
        return False

    def _files(self, kernel: Kernel) -> NodeTree:
        further: dict[str, Node] = {
            "power": PowerFile(
                0o600, listing(self._power), explained_steps(kernel.guest.log, "power", self._command)
            ),
            "definitions": StreamFile(0o400, lambda: self._definitions(kernel)),
            "probes": probes_file(kernel.components),
            "history": HistoryFile(kernel.components, lambda: self.mount.past),
        }
        if self._state is not None:
            further["state"] = SeqFile(0o400, listing(self._state.text))
        return kernel.filesystem(self._layout, self._owner, further)

    def _power(self) -> Iterator[str]:
        yield f"{'panicked' if self._kernel.guest.is_dead else 'running'}\n"
        yield f"boots {self._boots}\n"
        yield from (f"{LOST}{each}\n" for each in self._lost)

    def _command(self, data: bytes) -> Steps:
        lines = ascii_lines(data)
        for line in lines:
            if line.strip() != "reboot":
                raise KernelError(errno.EINVAL, f"{line!r} isn't reboot")
        if lines:
            yield from self._reboot()
        return len(data)

    def _definitions(self, kernel: Kernel) -> Iterator[str]:
        """Yield the lines that define the probes and settings of `kernel`.

        Yield PAUSE wherever the control lock may be released for a moment.
        """
        hook = kernel.kretprobes.hooks.return_hook
        # The return hook comes first: it cannot be changed once a return probe exists.
        if hook != self._return_hook:
            yield f"{RETURN_HOOK} = {hook}\n"
        for line in saved_in_steps(
            self._all_files(kernel),
            lambda: kernel.kretprobes.default_maxactive,
            probe_switches(kernel.components),
        ):
            yield f"{line}\n" if line else PAUSE

    def _lines(self, kernel: Kernel) -> list[str]:
        return [*filter(None, self._definitions(kernel))]

    def _all_files(self, kernel: Kernel) -> TreeFiles:
        """Return the files of `kernel` in the full layout. The layout of the mount may have fewer files."""
        client = Client(os.getpid(), self._owner.uid, self._owner.gid)
        return KernelFiles(self._tree(kernel), client, kernel)

    def _tree(self, kernel: Kernel) -> NodeTree:
        return kernel.filesystem(RootLayout.FULL, self._owner)

    def reboot(self) -> None:
        """Replace the current kernel by a new kernel. If this fails, the current kernel stays in use.

        Raises: KernelError (the new kernel could not take over).
        """
        with self._kernel.lock:
            for _ in self._reboot():
                pass

    def _reboot(self) -> Iterator[None]:
        """Do the work of reboot() in steps. The control lock is held during each step.

        Between two steps, the old kernel serves requests, except changes of control files, which wait for the
        end of the reboot. Raises: as reboot().
        """
        old = self._kernel
        # A collection would look at all objects of both kernels, which stops all threads.
        gc.disable()
        try:
            yield from self._replace(old)
        finally:
            gc.enable()

    def _replace(self, old: Kernel) -> Iterator[None]:
        clock = old.machine.clock
        loads: list[WorkloadOrder] = []
        lost: list[str] = []
        with self.mount.holding_changes():
            with ExitStack() as undo:
                try:
                    processes = self._watch()
                    undo.callback(processes.close)
                    definitions: list[str] = []
                    for line in self._definitions(old):
                        if line:
                            definitions.append(line)
                        else:
                            yield
                    config = replace(
                        old.config, clock=clock.kind, seed=clock.seed, run_budget=old.machine.run_budget
                    )
                    new = Kernel(config, processes, lock=old.lock)
                    undo.callback(new.close)
                    tree = self._files(new)
                    yield
                    yield from new.replace_kernel(
                        old, partial(self._define, new, old, definitions, loads, lost)
                    )
                except OSError as error:
                    raise KernelError(error.errno or errno.EIO, str(error)) from error
                undo.pop_all()
            new.adopt_mount(self.mount, tree)
        self._kernel = new
        self._boots = self._boots + 1
        try:
            new.loads.start(*loads)
        except KernelError as error:
            lost.append(f"loads: {error.strerror}")
        self._lost = lost
        for each in lost:
            new.guest.log(each)
        old.close()
        self._processes.close()
        self._processes = processes
        if self._state is not None:
            self._state.keep(new, self.mount, lambda: self._lines(new))
        del old
        # Objects from before the first request are frozen, so the old kernel must be unfrozen first.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _define(
        self,
        kernel: Kernel,
        old: Kernel,
        definitions: list[str],
        loads: list[WorkloadOrder],
        lost: list[str],
    ) -> Iterator[None]:
        """Define the modules, probes and settings of the kernel `old` in `kernel`, in steps.

        `definitions`: lines that define the probes and settings. Append to `loads` the orders for the
        workloads that run in `old`, so that they can be started in `kernel`. Append to `lost` a message about
        each module, probe or setting that could not be defined in `kernel`.
        """
        for file in _modules(old):
            try:
                kernel.modules.load([file])
            except KernelError as error:
                lost.append(f"module {file.name}: {error.strerror}")
            yield
        if self._state is not None:
            # If this fails, the reboot fails, and the old kernel keeps all records.
            previous_boot.make_again(kernel, old)
        # A comment names a setting that no line can express.
        lost += [
            escape_for_terminal(text.removeprefix("#").strip())
            for text in definitions
            if text.startswith("#")
        ]
        lines = [Line(PLACE, number, text.rstrip("\n")) for number, text in enumerate(definitions, 1)]
        for failed in (yield from Loader(self._all_files(kernel), is_new=True).steps(lines)):
            lost += failed.splitlines()
        set_counts(kernel, counts(old))
        loads += old.loads.orders()


def _modules(kernel: Kernel) -> list[ModuleFile]:
    """Return the files of the modules that are loaded in `kernel`.

    Return an empty list if the kernel's list of modules is damaged.
    """
    with suppress(KernelError):
        return kernel.modules.files()
    return []
