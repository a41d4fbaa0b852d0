"""The options stacktrace and userstacktrace: a record of the call chain follows the record of each event."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import read, truncate, write

T = "/tracing"


@pytest.fixture(scope="module", params=["x86_64", "i386", "riscv64"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="virtual")) as booted:
        yield booted


@pytest.fixture
def tree(kernel: Kernel) -> NodeTree:
    return kernel.filesystem()


def _mkdir(kernel: Kernel, name: str) -> None:
    task, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    with kernel.lock:
        syscalls.with_path(task, "mkdir", f"/scratch/{name}", 0o755)


def _records(tree: NodeTree) -> list[str]:
    """Return the texts of the records in the trace. The text of a stack includes all of its lines."""
    lines = [line for line in read(tree, f"{T}/trace").splitlines() if not line.startswith("#")]
    return re.split(r"\n(?! =>)", "\n".join(line.split(": ", 1)[-1] for line in lines))


def _chain(record: str) -> list[str]:
    title, *callers = record.split("\n => ")
    assert title == "<stack trace>"
    return callers


def test_a_stack_behind_each_event(kernel: Kernel, tree: NodeTree) -> None:
    """While the option stacktrace is set, a stack follows each record of probes, of return probes and of the
    kernel's own events. Guest code handles some of these hits.
    """
    write(tree, f"{T}/kprobe_events", "p:made vfs_mkdir\nr:back vfs_mkdir\n")
    for event in ("kprobes/made", "kprobes/back", "kmem/kmem_cache_alloc"):
        write(tree, f"{T}/events/{event}/enable", "1")
    _mkdir(kernel, "without")
    write(tree, f"{T}/options/stacktrace", "1")
    truncate(tree, f"{T}/trace")
    for name in ("a", "b"):
        _mkdir(kernel, name)
    write(tree, f"{T}/options/stacktrace", "0")
    _mkdir(kernel, "c")
    write(tree, f"{T}/events/enable", "0")
    records = _records(tree)
    stacks = [number for number, record in enumerate(records) if record.startswith("<stack trace>")]
    assert stacks == list(range(1, len(stacks) * 2, 2)), "one behind each record while the option is on"
    for number in stacks:
        chain = _chain(records[number])
        name = records[number - 1].split(":")[0]
        first = {"made": "vfs_mkdir", "back": "do_mkdirat", "kmem_cache_alloc": "kmem_cache_alloc"}[name]
        assert chain[0] == first
        assert chain[-1] == "host_syscall_return"
        if name == "made":
            assert chain[1] == "do_mkdirat"
    made = [record for record in records if record.startswith("made:")]
    assert len(made) == 3
    truncate(tree, f"{T}/kprobe_events")


def test_a_user_stack_has_where_user_mode_was_left(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, f"{T}/options/userstacktrace", "1")
    write(tree, f"{T}/events/kmem/kmem_cache_alloc/enable", "1")
    truncate(tree, f"{T}/trace")
    _mkdir(kernel, "u")
    write(tree, f"{T}/options/userstacktrace", "0")
    write(tree, f"{T}/events/enable", "0")
    records = _records(tree)
    assert records[0].startswith("kmem_cache_alloc:")
    digits = 2 * kernel.arch.word_size
    assert re.fullmatch(rf"<user stack trace>\n =>  <[0-9a-f]{{{digits}}}>", records[1])
