"""Mounts of dumps that QEMU makes of Debian's kernel: KASLR, several CPUs, isolation, much memory.

`python -m tests.guests.linux.qemu_dumps DEB...` needs qemu-system-x86_64; each kind takes half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from emulated_kernel.guests.linux.initramfs import X86_STUB, CpioFile, _cpio, init_program
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore.vmcore_guest import started_core
from emulated_kernel.guests.linux.vmcore.vmcore_mount import vmcore_mount
from emulated_kernel.image.linux.packages import read_kernel
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux.files import Files

NOTE = "kept in the dump\n"
PAUSE = bytes.fromhex("b8220000000f05ebf7")
"""Machine code of an endless loop of pause(2) calls."""
PATIENCE = 600.0
"""Seconds in which the kernel must start init. A busy host needs minutes."""


class Kind(NamedTuple):
    """A configuration of QEMU's machine."""

    name: str
    cpu: str
    cpus: int
    line: str
    megabytes: int


KINDS = (
    Kind("one CPU, no KASLR", "qemu64", 1, "nokaslr", 256),
    Kind("two CPUs, KASLR, SMAP", "Broadwell,-hle,-rtm", 2, "", 512),
    Kind("page table isolation", "Haswell,-hle,-rtm", 1, "pti=on", 256),
    Kind("memory above 4 GiB", "qemu64", 1, "", 4500),
)


def initramfs() -> bytes:
    """Return an initramfs with an init that waits for ever, and a file."""
    program = init_program(X86_STUB)[: -len(X86_STUB.code)] + PAUSE.ljust(len(X86_STUB.code), b"\x90")
    files = [CpioFile("dir", 0o40755), CpioFile("dir/note", 0o100640, NOTE.encode())]
    return _cpio([*files, CpioFile("init", 0o100755, program)])


def vmlinuz(package: Path, target: Path) -> Path:
    """Extract the kernel of a Debian package to `target`, and return that path."""
    with package.open("rb") as file:
        target.write_bytes(read_kernel(file))
    return target


def dump(kind: Kind, kernel: Path, directory: Path) -> Path:
    """Boot the kernel in QEMU, and dump its memory when init runs; return the dump's path."""
    core, console, monitor = (directory / name for name in ("core", "console", "monitor"))
    (directory / "initrd").write_bytes(initramfs())
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=single", "-cpu", kind.cpu, "-smp", str(kind.cpus)]
    command += ["-m", str(kind.megabytes), "-nodefaults", "-display", "none", "-no-reboot"]
    command += ["-kernel", str(kernel), "-initrd", str(directory / "initrd")]
    command += ["-append", f"console=ttyS0 panic=-1 {kind.line}", "-serial", f"file:{console}"]
    command += ["-monitor", f"unix:{monitor},server,nowait"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        _until(lambda: console.exists() and b"Run /init" in console.read_bytes())
        time.sleep(2)
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(monitor))
            link.sendall(b"stop\n" + f"dump-guest-memory {core}\n".encode())
            size = -1
            while size < 1 << 20 or size != core.stat().st_size:
                size = core.stat().st_size if core.exists() else -1
                time.sleep(1)
            link.sendall(b"quit\n")
            process.wait(PATIENCE)
    return core


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "the kernel doesn't come to its init"
        time.sleep(0.3)


def check(core: Path) -> str:
    """Check the operations on a dump; return a line with the kernel's release and address, and the size."""
    guest, kernel = started_core(str(core))
    mount = vmcore_mount(guest, KernelEngine(guest, kernel), Owner(0, 0), is_tracefs=False)
    shell = Files(mount, Client(1, 0, 0))
    shell.write("/kprobe_events", "p:read vfs_read count=$arg3\nr:root int_sqrt $retval\n")
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.write("/machine/call", "int_sqrt 144\n")
    assert shell.read("/machine/call") == "int_sqrt = 0xc (12)\n"
    assert shell.read("/files/dir/note") == NOTE
    trace = shell.read("/tracing/trace")
    assert " root: " in trace
    assert " read: " in trace
    assert "Run /init" in shell.read("/machine/dmesg")
    for line in ("msleep 10", "strlen 16"):
        try:
            shell.write("/machine/call", f"{line}\n")
        except KernelError:
            continue
        raise AssertionError(f"{line} came to its end")
    shell.write("/machine/call", "int_sqrt 81\n")
    assert shell.read("/machine/call") == "int_sqrt = 0x9 (9)\n"
    said = f"{kernel.release}, text at {kernel.text.start:#x}, {core.stat().st_size >> 20} MiB"
    mount.close()
    return said


def main() -> None:
    """Make and check dumps of each kernel: of all kinds, or of the kinds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", type=Path, nargs="+", help="linux-image-*.deb, or linux-binary-*.deb")
    parser.add_argument("--kind", type=int, action="append", help="number of a kind, from 0")
    options = parser.parse_args()
    kinds = KINDS if options.kind is None else [KINDS[number] for number in options.kind]
    for package, kind in itertools.product(options.packages, kinds):
        with tempfile.TemporaryDirectory(prefix="kprobefs-dump-") as made:
            os.environ["XDG_CACHE_HOME"] = made
            kernel = vmlinuz(package, Path(made) / "vmlinuz")
            print(f"{kind.name}: {check(dump(kind, kernel, Path(made)))}", flush=True)


if __name__ == "__main__":
    main()
