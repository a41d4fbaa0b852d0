"""debugfs kprobes/: the probes themselves, and the switches for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.vfs.node import Directory, File, Node
from emulated_kernel.vfs.parse import kstrtobool
from emulated_kernel.vfs.ports import KprobesPort, ReturnHooksPort
from emulated_kernel.vfs.seq import AttributeFile, CommandFile, SeqFile, listing, single
from emulated_kernel.vfs.sysctl import kprobes_optimization


def kprobes_directory(kprobes: KprobesPort, ours: Mapping[str, Node] | None = None) -> Directory:
    """list, enabled, blacklist as Linux has them; `optimization` stands for the sysctl; then `ours`."""

    def set_enabled(data: bytes) -> int:
        kprobes.set_enabled(kstrtobool(data))
        return len(data)

    sysctl: dict[str, Node] = {}
    if kprobes.can_optimize:
        sysctl["optimization"] = kprobes_optimization(kprobes)
    return Directory(
        0o755,
        {
            "list": SeqFile(0o400, kprobes.list_records),
            # Linux: a write to `enabled` leaves the file position alone, which CommandFile does too.
            "enabled": CommandFile(0o600, single(lambda: f"{kprobes.enabled:d}\n"), set_enabled),
            "blacklist": SeqFile(0o400, listing(kprobes.blacklist_text)),
            **sysctl,
            **(ours or {}),
        },
    )


def return_hook_file(hooks: ReturnHooksPort) -> File:
    """return_hook: the shadow stacks that there are, in brackets the one in use; a name selects."""

    def names() -> str:
        return " ".join(f"[{name}]" if name == hooks.return_hook else name for name in hooks.return_hooks())

    return AttributeFile(
        0o644,
        show=lambda: f"{names()}\n",
        store=lambda data: hooks.select_return_hook(data.decode("utf-8", "surrogateescape").strip()),
    )
