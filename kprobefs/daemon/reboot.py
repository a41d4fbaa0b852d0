"""machine/power: boots the mount's kernel anew, with all that was defined, and the records so far."""

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
PLACE = "the kernel before this one"
"""Where lines that can't be applied come from, in the kernel's log."""


class PowerFile(CommandFile):
    """`reboot` boots the guest anew; reading says whether it runs, and how often it was booted."""

    replaces_kernel = True
    __slots__ = ()


class RebootableKernel:
    """A mount, and the kernel that it shows now."""

    def __init__(
        self,
        config: MachineConfig,
        layout: RootLayout,
        owner: Owner,
        watch: Callable[[], ProcessWatch] = HostProcesses,
        state: SavedState | None = None,
    ) -> None:
        """`watch` makes what each of its kernels sees of the host; `state`: what an earlier daemon has left.

        Raises: OSError, as Kernel does.
        """
        self._watch = watch
        self._layout = layout
        self._owner = owner
        self._boots = 1
        self._state = state
        self._processes = watch()
        self._kernel = Kernel(config, self._processes)
        self._return_hook = self._kernel.kretprobes.hooks.return_hook
        """Of a new kernel."""
        is_restored = state is not None and self._restore(state)
        self.mount = self._kernel.mounted(self._files(self._kernel))
        if state is not None:
            kernel = self._kernel
            with kernel.lock:
                state.keep(kernel, self.mount, partial(self._definitions, kernel), is_fresh=not is_restored)

    def _restore(self, state: SavedState) -> bool:
        """Bring back what was left; where that fails there is a kernel that has seen nothing of it."""
        kernel = self._kernel
        try:
            with kernel.lock:
                return state.restore(kernel, self._tree(kernel))
        # Whatever the files say, the daemon starts.
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
        # It can't be chosen any more once a return probe is there.
        chosen = [f"{RETURN_HOOK} = {hook}"] if hook != self._return_hook else []
        lines = saved(self._all_files(kernel), probe_states(kernel.components))
        return [f"{line}\n" for line in (*chosen, *lines)]

    def _all_files(self, kernel: Kernel) -> TreeFiles:
        """A tree that has all of them, whatever the layout shows."""
        client = Client(os.getpid(), self._owner.uid, self._owner.gid)
        return TreeFiles(self._tree(kernel), client)

    def _tree(self, kernel: Kernel) -> NodeTree:
        return kernel.filesystem(RootLayout.FULL, self._owner)

    def reboot(self) -> None:
        """Put a new kernel into the place of this one; where that fails nothing has changed.

        Raises: KernelError.
        """
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
            # What the daemon made before it served isn't looked at for garbage; the old kernel is some now.
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
            # Where that fails the reboot does, with all records still there.
            previous_boot.make_again(kernel, old)
        lines = [Line(PLACE, number, text.rstrip("\n")) for number, text in enumerate(definitions, 1)]
        for failed in Loader(self._all_files(kernel)).apply(lines):
            for part in failed.splitlines():
                kernel.guest.log(part)
        set_counts(kernel, counts(old))


def _modules(kernel: Kernel) -> list[ModuleFile]:
    """What to load again; nothing where the guest has lost its list."""
    with suppress(KernelError):
        return kernel.modules.files()
    return []
