"""machine/modules: loading and unloading by writes, the text as in /proc/modules, and probes on functions of
modules.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, eventually, needs_fuse
from tests.mounted.files import EVENTS, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

MODULES = "machine/modules"


def names(files: Files) -> list[str]:
    return [line.split()[0] for line in files.lines(MODULES)]


def test_load_and_unload(files: Files) -> None:
    assert files.read(MODULES) == ""
    files.write(MODULES, "load counter_user\nload trace-printk\n")
    assert names(files) == ["trace_printk", "counter_user", "counter"]
    assert files.lines(MODULES)[2].split()[2:5] == ["1", "counter_user,", "Live"]
    files.write(MODULES, "unload trace-printk\nunload counter_user\nunload counter\n")
    assert files.read(MODULES) == ""


@pytest.mark.parametrize(
    ("command", "number", "told"),
    [
        ("load no_such", errno.ENOENT, "module no_such: there is none of that name"),
        ("unload no_such", errno.ENOENT, "no_such: no such module is loaded"),
        ("load /no/such.ko", errno.ENOENT, "module /no/such.ko: No such file or directory"),
        ("load initfail", errno.ENODEV, "initfail: its init function returned -19"),
        ("unload ktgt_in_use", errno.ENOENT, "ktgt_in_use: no such module is loaded"),
        ("load ../../no/such", errno.ENOENT, "module ../../no/such: No such file or directory"),
        ("reload ktgt", errno.EINVAL, "modules: 'reload ktgt' is neither load NAME nor unload NAME"),
        ("load", errno.EINVAL, "modules: 'load' is neither load NAME nor unload NAME"),
        ("load \xe9", errno.EINVAL, None),
    ],
)
def test_errors(command: str, number: int, told: str | None, shared: Files) -> None:
    before = shared.lines("machine/dmesg")
    with assert_errno(number):
        shared.write(MODULES, command + "\n")
    assert shared.read(MODULES) == ""
    new = [line.split("] ", 1)[1] for line in shared.lines("machine/dmesg")[len(before) :]]
    assert new == ([] if told is None else [told])


def test_a_file_of_the_host(files: Files, tmp_path: Path) -> None:
    module = tmp_path / "mine.ko"
    shutil.copy(PREBUILT / "x86_64" / "modules" / "twins.ko", module)
    files.write(MODULES, f"load {module}")
    assert names(files) == ["twins"]
    module.write_bytes(module.read_bytes()[:1000])
    with assert_errno(errno.ENOEXEC):
        files.write(MODULES, f"load {module}")
    assert "truncated: section headers up to" in files.lines("machine/dmesg")[-1]


def test_one_in_use(files: Files) -> None:
    files.write(MODULES, "load counter_user")
    with assert_errno(errno.EWOULDBLOCK):
        files.write(MODULES, "unload counter")
    assert names(files) == ["counter_user", "counter"]


def test_kallsyms(files: Files) -> None:
    files.write(MODULES, "load counter")
    lines = files.lines("machine/kallsyms")
    added = [line for line in lines if line.endswith("\t[counter]")]
    exported = {line.split()[2]: line.split()[1] for line in added}
    assert exported["counter_add"] == "T"
    assert exported["count"] == "b"
    assert "init_module" not in exported
    first = lines.index(added[0])
    assert added == lines[first : first + len(added)]
    own = [line.split()[0] for line in lines[:first]]
    assert own == sorted(own)
    assert any(line.endswith(" _end") for line in lines[:first])
    files.write(MODULES, "unload counter")
    assert "[counter]" not in files.read("machine/kallsyms")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_ordinary_users_see_no_address(directory: Path) -> None:
    with daemon(directory, "--allow-other", program=REAL_PROGRAM):
        files = Files(directory)
        files.write(MODULES, "load counter")
        script = f"import os; os.setuid(65534); print(open({str(files.path(MODULES))!r}).read(), end='')"
        result = files.shell('exec python3 -c "$SCRIPT"', SCRIPT=script)
    assert result.stderr == ""
    assert result.stdout.split()[-1] == "0x0000000000000000"


def test_what_a_selftest_does(files: Files) -> None:
    """Events on a function of a module stay when the module is unloaded, and can then be enabled.

    They record again when the module is loaded again.
    """
    place = "trace_printk:trace_printk_irq_work"
    files.write(MODULES, "load trace-printk")
    files.write("kprobe_events", f"p {place}\np:kprobes/event1 {place}\n")
    assert files.path(f"{EVENTS}/p_trace_printk_trace_printk_irq_work_0").is_dir()
    files.write(MODULES, "unload trace-printk")
    assert files.lines("kprobe_events")[1] == f"p:kprobes/event1 {place}"
    assert files.read("kprobes/list").count(" [GONE][FTRACE]\n") == 2
    files.write("kprobe_events", f"p:event2 {place}\n")
    files.write(f"{EVENTS}/event1/enable", "1")
    assert files.read("kprobes/stats/kprobes/event1/mode") == "gone\n"
    assert files.read("kprobes/stats/kprobes/event1/bytes") == "gone with its module\n"
    assert files.read("kprobes/stats/kprobes/event1/detour") == "gone with its module\n"
    files.write(MODULES, "load trace-printk")
    (record,) = files.records()
    assert "kworker/0:0-" in record
    assert "event1: (trace_printk_irq_work+0x0/" in record
    assert record.endswith(" [trace_printk])")
    files.write(MODULES, "unload trace-printk")
    files.write(f"{EVENTS}/event1/enable", "0")
    files.write("kprobe_events", "-:event1")
    assert "event1" not in files.read("kprobe_events")


def test_a_function_of_init_is_hit_while_the_module_loads(files: Files) -> None:
    files.probe("p:early ktgt:ktgt_initfn x=%di:u32")
    assert files.read("kprobes/list") == ""
    files.write(MODULES, "load ktgt")
    assert [record.split(": ", 1)[1].split(") ")[1] for record in files.records()] == ["x=21"]
    assert files.read("kprobes/list").endswith(" [GONE][FTRACE]\n")
    with assert_errno(errno.ENOENT):
        files.write("kprobe_events", "p:late ktgt:ktgt_initfn")


def test_loading_while_files_are_watched(files: Files) -> None:
    """While probes are armed, writes to machine/modules call init_module and delete_module in the guest."""
    files.probe("p:load __x64_sys_init_module")
    files.probe("p:unload __x64_sys_delete_module")
    files.probe("p:text ktgt:ktgt_add")
    files.write(MODULES, "load ktgt")
    files.write("machine/call", "ktgt_add 1 2")
    files.write(MODULES, "unload ktgt")
    assert [record.split(": ")[1] for record in files.records()] == ["load", "text", "unload"]


def test_a_module_that_crashes_leaves_the_kernel_alive(files: Files) -> None:
    files.write(MODULES, "load ktgt")
    with assert_errno(errno.EFAULT):
        files.write("machine/call", "ktgt_str 0x10")
    assert any("ktgt_str+" in line and "[ktgt]" in line for line in files.lines("machine/dmesg"))
    files.write(MODULES, "unload ktgt")
    assert files.read(MODULES) == ""


def test_files_whose_readers_wait_are_no_modules(files: Files) -> None:
    """Files whose readers wait, such as trace_pipe, are refused as modules, although stat(2) shows regular
    files.
    """
    for name in ("trace_pipe", "per_cpu/cpu0/trace_pipe", "per_cpu/cpu0/trace_pipe_raw"):
        with assert_errno(errno.EINVAL):
            files.write(MODULES, f"load {files.path(f'tracing/{name}')}\n")
        assert files.lines("machine/dmesg")[-1].endswith(": nothing to read: its readers wait")


def test_a_write_that_is_refused_has_done_nothing(shared: Files) -> None:
    """If a line is malformed, or a module's file cannot be read, the write fails before its first line takes
    effect.
    """
    for name, text, number in (
        ("modules", "load counter\nload nosuch\n", errno.ENOENT),
        ("modules", "load counter\nreload\n", errno.EINVAL),
        ("modules", "load /proc\nload nosuch\nload /dev/zero\n", errno.EISDIR),
        ("clock", "seed 9\nfoo\n", errno.EINVAL),
        ("load", "fork rate=10 duration=1\nnosuch\n", errno.EINVAL),
    ):
        before = shared.lines(f"machine/{name}")[:2]
        with assert_errno(number):
            shared.write(f"machine/{name}", text)
        assert shared.lines(f"machine/{name}")[:2] == before


def test_a_file_system_that_does_not_answer(files: Files, tmp_path: Path) -> None:
    """If the file system of a module's file does not answer, the load is given up. Meanwhile, other writes to
    machine/modules take effect.
    """
    slow = tmp_path / "slow"
    slow.mkdir()
    with subprocess.Popen([sys.executable, "-m", "tests.mounted.slow_files", str(slow)]) as process:
        try:
            eventually(lambda: os.path.ismount(slow))
            path = files.path(MODULES)
            writers = [subprocess.Popen(["sh", "-c", f"echo load {slow}/slow.ko > {path}"]) for _ in range(2)]
            files.write(MODULES, "load counter")
            assert names(files) == ["counter"]
            for writer in writers:
                assert writer.wait(PATIENCE) != 0
            assert files.read("machine/dmesg").count("slow.ko: its file system doesn't answer in time") == 2
        finally:
            process.send_signal(signal.SIGUSR1)
            subprocess.run(["fusermount", "-uz", str(slow)], check=True)
            process.wait(PATIENCE)
