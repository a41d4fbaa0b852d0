"""`kprobefs run --as-system`: shows the mount at the system's own paths, in a private mount namespace.

Tools that only use /sys/kernel/tracing, /sys/kernel/debug and /proc/kallsyms then find the mount.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from importlib import resources
from pathlib import Path

from kprobefs.cli.as_system_calls import DEBUGFS_MAGIC, TRACEFS_MAGIC, CallAnswerer
from kprobefs.cli.as_system_namespace import CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE, MS_REC, CommandNamespace
from kprobefs.common import mountpoints
from kprobefs.common.errors import CliError, ExitStatus

MS_RDONLY = 1
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REMOUNT = 0x20
LOCKED_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
"""Flags of a mount that a user namespace may not clear; a remount must keep those that are set.

They are flags of statvfs(3). The corresponding flags of mount(2) have the same values.
"""
OPEN_TREE = 428
MOVE_MOUNT = 429
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
AT_FDCWD = -100
TRACING = "/sys/kernel/tracing"
DEBUG = "/sys/kernel/debug"
PLACES = {"tracefs": TRACING, "debugfs": DEBUG}
"""Type of a file system -> path at which programs expect it."""
MOUNTS = "/proc/mounts"
"""Path of the table of mounts, a symbolic link to self/mounts."""
PRISTINE_PROC = ".proc"
"""Name of a directory, hidden below /sys/kernel/debug, with a /proc that no mount covers.

_keep_pristine_proc() says what it is for.
"""
FILES = {
    "/proc/kallsyms": "machine/kallsyms",
    "/proc/modules": "machine/modules",
    "/proc/meminfo": "machine/meminfo",
}
KERNEL_SETTINGS = (
    *("sysfs", "configfs", "securityfs", "efivarfs", "pstore", "bpf", "binfmt_misc", "selinuxfs", "smackfs"),
    *("fusectl", "resctrl", "nfsd"),
)
"""Types of file systems that the command can only read, because their files control the host's kernel."""
WRITE_BITS = 0o222
SYSCTL = "/proc/sys"
SWITCHES = ("kernel/stack_tracer_enabled", "kernel/ftrace_enabled", "debug/kprobes-optimization")
"""Paths, relative to /proc/sys, of the switches over which files of kprobefs's mount are mounted."""
HOST_SWITCHES = (
    *SWITCHES,
    "kernel/ftrace_dump_on_oops",
    "kernel/traceoff_on_warning",
    "kernel/tracepoint_printk",
    "kernel/kptr_restrict",
)
"""Paths, relative to /proc/sys, of switches of the host that tracing programs set.

Among them is kptr_restrict, which trace-cmd sets. If the mount lacks one of them, a copy of the host's file
is mounted over that file, so that writes do not reach the host.
"""
HOST = ".host"
"""Name of a subdirectory with the host's files, in each directory of /proc/sys that is replaced.

A directory is replaced if it must contain a switch that the host's kernel lacks.
"""


class System:
    """Shows a mount at the system's own paths to one command."""

    def __init__(self, directory: str, work: Path, *, real_root: bool) -> None:
        """Show the mount on `directory` also at the system's paths. Create additional files in `work`.

        `real_root`: the command keeps the rights of this process, with which it can reach the host's tracefs.
        If False, it gets a user namespace of its own, in which it cannot.
        Raises: CliError (the kernel refuses a mount or a namespace).
        """
        self.environment: dict[str, str] = {}
        """Name -> value of the variables that are added to the command's environment."""
        _lay_over(directory, work, real_root=real_root)
        if real_root:
            _print_error("--real-root: the host's tracefs and debugfs are within reach of the command")
        answerer = CallAnswerer(
            os.stat(directory).st_dev,
            (TRACING, f"{DEBUG}/tracing", f"{directory}/tracing"),
            (DEBUG, directory),
        )
        self._namespace = CommandNamespace(answerer, own_user=not real_root)
        if reason := self._namespace.unanswered:
            self.environment = _pretend_type(work)
            who = "programs that take a preloaded library" if self.environment else "no program"
            _print_error(
                f"statfs(2) and copying calls: no seccomp listener: {reason}; {who} will see a tracefs"
            )

    def enter(self) -> None:
        """Enter the namespaces, in the command's process, between fork and exec. Raises: OSError."""
        self._namespace.enter()

    def close(self) -> None:
        """Disconnect from the helper process, which ends after the command's last process."""
        self._namespace.close()


def enter_namespace(*, real_root: bool = False) -> None:
    """Give this process a mount namespace of its own.

    If the user is not root, also create a user namespace, in which this process is root.

    `real_root`: let the command keep root's rights, which only root may ask for. If False, check that no open
    file, and not the working directory, gives access to the host's files.
    Raises: CliError (`real_root` is True and the user is not root, the kernel refuses a namespace or mount,
    or an open file or directory would give access to the host's files).
    """
    uid = os.geteuid()
    gid = os.getegid()
    if not real_root:
        _check_open_files()
    elif uid:
        raise CliError("--real-root: you are not root; leave it out, or run as root", ExitStatus.USAGE)
    flags = CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)
    _call("unshare", "a mount namespace", flags)
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    if not real_root:
        _enter_own_directory()


def _enter_own_directory() -> None:
    """Open the working directory again, by its path in the namespace of the command.

    Hazard: a directory of another mount namespace, such as /proc/PID/root, would keep the host's files in
    reach.
    Raises: CliError (the directory has no path in this namespace).
    """
    before = os.stat(".")
    try:
        os.chdir(os.getcwd())
    except OSError:
        pass
    else:
        after = os.stat(".")
        if (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino):
            return
    raise CliError(
        "--as-system: the working directory has no path in this mount namespace; use another one",
        ExitStatus.RUN_FAILED,
    )


def _check_open_files() -> None:
    """Check that the working directory and the standard streams give no access to the host's files.

    Raises: CliError (a stream is a directory, or one of them is in a tracefs or debugfs).
    """
    for number, name in (
        (None, "the working directory"),
        (0, "standard input"),
        (1, "standard output"),
        (2, "standard error"),
    ):
        if number is not None and _is_directory(number):
            raise CliError(f"--as-system: {name}: is a directory; use a file", ExitStatus.RUN_FAILED)
        magic = _type_of("." if number is None else number)
        if magic in (TRACEFS_MAGIC, DEBUGFS_MAGIC):
            kind = "tracefs" if magic == TRACEFS_MAGIC else "debugfs"
            raise CliError(
                f"--as-system: {name}: is in the host's {kind}; use another one, or give --real-root as root",
                ExitStatus.RUN_FAILED,
            )


def _is_directory(number: int) -> bool:
    """Return True if descriptor `number` is a directory, through which a command could reach other files.

    Return False if the descriptor is closed.
    """
    try:
        return stat.S_ISDIR(os.fstat(number).st_mode)
    except OSError:
        return False


def _type_of(file: str | int) -> int:
    """Return the f_type of a file's file system, or 0 if it can't be read.

    `file`: a path or an open descriptor.
    """
    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None)
    failed = libc.fstatfs(file, buffer) if isinstance(file, int) else libc.statfs(os.fsencode(file), buffer)
    return 0 if failed else buffer[0]


def _lay_over(directory: str, work: Path, *, real_root: bool) -> None:
    _make_places()
    trees = {fstype: _tree_of_host(fstype, work) for fstype in PLACES}
    _detach_those_of_host()
    if not real_root:
        _keep_kernel_settings()
    _keep_pristine_proc(real_root=real_root)
    for fstype, tree in trees.items():
        if tree is not None:
            _attach(tree, PLACES[fstype])
            os.close(tree)
    _mount(f"{directory}/tracing", TRACING, MS_BIND)
    _mount(directory, DEBUG, MS_BIND)
    for place, ours in FILES.items():
        if os.path.exists(place) and os.path.exists(f"{directory}/{ours}"):
            _mount(f"{directory}/{ours}", place, MS_BIND)
    _lay_file("/proc/version", work / "version", f"{_first_line(f'{directory}/machine/version')}\n")
    for switch in HOST_SWITCHES:
        place = f"{SYSCTL}/{switch}"
        if os.path.exists(place) and not os.path.exists(f"{directory}/sysctl/{switch}"):
            _lay_file(place, work / switch.replace("/", "-"), Path(place).read_text("utf-8"))
    for switch in SWITCHES:
        ours = f"{directory}/sysctl/{switch}"
        place = os.path.dirname(f"{SYSCTL}/{switch}")
        if os.path.exists(ours) and os.path.isdir(place):
            _lay_switch(ours, switch, work)
    _complete_mounts(work)


def _tree_of_host(fstype: str, work: Path) -> int | None:
    """Return a detached mount of a directory of the host's tracefs or debugfs; None if it can't be mounted.

    The directory is an empty one in the root of the file system, or the root if it has no empty directory.
    The caller attaches this mount and covers it with kprobefs's own. Tables of mounts then have a line of
    type `fstype`, which is that of the covered mount. A user namespace locks both mounts.
    `fstype`: tracefs or debugfs. `work`: directory for a temporary mount.
    """
    mounted = {each.directory: each.fstype for each in mountpoints.mount_points()}
    if found := [directory for directory, topmost in mounted.items() if topmost == fstype]:
        try:
            return _open_tree(_empty_directory(found[0]))
        except (CliError, OSError):
            # In a user namespace the mount is locked at its place. Tables of mounts already have its line.
            return None
    # Hazard: if the host has mounted the file system, another mount of it would change its options.
    place = work / fstype
    place.mkdir()
    try:
        _mount(fstype, str(place), 0, fstype)
    except CliError:
        return None
    tree = _open_tree(_empty_directory(str(place)))
    mountpoints.detach(str(place))
    return tree


def _empty_directory(directory: str) -> str:
    """Return the path of an empty directory in `directory`, or `directory` itself if it has none."""
    for name in sorted(os.listdir(directory)):
        path = f"{directory}/{name}"
        # Hazard: a lookup in debugfs's directory `tracing` would mount a tracefs there.
        if (
            name not in ("tracing", "events")
            and stat.S_ISDIR(os.lstat(path).st_mode)
            and not os.listdir(path)
        ):
            return path
    return directory


def _open_tree(directory: str) -> int:
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC
    return _system_call(OPEN_TREE, directory, AT_FDCWD, os.fsencode(directory), flags)


def _attach(tree: int, place: str | int) -> None:
    """Attach the detached mount `tree` at `place`, a path or the descriptor of an open file.

    The open file may be a symbolic link that was opened with O_PATH: the mount then covers the link itself.
    """
    empty = MOVE_MOUNT_F_EMPTY_PATH
    if isinstance(place, int):
        _system_call(
            MOVE_MOUNT, f"descriptor {place}", tree, b"", place, b"", empty | MOVE_MOUNT_T_EMPTY_PATH
        )
    else:
        _system_call(MOVE_MOUNT, place, tree, b"", AT_FDCWD, os.fsencode(place), empty)


def _detach_those_of_host() -> None:
    """Unmount each tracefs and debugfs of the host.

    If a mount is locked, mount an empty tmpfs over it, except at PLACES, where kprobefs's mount covers it.
    """
    for point in reversed(mountpoints.mount_points()):
        if point.fstype not in PLACES or not os.path.ismount(point.directory):
            continue
        topmost = mountpoints.mounted_on(point.directory)
        if topmost is None or topmost.fstype not in PLACES:
            # Another file system covers the host's. Hazard: detach() would remove that file system, and
            # uncover the host's.
            continue
        try:
            mountpoints.detach(point.directory)
        except CliError:
            # In a user namespace, the mounts that it inherited from the host are locked.
            if point.directory not in PLACES.values():
                _mount("tmpfs", point.directory, MS_RDONLY, "tmpfs")


def _keep_kernel_settings() -> None:
    """Make all mounts of /proc, sysfs and other KERNEL_SETTINGS read-only, to protect the host's kernel.

    Directories of processes in /proc stay writable. Root in a user namespace may have the ids that own the
    files of these mounts, and could otherwise write to the files.
    """
    for point in filter(_is_in_reach, mountpoints.mount_points()):
        if point.fstype == "proc":
            _keep_own_part(point.directory)
    for point in filter(_is_in_reach, mountpoints.mount_points()):
        if point.fstype in KERNEL_SETTINGS:
            _make_read_only(point.directory)


def _is_in_reach(point: mountpoints.MountPoint) -> bool:
    """Return True if a mount has files that change the host's kernel, and no other mount covers it."""
    if point.fstype not in ("proc", *KERNEL_SETTINGS):
        return False
    try:
        device = os.stat(point.directory).st_dev
    except OSError:
        return False
    return point.device == f"{os.major(device)}:{os.minor(device)}"


def _keep_own_part(proc: str) -> None:
    """Make a mounted /proc read-only, except the directories of its processes.

    If `proc` is a mount of only a part of a /proc, make the whole part read-only.
    """
    if not os.path.islink(f"{proc}/self"):
        _make_read_only(proc)
        return
    for name in os.listdir(proc):
        path = f"{proc}/{name}"
        mode = os.lstat(path).st_mode if not name.isdecimal() else 0
        if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and mode & WRITE_BITS):
            _mount(path, path, MS_BIND | MS_REC)
            _make_read_only(path)


def _make_read_only(place: str) -> None:
    """Make a mount read-only, and keep its other flags."""
    kept = os.statvfs(place).f_flag & LOCKED_FLAGS
    _mount("none", place, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def _keep_pristine_proc(*, real_root: bool) -> None:
    """Keep a mount of /proc that no other mount covers, at a path that programs do not see.

    Without such a mount, the kernel refuses `unshare --mount-proc` in a user namespace.
    `real_root`: the command keeps this process's rights, and enters no user namespace. If False, the mount is
    read-only, so user namespaces can mount only a read-only /proc.
    """
    _mount("tmpfs", DEBUG, 0, "tmpfs")
    place = f"{DEBUG}/{PRISTINE_PROC}"
    os.mkdir(place)
    try:
        _mount("/proc", place, MS_BIND)
    except CliError:
        # In an ordinary user's namespace, /proc has locked mounts below it, which must be bound with it.
        _mount("/proc", place, MS_BIND | MS_REC)
    if not real_root:
        _make_read_only(place)
    _mount("tmpfs", DEBUG, 0, "tmpfs")


def _complete_mounts(work: Path) -> None:
    """If /proc/mounts lists no tracefs or no debugfs at its place in PLACES, make it show a complete list.

    The list is a file in `work`, which is mounted over the symbolic link /proc/mounts.
    """
    shown = {(each.fstype, each.directory) for each in mountpoints.mount_points()}
    if PLACES.items() <= {(fstype, place) for fstype, place in shown}:
        return
    file = work / "mounts"
    file.write_text(_mounts_text(), "utf-8", "surrogateescape")
    link = os.open(MOUNTS, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    tree = _open_tree(str(file))
    _attach(tree, link)
    os.close(tree)
    os.close(link)


def _lay_switch(ours: str, switch: str, work: Path) -> None:
    """Mount a switch's file over the switch's path below /proc/sys, even if the host's kernel lacks it.

    If it lacks the switch, first replace the directory by one that also has the switch; see HOST.

    `ours`: path of the file in kprobefs's mount. `switch`: path of the switch, relative to /proc/sys. `work`:
    directory for a temporary mount.
    """
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
        # Move the mount, so that no host file stays below `work`, which is going to be removed.
        _mount(str(made), place, MS_MOVE)
    _mount(ours, f"{place}/{name}", MS_BIND)


def _make_places() -> None:
    """Create the directories in PLACES if the host's kernel lacks one of them.

    They are in a tmpfs, which is mounted over /sys/kernel.
    """
    if os.path.isdir(TRACING) and os.path.isdir(DEBUG):
        return
    _mount("tmpfs", "/sys/kernel", 0, "tmpfs")
    os.makedirs(TRACING)
    os.makedirs(DEBUG)


def _pretend_type(work: Path) -> dict[str, str]:
    """Build a library that makes programs see the mount as a tracefs; for a host without seccomp listeners.

    The library shows the program another /proc/mounts, and lets calls that copy from text files fail as on
    Linux's tracefs. Return the environment variables that make programs load the library. Without a C
    compiler, or if it fails, the result is empty.
    """
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
    mounts = work / "preloaded-mounts"
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


def _system_call(number: int, what: str, *arguments: int | bytes) -> int:
    return _call("syscall", what, ctypes.c_long(number), *arguments)


def _call(name: str, what: str, *arguments: object) -> int:
    """Call the function `name` of the C library, and return its result.

    `what`: purpose or object of the call, for the error message.
    Raises: CliError (the result is negative).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        raise CliError(f"--as-system: {name}: {what}: {reason}; root may do it", ExitStatus.RUN_FAILED)
    return result


def _print_error(text: str) -> None:
    print(f"kprobefs: --as-system: {text}", file=sys.stderr)
