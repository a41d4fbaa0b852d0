"""The directory kprobes/ of debugfs: the list of probes, and switches for all probes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from emulated_kernel.components.records import KernelComponents
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS, ReturnHooks
from emulated_kernel.util.abi import HZ
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.attribute_file import AttributeFile
from emulated_kernel.vfs.core.command_file import CommandFile, explained
from emulated_kernel.vfs.core.kstrtox import kstrtobool, kstrtoul, shown
from emulated_kernel.vfs.core.node import Directory, Node, Owner
from emulated_kernel.vfs.core.open_file import File
from emulated_kernel.vfs.core.seq_file import SeqFile, listing, single
from emulated_kernel.vfs.trees.stats import stats_directory
from emulated_kernel.vfs.trees.sysctl import kprobes_optimization


def kprobes_directory(
    kernel: KernelComponents, owner: Owner, log: Callable[[str], None] | None = None
) -> Directory:
    """Return kprobes/ with Linux's files `list`, `enabled` and `blacklist`, and kprobefs's own files.

    The file `optimization` is the sysctl debug.kprobes-optimization. `log` writes to the kernel log. If `log`
    is None, the file `return_hook` is left out.
    """
    kprobes = kernel.engine.kprobes
    table = kernel.engine.kprobes.table

    def set_enabled(data: bytes) -> int:
        kprobes.set_enabled(kstrtobool(data))
        return len(data)

    sysctl: dict[str, Node] = {}
    if kprobes.optimizer is not None:
        sysctl["optimization"] = kprobes_optimization(kprobes, kprobes.optimizer)
        sysctl["stages"] = _stages_file(kprobes, log)
    return Directory(
        0o755,
        {
            "list": SeqFile(0o400, kprobes.list_records),
            "enabled": CommandFile(0o600, single(lambda: f"{not table.all_disarmed:d}\n"), set_enabled),
            "blacklist": SeqFile(0o400, listing(kprobes.blacklist_text)),
            **sysctl,
            **({"return_hook": _return_hook_file(kernel.engine.kretprobes.hooks, log)} if log else {}),
            "stats": stats_directory(kernel, owner),
        },
    )


def _return_hook_file(hooks: ReturnHooks, log: Callable[[str], None]) -> File:
    """Return the file `return_hook`, which lists the kinds of shadow stacks, the current one in brackets.

    A write selects another kind.
    """

    def names() -> str:
        return " ".join(f"[{name}]" if name == hooks.return_hook else name for name in SHADOW_STACKS)

    def select(data: bytes) -> None:
        hooks.select_return_hook(data.decode("utf-8", "surrogateescape").strip())

    return AttributeFile(0o644, lambda: f"{names()}\n", explained(log, "return_hook", select))


def _stages_file(kprobes: Kprobes, log: Callable[[str], None] | None) -> File:
    """Return the file `stages`, with a switch that makes each change of a probe's jump stop after each step.

    A change writes the jump or removes it. The first line of the file shows the switch. A further line
    describes each change that has stopped. Writing 0 or 1 sets the switch. Writing `1 MILLISECONDS` sets the
    switch to 1, and lets each stopped change continue by itself after this time. Writing `next` makes all
    stopped changes do their next step. Linux has no such file.

    `log` writes the reason of a refused write to the kernel log; None: the reason is not logged.
    """

    def lines() -> Iterator[str]:
        yield f"{kprobes.stages_text()}\n"
        yield from kprobes.stopped_lines()

    def command(data: bytes) -> int:
        words = data.split()
        if words == [b"next"]:
            kprobes.next_stage()
        elif len(words) == 1 and words[0] in (b"0", b"1"):
            kprobes.set_stages(words[0] == b"1")
        elif len(words) == 2 and words[0] == b"1":
            kprobes.set_stages(True, -(-kstrtoul(words[1]) * HZ // 1000))
        else:
            raise KernelError(errno.EINVAL, f"{shown(data)}: write 0, 1, 1 MILLISECONDS or next")
        return len(data)

    execute = command if log is None else explained(log, "stages", command)
    return CommandFile(0o600, listing(lines), execute)
