"""Reboot of a mount's kernel by machine/power. The definitions and the trace records survive it."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from emulated_kernel.guests.builtin.modules import ModuleFile
from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.guests.common.host_processes import HostProcesses, ProcessWatch
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.seq_file import CommandFile, SeqFile, explained, listing
from emulated_kernel.vfs.trees.stats import probe_states, probes_file
from kprobefs.daemon.state import previous_boot
from kprobefs.daemon.state.hit_counters import counts, set_counts
from kprobefs.daemon.state.saved_state import SavedState
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.saver import saved
from kprobefs.definitions.syntax import Line
from kprobefs.definitions.tracefs_files import TreeFiles

RETURN_HOOK = "kprobes/return_hook"
"""File that chooses how return probes are implemented."""
PLACE = "the kernel before this one"
"""Name of the file, in the guest's log, of definition lines that cannot be applied after a reboot."""


class PowerFile(CommandFile):
    """machine/power: writing `reboot` boots the guest again; reading returns its state and boot count."""

    replaces_kernel = True
    __slots__ = ()


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
        """Boot the first kernel, and restore `state`, which an earlier daemon has saved.

        Each kernel gets its own view of the host's processes from `watch`. Raises: OSError, as Kernel does.
        """
        self._watch = watch
        self._layout = layout
        self._owner = owner
        self._boots = 1
        self._state = state
        self._processes = watch()
        self._kernel = Kernel(config, self._processes)
        self._return_hook = self._kernel.kretprobes.hooks.return_hook
        """Default return hook of a new kernel."""
        is_restored = state is not None and self._restore(state)
        self.mount = self._kernel.mounted(self._files(self._kernel))
        if state is not None:
            kernel = self._kernel
            with kernel.lock:
                state.keep(kernel, self.mount, partial(self._definitions, kernel), is_fresh=not is_restored)

    def _restore(self, state: SavedState) -> bool:
        """Restore the saved state. If that fails, boot a fresh kernel and return False."""
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
                0o600, listing(self._power), explained(kernel.guest.log, "power", self._command)
            ),
            "definitions": SeqFile(0o400, listing(lambda: self._definitions(kernel))),
            "probes": probes_file(kernel.components),
        }
        if self._state is not None:
            further["state"] = SeqFile(0o400, listing(self._state.text))
        return kernel.filesystem(self._layout, self._owner, further)

    def _power(self) -> Iterator[str]:
        yield f"{'panicked' if self._kernel.guest.is_dead else 'running'}\n"
        yield f"boots {self._boots}\n"

    def _command(self, data: bytes) -> int:
        lines = ascii_lines(data)
        for line in lines:
            if line.strip() != "reboot":
                raise KernelError(errno.EINVAL, f"{line!r} isn't reboot")
        if lines:
            self.reboot()
        return len(data)

    def _definitions(self, kernel: Kernel) -> list[str]:
        hook = kernel.kretprobes.hooks.return_hook
        # The return hook comes first: it cannot be changed once a return probe exists.
        chosen = [f"{RETURN_HOOK} = {hook}"] if hook != self._return_hook else []
        lines = saved(self._all_files(kernel), probe_states(kernel.components))
        return [f"{line}\n" for line in (*chosen, *lines)]

    def _all_files(self, kernel: Kernel) -> TreeFiles:
        """Return the files of the full layout, which may have more than the mount's layout."""
        client = Client(os.getpid(), self._owner.uid, self._owner.gid)
        return TreeFiles(self._tree(kernel), client)

    def _tree(self, kernel: Kernel) -> NodeTree:
        return kernel.filesystem(RootLayout.FULL, self._owner)

    def reboot(self) -> None:
        """Replace the current kernel by a new one. If that fails, keep the old one. Raises: KernelError."""
        with self._kernel.lock:
            old = self._kernel
            clock = self._kernel.machine.clock
            config = replace(old.config, clock=clock.kind, seed=clock.seed, run_budget=old.machine.run_budget)
            with ExitStack() as undo:
                try:
                    processes = self._watch()
                    undo.callback(processes.close)
                    definitions = self._definitions(old)
                    loads = old.loads.orders()
                    new = Kernel(config, processes, lock=old.lock)
                    undo.callback(new.close)
                    tree = self._files(new)
                    new.replace_kernel(old, partial(self._define, new, old, definitions))
                except OSError as error:
                    raise KernelError(error.errno or errno.EIO, str(error)) from error
                undo.pop_all()
            new.adopt_mount(self.mount, tree)
            self._kernel = new
            self._boots = self._boots + 1
            with suppress(KernelError):
                new.loads.start(*loads)
            old.close()
            self._processes.close()
            self._processes = processes
            if self._state is not None:
                self._state.keep(new, self.mount, partial(self._definitions, new))
            del old
            # Objects from before the first request are frozen, so the old kernel must be unfrozen first.
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _define(self, kernel: Kernel, old: Kernel, definitions: list[str]) -> None:
        for file in _modules(old):
            try:
                kernel.modules.load([file])
            except KernelError as error:
                kernel.guest.log(f"module {file.name}: {error.strerror}")
        if self._state is not None:
            # If this fails, the reboot fails, and the old kernel keeps all records.
            previous_boot.make_again(kernel, old)
        lines = [Line(PLACE, number, text.rstrip("\n")) for number, text in enumerate(definitions, 1)]
        for failed in Loader(self._all_files(kernel)).apply(lines):
            for part in failed.splitlines():
                kernel.guest.log(part)
        set_counts(kernel, counts(old))


def _modules(kernel: Kernel) -> list[ModuleFile]:
    """Return the files of the loaded modules. If the guest's list of modules is damaged, return none."""
    with suppress(KernelError):
        return kernel.modules.files()
    return []
