"""System calls of processes on a real mount, as events of the guest record them."""

from __future__ import annotations

import mmap
import os
import re
import stat
import subprocess
import sys
from itertools import dropwhile

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import TIMEOUT, Files

pytestmark = [needs_fuse, pytest.mark.mounted]

LINE = re.compile(r".*-(\d+) +\[.*: sys_(\w+)(?:\((.*)\)| -> (\S+))$")
UNTOLD = ("exit_group", "chdir")
"""Calls that are left out. chdir(2) is recorded only on a mount that root made for root alone."""
ADDRESS = re.compile(r"\w+: \w{9,}(, )?")


@pytest.fixture
def traced(files: Files) -> Files:
    try:
        with open("/proc/self/syscall", encoding="ascii") as file:
            file.read()
    except OSError:
        pytest.skip("/proc doesn't say in which system call a process waits")
    files.write("tracing/events/syscalls/enable", "1")
    return files


def calls_of(files: Files, script: str) -> list[str]:
    """Run a Python program, and return its calls in the guest's trace as "name(arguments) -> result", without
    addresses.
    """
    files.write("tracing/trace", "", os.O_TRUNC)
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"import os\nr = {str(files.root)!r}\n{script}"], cwd=files.root
    )
    assert program.wait(TIMEOUT) == 0
    found = []
    for line in files.records():
        match = LINE.match(line)
        if match is None or int(match[1]) != program.pid or match[2] in UNTOLD:
            continue
        if match[4]:
            result = int(match[4], 16)
            found[-1] += f" -> {result - (1 << 64) if result >> 63 else result}"
        else:
            arguments = ADDRESS.sub("", match[3]).removesuffix(", ")
            found.append(f"{match[2]}({arguments})")
    # At its exec, the program closes files that other tests had open.
    return list(dropwhile(lambda call: call.startswith("close("), found))


def test_a_file_from_open_to_close(traced: Files) -> None:
    """The calls on a file from open to close are recorded with the process's descriptors, flags, modes and
    positions.
    """
    found = calls_of(
        traced,
        """
os.umask(0o027)
f = os.open(r + "/scratch/f", os.O_RDWR | os.O_CREAT, 0o666)
os.write(f, b"0123456789")
os.lseek(f, 4, os.SEEK_SET)
assert os.read(f, 3) == b"456"
g = os.dup(f)
os.write(g, b"x")
os.fchmod(f, 0o600)
os.ftruncate(f, 2)
os.fsync(f)
""",
    )
    number = re.search(r"-> (\d+)$", found[0])
    assert number is not None
    fd, other = int(number[1]), int(number[1]) + 1
    assert found[:8] == [
        f"openat(dfd: ffffff9c, flags: 80042, mode: 1b6) -> {fd}",
        f"write(fd: {fd}, count: a) -> 10",
        f"lseek(fd: {fd}, offset: 4, whence: 0) -> 4",
        f"read(fd: {fd}, count: 3) -> 3",
        f"write(fd: {other}, count: 1) -> 1",
        f"fchmod(fd: {fd}, mode: 180) -> 0",
        f"ftruncate(fd: {fd}, length: 2) -> 0",
        f"fsync(fd: {fd}) -> 0",
    ]


def test_a_marker_is_written_by_the_function_that_its_record_names(files: Files) -> None:
    files.write("tracing/kprobe_events", "p:text tracing_mark_write\np:binary tracing_mark_raw_write\n")
    files.write("tracing/events/kprobes/enable", "1")
    script = "echo now > tracing/trace_marker; printf abcde > tracing/trace_marker_raw"
    assert subprocess.run(["sh", "-c", script], cwd=files.root, timeout=TIMEOUT, check=False).returncode == 0
    seen = [line.split(": ", 1)[1] for line in files.records()]
    assert [each.split(":")[0].split()[0] for each in seen] == ["text", "tracing_mark_write", "binary", "#"]


def test_a_list_of_functions_comes_through_a_pipe(files: Files) -> None:
    """A list of functions that awk writes in blocks, which may end inside of names, is taken completely.

    All functions are there when the next command reads the file.
    """
    script = "awk '{print $1}' tracing/available_filter_functions > tracing/%s; wc -l < tracing/%s"
    expected = files.read("tracing/available_filter_functions").count("\n")
    for name in ("set_ftrace_filter", "set_ftrace_notrace", "set_graph_function", "stack_trace_filter"):
        done = subprocess.run(
            ["sh", "-c", script % (name, name)],
            cwd=files.root,
            timeout=TIMEOUT,
            check=False,
            capture_output=True,
            text=True,
        )
        # "cat" and "wc" see the commands of set_ftrace_filter after its functions: there are none.
        assert (done.stdout.strip(), done.stderr) == (str(expected), "")


def test_a_word_goes_on_in_another_program(files: Files) -> None:
    """A program can complete a word that another program has begun to write through the same open file.

    The word does not end when the first program ends.
    """
    name = "tracing/set_ftrace_filter"
    script = f"{{ env printf vfs_re; env printf 'ad\\n'; }} > {name}; cat {name}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=files.root, timeout=TIMEOUT, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("vfs_read\n", "")
    for number in range(20):
        word = ("vfs_read", "vfs_open")[number % 2]
        done = subprocess.run(
            ["sh", "-c", f"printf {word} > {name}; cat {name}"],
            cwd=files.root,
            timeout=TIMEOUT,
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.stderr) == (f"{word}\n", "")


def test_the_umask_of_a_client(traced: Files) -> None:
    calls_of(
        traced,
        """
os.umask(0o027)
os.close(os.open(r + "/scratch/f", os.O_WRONLY | os.O_CREAT, 0o666))
os.mkdir(r + "/scratch/d")
""",
    )
    assert stat.filemode(traced.path("scratch/f").stat().st_mode) == "-rw-r-----"
    assert stat.filemode(traced.path("scratch/d").stat().st_mode) == "drwxr-x---"


def test_calls_that_the_lookup_ends(traced: Files) -> None:
    found = calls_of(
        traced,
        """
os.chdir(r + "/scratch")
def fails(call, *args, **more):
    try:
        call(*args, **more)
    except OSError:
        return
    raise SystemExit(1)
os.mkdir("d")
fails(os.open, "none", os.O_RDONLY)
fails(os.open, r + "/tracing/none", os.O_RDONLY)
fails(os.stat, "none/none")
fails(os.unlink, "none")
fails(os.mkdir, "d")
fails(os.rename, "none", "other")
fails(os.rmdir, "none")
os.access("d", os.R_OK)
os.lstat("d")
os.symlink("d", "l")
assert os.readlink("l") == "d"
os.mkfifo("p")
os.link("p", "q")
os.unlink("q")
""",
    )
    shown = [
        r"mkdir(at)?\((dfd: ffffff9c, )?mode: 1ff\) -> 0",
        r"openat\(dfd: ffffff9c, flags: 80000, mode: 1ff\) -> -2",
        r"openat\(dfd: ffffff9c, flags: 80000, mode: 1ff\) -> -2",
        r"new(fstatat\(dfd: ffffff9c, flag: 0|stat\()\) -> -2",
        r"unlink\(\) -> -2",
        r"mkdir(at)?\((dfd: ffffff9c, )?mode: 1ff\) -> -17",
        r"rename\(\) -> -2",
        r"rmdir\(\) -> -2",
        r"access\(mode: 4\) -> 0",
        r"new(fstatat\(dfd: ffffff9c, flag: 100|lstat\()\) -> 0",
        r"symlink\(\) -> 0",
        r"readlink\(bufsiz: \w+\) -> 1",
        r"mknod(at)?\((dfd: ffffff9c, )?mode: 11b6, dev: 0\) -> 0",
        r"link\(\) -> 0",
        r"unlink\(\) -> 0",
    ]
    assert len(found) == len(shown), found
    for line, pattern in zip(found, shown, strict=True):
        assert re.fullmatch(pattern.replace("mode: 1ff\\) -> -2", r"mode: \w+\) -> -2"), line), (
            line,
            pattern,
        )


def test_listing(traced: Files) -> None:
    """A directory is listed by several getdents64(2), of which the last returns 0."""
    for name in "abc":
        traced.path(f"scratch/{name}").touch()
    found = calls_of(traced, "assert len(os.listdir(r + '/scratch')) == 3")
    called = [line.split("(")[0] for line in found if not line.startswith("new")]
    assert called[:3] == ["openat", "getdents64", "getdents64"]
    assert [line.endswith("-> 0") for line in found if "getdents64" in line] == [False, True]


def test_instances(traced: Files) -> None:
    """mkdir(2) and rmdir(2) of an instance, also a refused mkdir(2), are calls of the client's task in the
    guest.
    """
    for function in ("do_mkdirat", "vfs_mkdir", "do_rmdir"):
        traced.probe(f"p:{function} {function}")
    traced.write("tracing/trace", "", os.O_TRUNC)
    script = "mkdir tracing/instances/i; mkdir tracing/instances/i; rmdir tracing/instances/i"
    assert traced.shell(script).returncode == 0
    hits = [re.search(r"(mkdir|rmdir)-\d+ .*: (\w+): \(", line) for line in traced.records()]
    assert [(hit[1], hit[2]) for hit in hits if hit] == [
        ("mkdir", "do_mkdirat"),
        ("mkdir", "vfs_mkdir"),
        ("mkdir", "do_mkdirat"),
        ("rmdir", "do_rmdir"),
    ]


def test_function_triggers_of_instances(traced: Files) -> None:
    """Triggers on functions fire when a client makes or removes an instance, because the guest executes these
    functions for the client.
    """
    for trigger in ("vfs_mkdir:stacktrace:1", "do_rmdir:traceoff"):
        traced.write("tracing/set_ftrace_filter", trigger, os.O_APPEND)
    traced.write("tracing/trace", "", os.O_TRUNC)
    assert traced.shell("mkdir tracing/instances/i").returncode == 0
    assert (traced.root / "tracing/tracing_on").read_text() == "1\n"
    assert re.search(
        r"mkdir-\d+ .*: <stack trace>\n => vfs_mkdir\n => do_mkdirat\n", traced.read("tracing/trace")
    )
    assert traced.shell("rmdir tracing/instances/i").returncode == 0
    assert (traced.root / "tracing/tracing_on").read_text() == "0\n"
    assert "vfs_mkdir:stacktrace:count=0" in traced.read("tracing/set_ftrace_filter")


@pytest.mark.parametrize("shift", [0, 1, mmap.PAGESIZE - 1])
def test_128_kib_are_one_call_at_any_address(files: Files, shift: int) -> None:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (4, 20):
        pytest.skip("needs Linux 4.20: older kernels limit a FUSE request to 32 pages")
    files.probe("p:reads vfs_read count=$arg3")
    files.probe("p:writes vfs_write count=$arg3")
    size = 128 << 10
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    with memory, memoryview(memory)[shift : shift + size] as block:
        descriptor = os.open(files.path("scratch/block"), os.O_RDWR | os.O_CREAT)
        try:
            files.write("tracing/trace", "", os.O_TRUNC)
            assert os.pwritev(descriptor, [block], 0) == size
            assert os.preadv(descriptor, [block], 0) == size
        finally:
            os.close(descriptor)
    found = [re.findall(r"(reads|writes): .*count=(\w+)", line) for line in files.records()]
    assert [(name, int(count, 16)) for [(name, count)] in found[:2]] == [("writes", size), ("reads", size)]
