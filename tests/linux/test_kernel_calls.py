"""machine/call and machine/modules over Debian's kernel with our engine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.errors import KernelError
from emulated_kernel.host.mirror.processes import NoProcesses
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.linux.engine import LinuxEngine
from emulated_kernel.linux.engine_mount import EngineMount
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.linux import debian_kernel
from tests.linux.files import Files

CLIENT = Client(4242, 0, 0)


@pytest.fixture(scope="module")
def mount() -> Iterator[EngineMount]:
    engine = LinuxEngine(*debian_kernel.with_kernel())
    modules = ModuleFiles(debian_kernel.image(), engine.tasks.release)
    made = EngineMount(engine, NoProcesses(), Owner(0, 0), modules, is_tracefs=False)
    yield made
    made.close()


@pytest.fixture
def shell(mount: EngineMount) -> Files:
    return Files(mount, CLIENT)


def call(shell: Files, line: str) -> str:
    """What a call gives; of one that fails the errno in front."""
    try:
        shell.write("/machine/call", f"{line}\n")
    except KernelError as error:
        return f"{errno.errorcode[error.errno or 0]} {shell.read('/machine/call')}"
    return shell.read("/machine/call")


def test_results(shell: Files) -> None:
    assert call(shell, "int_sqrt 144") == "int_sqrt = 0xc (12)\n"
    assert call(shell, 'strcmp "a" "a"') == "strcmp = 0x0 (0)\n"
    assert call(shell, "vfs_read 0") == "EINVAL vfs_read: vfs_read takes 4 arguments, not 1\n"
    assert call(shell, "nothing") == "ENOENT nothing: no symbol named nothing\n"
    assert call(shell, "jiffies") == "EINVAL jiffies: jiffies is not a function\n"


def test_it_may_sleep(shell: Files, mount: EngineMount) -> None:
    """For grace periods and for time, which passes."""
    pc = mount._engine.tasks.machine.pc
    before = pc.tsc
    assert call(shell, "msleep 1500").startswith("msleep = ")
    assert 1.5e9 < (pc.tsc - before) / 2.6 < 1.6e9
    assert call(shell, "synchronize_rcu").startswith("synchronize_rcu = ")


def test_probes_see_the_thread(shell: Files) -> None:
    shell.write("/kprobe_events", "p:in int_sqrt x=$arg1\nr:out int_sqrt $retval\n")
    shell.write("/tracing/events/kprobes/enable", "1")
    call(shell, "int_sqrt 900")
    lines = [line for line in shell.read("/tracing/trace").splitlines() if "int_sqrt" in line]
    assert [line.split("-")[0].strip() for line in lines] == ["machine/call"] * 2
    assert "x=0x384" in lines[0]
    assert "arg1=0x1e" in lines[1]
    shell.write("/tracing/events/kprobes/enable", "0")
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)


def test_one_that_faults(shell: Files) -> None:
    """Its thread alone is killed; the log says why."""
    assert call(shell, "strlen 16") == "EFAULT strlen: its thread was killed; see machine/dmesg\n"
    assert "NULL pointer dereference, address: 0000000000000010" in shell.read("/machine/dmesg")
    assert call(shell, "int_sqrt 81") == "int_sqrt = 0x9 (9)\n"


def test_one_that_sleeps_for_ever(shell: Files) -> None:
    """Nobody waits longer than a minute of the guest's for it; others are called meanwhile."""
    assert call(shell, "schedule_timeout_uninterruptible 0x7fffffffffffffff").startswith("ETIMEDOUT ")
    assert call(shell, "int_sqrt 64") == "int_sqrt = 0x8 (8)\n"


def test_nothing_is_left(shell: Files, mount: EngineMount) -> None:
    pages = mount._engine.machine.memory.host_pages
    call(shell, "int_sqrt 1")
    before = [*pages.extents()]
    for number in range(50):
        call(shell, f"int_sqrt {number}")
    assert len([*pages.extents()]) == len(before)


def test_modules(shell: Files, tmp_path: Path) -> None:
    """The kernel's own, by name or path; not one that probes by itself."""
    files = ModuleFiles(debian_kernel.image(), shell.mount._tasks.release)
    ((name, content),) = files.read("dm_mod")
    for path, data in (("dm.ko", content), ("probing.ko", content + b"\0register_kprobe\0")):
        (tmp_path / path).write_bytes(data)
    shell.write("/tracing/events/sched/sched_switch/enable", "1")
    shell.write("/machine/modules", f"load {tmp_path}/dm.ko\n")
    assert shell.read("/machine/modules").startswith(f"{name} ")
    stranger = Files(shell.mount, Client(4243, 1000, 1000))
    assert "0x0000000000000000" in stranger.read("/machine/modules")
    shell.write("/machine/modules", "unload dm_mod\n")
    shell.write("/tracing/events/sched/sched_switch/enable", "0")
    assert shell.read("/machine/modules") == ""
    assert shell.errno("/machine/modules", f"load {tmp_path}/none.ko\n") == errno.ENOENT
    assert shell.errno("/machine/modules", "load\n") == errno.EINVAL
    assert shell.errno("/machine/modules", f"load {tmp_path}/probing.ko\n") == errno.EPERM
    assert "Oops" not in shell.read("/machine/dmesg").partition("0000000000000010")[0]
