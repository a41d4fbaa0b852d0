"""Kernels that cannot run, at the command line: an error of one line, status 2, and nothing is left
behind.
"""

from __future__ import annotations

import ast
import ctypes
import logging
import mmap
import os
import resource
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from emulated_kernel.guests.linux import boot_cache
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.exception_cells import find_exception_cells
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from kprobefs.cli.main import main
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES
from stress.linux.images_mutated import Mutated, small_cases, snapshots
from tests.fuse.test_other_users import PR_SET_DUMPABLE, as_nobody
from tests.image.linux import made
from tests.sample import WHOLE, fewer

RETURN = b"\xc3"
_ENTRY = 24
LOOP, HALT, UNKNOWN, WILD = b"\xeb\xfe", b"\xfa\xf4\xeb\xfd", b"\x0f\x0b", b"\x48\xa1" + b"\xff" * 7 + b"\x7f"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kernel(code: bytes = RETURN) -> bytes:
    """Return a vmlinux whose first function has this code, and whose entry is a physical address."""
    built = made.Kernel()
    built.function("do_sync_core", code)
    for number in range(300):
        built.function(f"func_{number}", RETURN)
    found = built.elf()
    return found[:_ENTRY] + struct.pack("<Q", made.TEXT & 0x3FFFFFFF) + found[_ENTRY + 8 :]


VMLINUX = kernel()
VMLINUZ = made.vmlinuz(VMLINUX)
PACKAGE = made.deb({"./boot/vmlinuz-6.1.0-made": VMLINUZ})
SECRET = bytes(byte ^ 0x5A for byte in VMLINUZ)
"""An encrypted vmlinuz, of which no part can be recognized."""
BAD = {
    "an empty file": b"",
    "a truncated vmlinuz": VMLINUZ[: len(VMLINUZ) // 2],
    "a truncated vmlinux": VMLINUX[: len(VMLINUX) // 2],
    "a truncated package": PACKAGE[: len(PACKAGE) // 2],
    "an encrypted vmlinuz": SECRET,
    "a vmlinuz with an encrypted payload": made.around(SECRET),
    "an encrypted payload in a package": made.deb({"./boot/vmlinuz-6.1.0-made": SECRET}),
    "an incomplete Image": b"MZ" + bytes(0x36) + b"ARMd" + bytes(600),
    "a program": made.elf([(made.TEXT, RETURN)], kind=3),
    "a kernel without symbols": made.elf([(made.TEXT, RETURN)]),
    "a kernel without types": VMLINUX,
}


def refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], image: bytes, kprobes: str, *options: str
) -> str:
    """Return the error of `mount`.

    Assert that nothing is left in the mount point, the cache and the mount table.
    """
    file, directory = tmp_path / "image", tmp_path / "mnt"
    file.write_bytes(image)
    directory.mkdir(exist_ok=True)
    status = main(["mount", "--kprobes", kprobes, "--image", str(file), *options, str(directory)])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert str(directory) not in Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "mnt"]
    assert not list(directory.iterdir())
    return err


@pytest.mark.parametrize("kprobes", KPROBES)
@pytest.mark.parametrize("image", BAD)
def test_what_is_no_kernel(
    image: str, kprobes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, capsys, BAD[image], kprobes)
    assert said.startswith(f"kprobefs: {tmp_path}/image: ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--modules", "/"), "--modules: no distribution's kernel given; add --image"),
        (("--image", "here", "--modules", "/not/there"), "--modules: /not/there: No such file"),
    ],
)
def test_modules_of_no_kernel(
    options: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mount", *options, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check that a test's kernel is complete, and limit the duration of a boot."""
    facts = KernelOffsets("6.1.0-made", "x86_64", {"do_sync_core": made.TEXT}, {}, {}, 0)
    monkeypatch.setattr(boot_cache, "kernel_offsets", lambda _kernel: facts)
    monkeypatch.setattr(boot_cache, "_BOOT_BUDGET", 0.2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (LOOP, "it ran for too long"),
        (HALT, "it halted for good"),
        (UNKNOWN, "no gate for vector 6"),
        (WILD, "no gate for vector"),
    ],
)
def test_hostile_kernels_end_with_their_boot(
    code: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, capsys, kernel(code), KERNEL_KPROBES)
    assert "doesn't boot" in said
    assert why in said


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_ends_on_one_cpu_names_the_cpu_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, capsys, kernel(HALT), KERNEL_KPROBES, "--cpu", "milan")
    assert "doesn't boot on AMD EPYC 7003 (Milan): it halted for good" in said
    assert said.endswith("; choose another --cpu, or omit it\n")


def test_damaged_files_by_the_dozen(tmp_path: Path) -> None:
    """Mutated images and snapshots of kernels are handled or refused without a failure.

    This is a short form of stress.linux.images_mutated.
    """
    # The cache is elsewhere in tmp_path.
    directory = tmp_path / "files"
    directory.mkdir()
    mutated = Mutated(seed=3, directory=directory, planned_every=1 if WHOLE else 100)
    small_cases(mutated, fewer(100, 3))
    snapshots(mutated, fewer(500, 40))
    assert mutated.failures == []
    assert mutated.outcomes["explain: 0"]
    assert min(mutated.outcomes["refused"], mutated.outcomes["no snapshot"]) > 20


@pytest.fixture
def no_room() -> Iterator[None]:
    """Keep files from growing beyond 1 MiB, as on a full disk."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, kept[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    signal.signal(signal.SIGXFSZ, handler)


def small_machine(*_arguments: object) -> tuple[PcMachine, KernelOffsets, None]:
    """Return a machine without a kernel, with 4 MiB of RAM, in place of a booted kernel."""
    machine = PcMachine(mmap.mmap(-1, 4 << 20), 1, find_exception_cells(), 1.0)
    return machine, KernelOffsets("", "x86_64", {}, {}, {}, 0), None


def boot_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the boot of a kernel by a machine without a kernel, which is then saved."""
    monkeypatch.setattr(boot_cache, "_booted", small_machine)
    monkeypatch.setattr(boot_cache, "LinuxTasks", lambda machine, _facts: SimpleNamespace(machine=machine))
    monkeypatch.setattr(boot_cache, "as_running", lambda kernel, _tasks: kernel)
    monkeypatch.setattr(boot_cache, "cached_parts", lambda _kernel: {})


@pytest.mark.parametrize("place", ["full", "read-only", "a file"])
def test_a_cache_that_takes_nothing(
    place: str,
    tmp_path: Path,
    cache: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the booted kernel cannot be cached, the kernel is used all the same, with one warning and no partial
    file.
    """
    if place == "full":
        request.getfixturevalue("no_room")
    elif place == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/sys")
    else:
        cache.write_text("no directory")
    (tmp_path / "image").write_bytes(VMLINUX)
    boot_quickly(monkeypatch)
    with caplog.at_level(logging.WARNING, "kprobefs.linux"):
        boot_cache.ensure_cached(str(tmp_path / "image"), 1, lambda _done, _total: None)
    (record,) = caplog.records
    assert "can't keep the booted kernel there" in record.getMessage()
    caplog.clear()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == (["cache", "image"] if place == "a file" else ["image"])


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_cache_of_another_user(
    mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the cache belongs to another user, the kernel is booted with one warning, although the other user
    has booted it before.

    A snapshot of another user is not loaded: its CPU state could do anything in the process.
    """
    boot_quickly(monkeypatch)
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        image = Path(base, "image")
        image.write_bytes(VMLINUX)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{base}/cache")

        def boots() -> list[str]:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "kprobefs.linux"):
                boot_cache.ensure_cached(str(image), 1, lambda _done, _total: None)
            return caplog.messages

        def as_other() -> list[str]:
            # Otherwise, a process that has changed its user cannot read /proc/self/mem.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
            return boots()

        assert boots() == []
        snapshot.directory().chmod(mode)
        [kept] = snapshot.directory().iterdir()
        kept.chmod(0o644)
        [warning] = ast.literal_eval(as_nobody(as_other).decode())
        assert warning.startswith(f"{snapshot.directory()}: can't keep the booted kernel there: Permission")
        assert kept.exists()
