"""`kprobefs run --as-system`: a private mount namespace in which the mount stands at the system's own places.

Tools that know no other place than /sys/kernel/tracing, /sys/kernel/debug and /proc/kallsyms find it there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

from kprobefs.common import mountpoints
from kprobefs.common.errors import CliError, ExitStatus

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
TRACING = "/sys/kernel/tracing"
DEBUG = "/sys/kernel/debug"
SYMBOLS = {"/proc/kallsyms": "machine/kallsyms", "/proc/modules": "machine/modules"}
SYSCTL = "/proc/sys"
SWITCHES = ("kernel/stack_tracer_enabled", "debug/kprobes-optimization")
"""Those of ours in it."""
HOST = ".host"
"""Beside one, where the host's kernel has no such switch: what else the host has there."""


def enter_namespace() -> None:
    """Give this process a mount namespace of its own, without the system's tracefs and debugfs.

    An ordinary user becomes root of a user namespace. Raises: CliError.
    """
    uid = os.geteuid()
    gid = os.getegid()
    flags = CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)
    _call("unshare", "a mount namespace", flags)
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    for point in reversed(mountpoints.mount_points()):
        if point.fstype in ("tracefs", "debugfs") and os.path.ismount(point.directory):
            try:
                mountpoints.detach(point.directory)
            except CliError:
                # What an ordinary user's namespace got from the host is locked there; ours will cover it.
                if not uid:
                    raise


def lay_over(directory: str, work: Path) -> dict[str, str]:
    """Put the mount on `directory` to the system's places; files of ours go to `work`.

    Returns what is to be added to the environment of commands. Raises: CliError.
    """
    _make_places()
    _mount(f"{directory}/tracing", TRACING, MS_BIND)
    _mount(directory, DEBUG, MS_BIND)
    for place, ours in SYMBOLS.items():
        if os.path.exists(place) and os.path.exists(f"{directory}/{ours}"):
            _mount(f"{directory}/{ours}", place, MS_BIND)
    _lay_file("/proc/version", work / "version", f"{_first_line(f'{directory}/machine/version')}\n")
    if os.path.exists(f"{SYSCTL}/kernel/ftrace_enabled"):
        _lay_file(f"{SYSCTL}/kernel/ftrace_enabled", work / "ftrace_enabled", "1\n")
    for switch in SWITCHES:
        ours = f"{directory}/sysctl/{switch}"
        place = os.path.dirname(f"{SYSCTL}/{switch}")
        if os.path.exists(ours) and os.path.isdir(place):
            _lay_switch(ours, switch, work)
    return _pretend_type(work)


def _lay_switch(ours: str, switch: str, work: Path) -> None:
    """Put a switch to its place, which only kernels that were built with it have."""
    group, name = os.path.split(switch)
    place = f"{SYSCTL}/{group}"
    if not os.path.exists(f"{place}/{name}"):
        made = work / f"sysctl-{group}"
        host = made / HOST
        made.mkdir()
        _mount("tmpfs", str(made), 0, "tmpfs")
        host.mkdir()
        (made / name).touch()
        for other in os.listdir(place):
            (made / other).symlink_to(f"{HOST}/{other}")
        _mount(place, str(host), MS_BIND | MS_REC)
        # Nothing of the host's stays below `work`, which is going to be removed.
        _mount(str(made), place, MS_MOVE)
    _mount(ours, f"{place}/{name}", MS_BIND)


def _make_places() -> None:
    """Where this kernel has none of the two directories, /sys/kernel gets them instead of what it holds."""
    if os.path.isdir(TRACING) and os.path.isdir(DEBUG):
        return
    _mount("tmpfs", "/sys/kernel", 0, "tmpfs")
    os.makedirs(TRACING)
    os.makedirs(DEBUG)


def _pretend_type(work: Path) -> dict[str, str]:
    """Let libtracefs take ours for a tracefs; without a C compiler its programs don't find it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return {}
    source = resources.files("kprobefs") / "mounts_shim.c"
    library = work / "mounts_shim.so"
    with resources.as_file(source) as file:
        built = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(file), "-ldl"],
            capture_output=True,
            check=False,
        )
    if built.returncode != 0:
        return {}
    mounts = work / "mounts"
    mounts.write_text(_mounts_text(), "utf-8", "surrogateescape")
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {"LD_PRELOAD": ":".join(preloaded), "KPROBEFS_MOUNTS": str(mounts)}


def _mounts_text() -> str:
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as lines:
        others = [line for line in lines if mountpoints.FSTYPE not in line.split()]
    return f"tracefs {TRACING} tracefs rw 0 0\ndebugfs {DEBUG} debugfs rw 0 0\n{''.join(others)}"


def _lay_file(place: str, file: Path, text: str) -> None:
    file.write_text(text, "utf-8")
    _mount(str(file), place, MS_BIND)


def _first_line(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().rstrip("\n")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _mount(source: str, place: str, flags: int, fstype: str = "none") -> None:
    encoded = (os.fsencode(source), os.fsencode(place), os.fsencode(fstype))
    _call("mount", f"{source} on {place}", *encoded, ctypes.c_ulong(flags), None)


def _call(name: str, what: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise CliError(f"--as-system: {name}: {what}: {reason}; root may do it", ExitStatus.RUN_FAILED)
