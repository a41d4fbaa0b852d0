"""Kernel: the public API; no logic of its own."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Concatenate, ParamSpec, Self, TypeVar

from emulated_kernel.guests.builtin.mounts.guest_mount import GuestMount
from emulated_kernel.guests.builtin.mounts.mounts import Mounts
from emulated_kernel.guests.builtin.trees.root_layout import RootLayout, build_filesystem
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.kernel.builder import build
from emulated_kernel.kprobes.kinds.batch import register_all
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kinds.jprobe import Jprobe, Jprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _controlled(find: Callable[[Kernel], Callable[_P, _T]]) -> Callable[Concatenate[Kernel, _P], _T]:
    """A method of Kernel that calls one of its parts' under the control lock; it says more."""

    def method(kernel: Kernel, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with kernel._control():
            return find(kernel)(*args, **kwargs)

    return method


class Kernel:
    """A booted kernel whose functions can be probed; also a context manager that frees it.

        with Kernel() as kernel:
            kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=...))
            kernel.call("vfs_read", ...)

    One lock serialises everything; the methods here take it. `watch` tells of host processes. `profile`
    is for switches that no preset has, and goes before the one that `config` names. `lock` is that of a
    kernel whose place this one takes, by replace_kernel(); it is held.

    Raises: KernelError ENOENT (no such architecture), ENOEXEC (no image, or one that doesn't boot), OSError.
    """

    def __init__(
        self,
        config: MachineConfig | None = None,
        watch: ProcessWatch | None = None,
        profile: Profile | None = None,
        lock: ControlLock | None = None,
    ) -> None:
        self.components = parts = build(config or MachineConfig(), watch or ProcessWatch(), profile, lock)
        self.config = parts.config
        self.lock = parts.lock
        self.arch = parts.arch
        self.live, self.image, self.machine = parts.live, parts.live.core, parts.machine
        self.guest = parts.guest
        self.modules = parts.modules
        self.loads = parts.loads
        self.kprobes = parts.engine.kprobes
        self.kretprobes = parts.engine.kretprobes
        self.fprobes = parts.engine.fprobes
        self.tracing = parts.tracing
        self.trace_arrays = parts.tracing.arrays
        self.trace = parts.tracing.arrays.top.array
        self._mounts = Mounts(self.machine.text, self.guest, self.lock, self.config.limits)

    @contextmanager
    def _control(self) -> Iterator[None]:
        """The control lock, for what may sleep. Raises: KernelError EDEADLK (in a probe's handler).

        Linux: there it would deadlock, or be a "scheduling while atomic".
        """
        with self.lock:
            if self.machine.is_running:
                raise KernelError(errno.EDEADLK, "not from a probe's handler: the guest stands in its hit")
            yield

    @contextmanager
    def _request(self) -> Iterator[None]:
        """The same for what counts as a request."""
        with self._control():
            self.components.requests.request_begins(by_program=True)
            yield

    # Probes: by the kernel's own names what Kprobes, Kretprobes, Fprobes and Jprobes do

    register_kprobe = _controlled(lambda kernel: kernel.kprobes.register_kprobe)
    unregister_kprobe = _controlled(lambda kernel: kernel.kprobes.unregister_kprobe)
    enable_kprobe = enable_kretprobe = _controlled(lambda kernel: kernel.kprobes.enable_kprobe)
    disable_kprobe = disable_kretprobe = _controlled(lambda kernel: kernel.kprobes.disable_kprobe)
    commit_kprobes = _controlled(lambda kernel: kernel.kprobes.commit_kprobes)
    register_kretprobe = _controlled(lambda kernel: kernel.kretprobes.register_kretprobe)
    unregister_kretprobe = _controlled(lambda kernel: kernel.kretprobes.unregister_kretprobe)
    register_fprobe = _controlled(lambda kernel: kernel.fprobes.register_fprobe)
    unregister_fprobe = _controlled(lambda kernel: kernel.fprobes.unregister_fprobe)
    enable_fprobe = _controlled(lambda kernel: kernel.fprobes.enable_fprobe)
    disable_fprobe = _controlled(lambda kernel: kernel.fprobes.disable_fprobe)
    register_jprobe = _controlled(lambda kernel: kernel.jprobes.register_jprobe)
    unregister_jprobe = _controlled(lambda kernel: kernel.jprobes.unregister_jprobe)

    @property
    def jprobes(self) -> Jprobes:
        """Raises: KernelError EOPNOTSUPP (in a profile without)."""
        if self.components.engine.jprobes is None:
            raise KernelError(errno.EOPNOTSUPP, f"{self.kprobes.profile.name} has no jprobes")
        return self.components.engine.jprobes

    def enable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.enable_kprobe."""
        self.enable_kprobe(jprobe.kp)

    def disable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.disable_kprobe."""
        self.disable_kprobe(jprobe.kp)

    def register_kprobes(self, kprobes: Sequence[Kprobe]) -> None:
        """See register_all."""
        with self._control():
            register_all(kprobes, self.kprobes.register_kprobe, self.kprobes.unregister_kprobe)

    def register_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        """See register_all. Raises: KernelError EOPNOTSUPP (a kernel without them)."""
        with self._control():
            register_all(jprobes, self.jprobes.register_jprobe, self.jprobes.unregister_jprobe)

    def register_kretprobes(self, rps: Sequence[Kretprobe]) -> None:
        """See register_all."""
        with self._control():
            register_all(rps, self.kretprobes.register_kretprobe, self.kretprobes.unregister_kretprobe)

    def unregister_kprobes(self, kprobes: Iterable[Kprobe]) -> None:
        """See Kprobes.unregister_kprobe."""
        for kprobe in kprobes:
            self.unregister_kprobe(kprobe)

    def unregister_jprobes(self, jprobes: Iterable[Jprobe]) -> None:
        """See Jprobes.unregister_jprobe."""
        for jprobe in jprobes:
            self.unregister_jprobe(jprobe)

    def unregister_kretprobes(self, rps: Iterable[Kretprobe]) -> None:
        """See Kretprobes.unregister_kretprobe."""
        for rp in rps:
            self.unregister_kretprobe(rp)

    def hit_ring(self, *registers: str, capacity: int = 128) -> HitRing:
        """A ring that probes record their latest hits in; see HitRing.

        Raises: ValueError (a register's name, a capacity that is no power of 2), HardwareError (no memory).
        """
        with self._control():
            return HitRing(self.machine, self.arch, registers, capacity)

    # The guest

    def regs_return_value(self, regs: Regs) -> int:
        """What a function has returned, for handlers at its return. Mirrors: regs_return_value (v6.1)."""
        return int(getattr(regs, self.arch.registers.return_value))

    def call(self, function: str, *args: int | str | bytes) -> int:
        """Call a guest function in a task of its own; see Guest.call_function.

        Raises: KernelError, what the first probe handler that failed during the call raised (after it).
        """
        with self._request():
            return self.kprobes.hits.failures.raised_behind(lambda: self.guest.call_function(function, *args))

    def load_module(self, name: str) -> None:
        """Load a module that comes with the image, or a file, told by a slash; see Modules.load."""
        files = self.modules.read(name)
        with self._request():
            self.modules.load(files)

    def unload_module(self, name: str) -> None:
        """See Modules.unload."""
        with self._request():
            self.modules.unload(name)

    def filesystem(
        self,
        layout: RootLayout = RootLayout.FULL,
        owner: Owner | None = None,
        further: Mapping[str, Node] = MappingProxyType({}),
    ) -> NodeTree:
        """The files of this kernel as a tree, belonging to `owner` (root where not given).

        `further` files of machine/ are the front end's.
        """
        return build_filesystem(self.components, layout, owner, further)

    def mount(self, layout: RootLayout = RootLayout.FULL, owner: Owner | None = None) -> GuestMount:
        """These files for a front end to serve, with the guest's part in each request."""
        return self.mounted(self.filesystem(layout, owner))

    def mounted(self, files: NodeTree) -> GuestMount:
        """As mount(), of a tree that was made before."""
        with self.lock:
            return self._mounts.add(files)

    def replace_kernel(self, old: Kernel, define: Callable[[], None]) -> None:
        """Go on where a kernel of the same lock and configuration ended, which can't be used any more then.

        Time goes on; events that `define` makes have the ids that those of their names had, so that the old
        records, which come with a mark behind them, can still be printed. Needs the lock.
        Where it fails the old kernel goes on. Raises: MemoryError, what `define` does.
        """
        self.components.replace_kernel(old.components, define)

    def adopt_mount(self, mount: GuestMount, files: NodeTree) -> None:
        """A mount of the kernel that this one succeeds shows `files`, of this kernel, from now on."""
        self._mounts.adopt_mount(mount, files)

    def close(self) -> None:
        """Free the machine; its loads end."""
        with self.lock:
            self.loads.stop()
            self.machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
