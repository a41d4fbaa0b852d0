"""machine/call and machine/modules over Debian's kernel with kprobefs's kprobes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing import kernel_calls
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.made_module import made_module
from tests.guests.linux.parts import calls_of, guest_of

CLIENT = Client(4242, 0, 0)


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    engine = LinuxEngine(*debian_kernel.with_kernel())
    modules = debian_kernel.modules(engine.tasks.release)
    made = probed_mount(engine, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False)
    yield made
    made.close()


@pytest.fixture
def shell(mount: Mount) -> Files:
    return Files(mount, CLIENT)


def test_results(shell: Files) -> None:
    assert shell.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"
    assert shell.call('strcmp "a" "a"') == "strcmp = 0x0 (0)\n"
    assert shell.call("vfs_read 0") == "EINVAL vfs_read: vfs_read takes 4 arguments, not 1\n"
    assert shell.call("nothing") == "ENOENT nothing: no symbol named nothing\n"
    assert shell.call("jiffies") == "EINVAL jiffies: jiffies is not a function\n"


def test_it_may_kill_the_task_that_waits_for_it(mount: Mount) -> None:
    """The task sleeps in its write, although a signal is pending. The write has its result.

    The client's next request gets a new task.
    """
    shell = Files(mount, Client(4343, 0, 0))
    task = shell.call("find_task_by_vpid 4343").split()[2]
    shell.write("/kprobe_events", "p:killing send_sig signal=$arg1:s32\n")
    shell.write("/tracing/events/kprobes/killing/enable", "1")
    assert shell.call(f"send_sig 9 {task} 1") == "send_sig = 0x0 (0)\n"
    assert "killing: (send_sig" in shell.read("/tracing/trace")
    shell.write("/tracing/events/kprobes/killing/enable", "0")
    shell.write("/kprobe_events", "-:killing\n")
    assert shell.call("find_task_by_vpid 4343").split()[2] != "0x0"


def test_it_may_sleep(shell: Files, mount: Mount) -> None:
    """A called function may sleep for a time, which passes in the guest, and for a grace period."""
    pc = calls_of(mount).engine.tasks.machine.pc
    before = pc.tsc
    assert shell.call("msleep 1500").startswith("msleep = ")
    assert 1.5e9 < (pc.tsc - before) / 2.6 < 1.6e9
    assert shell.call("synchronize_rcu").startswith("synchronize_rcu = ")


def test_probes_see_the_thread(shell: Files) -> None:
    shell.write("/kprobe_events", "p:in int_sqrt x=$arg1\nr:out int_sqrt $retval\n")
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.call("int_sqrt 900")
    lines = [line for line in shell.read("/tracing/trace").splitlines() if "int_sqrt" in line]
    assert [line.split("-")[0].strip() for line in lines] == ["machine/call"] * 2
    assert "x=0x384" in lines[0]
    assert "arg1=0x1e" in lines[1]
    shell.write("/tracing/events/kprobes/enable", "0")
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)


def test_one_that_faults(shell: Files) -> None:
    """A fault in a called function kills only the thread that makes this call, and the log has the reason."""
    assert shell.call("strlen 16") == "EFAULT strlen: its thread was killed; see machine/dmesg\n"
    assert "NULL pointer dereference, address: 0000000000000010" in shell.read("/machine/dmesg")
    assert shell.call("int_sqrt 81") == "int_sqrt = 0x9 (9)\n"


def test_one_that_sleeps_for_long(shell: Files, mount: Mount) -> None:
    """A call is given up after a minute of guest time.

    The page of the call is freed after the call has ended.
    """
    pages = calls_of(mount).engine.machine.memory.host_pages
    shell.call("int_sqrt 1")
    used = pages.used
    jiffies = 100 * 250
    said = shell.call(f"schedule_timeout_uninterruptible {jiffies}")
    assert re.match("ETIMEDOUT .*: it hasn't come back after (59|60)[0-9]{3} ms of the guest's", said), said
    assert pages.used == used + 4096
    assert shell.call("int_sqrt 64") == "int_sqrt = 0x8 (8)\n"
    assert pages.used == used + 4096
    shell.call("msleep 50000")
    assert shell.call("int_sqrt 64") == "int_sqrt = 0x8 (8)\n"
    assert pages.used == used


def test_one_that_is_killed_later(shell: Files, mount: Mount) -> None:
    pages = calls_of(mount).engine.machine.memory.host_pages
    shell.call("int_sqrt 1")
    used = pages.used
    assert shell.call("schedule_timeout_uninterruptible 0x7fffffffffffffff").startswith("ETIMEDOUT ")
    calls = calls_of(mount).engine.kernel_calls
    (late,) = calls._mailboxes
    with mount.lock:
        calls.exiting(calls._head(late)[kernel_calls._TASK // 8])
    shell.call("int_sqrt 64")
    assert pages.used == used


def test_nothing_is_left(shell: Files, mount: Mount) -> None:
    pages = calls_of(mount).engine.machine.memory.host_pages
    shell.call("int_sqrt 1")
    before = [*pages.extents()]
    for number in range(50):
        shell.call(f"int_sqrt {number}")
    assert len([*pages.extents()]) == len(before)


def test_memory(shell: Files) -> None:
    assert re.match(r"MemTotal: +\d{5} kB\nMemFree: ", shell.read("/machine/meminfo"))


def test_modules(shell: Files, tmp_path: Path) -> None:
    """Modules of the kernel are loaded by name or path. A module that registers kprobes is refused."""
    log = shell.read("/machine/dmesg")
    files = debian_kernel.modules(guest_of(shell.mount).tasks.release)
    ((name, content),) = files.read("dm_mod")
    for path, data in (
        ("dm.ko", content),
        ("probing.ko", made_module(["unregister_kprobe", "register_kprobe"])),
    ):
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
    (tmp_path / "cut.ko").write_bytes(content[: len(content) // 2])
    assert shell.errno("/machine/modules", f"load {tmp_path}/cut.ko\n") == errno.ENOEXEC
    said = shell.read("/machine/dmesg").removeprefix(log)
    for why in (
        "none.ko: No such file",
        "load NAME, load PATH or",
        "probing calls register_kprobe: two",
        "cut.ko: not a usable module (cut): truncated: ",
    ):
        assert f"kprobefs: machine/modules: {why}" in said.replace(f"{tmp_path}/", "")
    assert said.count("kprobefs: machine/modules: ") == 4
    assert len(said) < len(log)
    assert "Oops" not in said


def test_modules_are_their_writers(
    shell: Files, mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is loaded by a system call of the client that writes to machine/modules.

    If the load would sleep, the write fails with EINTR, and the client's task ends.
    """
    callers: list[LinuxTask] = []

    def sleeps(task: LinuxTask, _content: bytes) -> None:
        callers.append(task)
        raise Blocked

    monkeypatch.setattr(guest_of(mount).syscalls, "load_module", sleeps)
    (tmp_path / "made.ko").write_bytes(made_module(["_printk"]))
    for pid in (4250, 4251):
        writer = Files(mount, Client(pid, 0, 0))
        handle = mount.open(writer.client, "/machine/modules", os.O_WRONLY)
        shell.read("/machine/modules")
        with pytest.raises(KernelError) as refused:
            mount.write(writer.client, handle, f"load {tmp_path}/made.ko\n".encode(), 0)
        assert refused.value.errno == errno.EINTR
        assert callers[-1].pid == pid
        assert not callers[-1].alive
        mount.release(handle)
    assert shell.call("int_sqrt 81") == "int_sqrt = 0x9 (9)\n"


@pytest.mark.parametrize(
    ("wanted", "defined", "used"),
    [
        (["unregister_kprobe", "register_kprobe"], [], "register_kprobe"),
        (["unregister_kretprobes", "register_kretprobes"], [], "register_kretprobes"),
        (["register_ftrace_direct_multi"], [], "register_ftrace_direct_multi"),
        (["klp_enable_patch"], [], "klp_enable_patch"),
        (["unregister_kprobe"], [], None),
        (["_printk"], ["register_kprobe"], None),
    ],
)
def test_modules_that_probe(
    wanted: list[str], defined: list[str], used: str | None, mount: Mount, tmp_path: Path
) -> None:
    """A module that needs a kernel function that registers probes is refused.

    A module that defines a function of the same name is not refused.
    """
    path = tmp_path / "made.ko"
    path.write_bytes(made_module(wanted, defined))
    handle = mount.open(CLIENT, "/machine/modules", os.O_WRONLY)
    with pytest.raises(KernelError) as refused:
        mount.write(CLIENT, handle, f"load {path}\n".encode(), 0)
    mount.release(handle)
    # The kernel's own loader wants more of a module.
    assert refused.value.errno == (errno.EPERM if used else errno.ENOEXEC)
    assert not used or f"made calls {used}: " in str(refused.value.strerror)
