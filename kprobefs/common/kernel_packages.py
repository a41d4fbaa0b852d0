"""Fetches packages of distributions' kernels with apt, and finds kernels that the host has already."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kprobefs.common.errors import CliError, ExitStatus

NAME = re.compile(r"debian:(?P<suite>[a-z][a-z0-9-]*)(?:/(?P<flavour>[a-z0-9]+))?$")
"""Pattern for the name of a kernel that can be fetched: DISTRIBUTION:SUITE[/FLAVOUR]."""
USAGE = "debian:SUITE[/FLAVOUR], for example debian:bookworm/cloud"
FLAVOURS = {
    "amd64": ("linux-image-amd64", "amd64"),
    "cloud": ("linux-image-cloud-amd64", "amd64"),
    "rt": ("linux-image-rt-amd64", "amd64"),
    "arm64": ("linux-image-cloud-arm64", "arm64"),
    "riscv64": ("linux-image-riscv64", "riscv64"),
}
"""Flavour -> (Debian's package that depends on the current kernel of this flavour, Debian's architecture)."""
ARCHITECTURES = {"amd64": "x86_64", "arm64": "arm64", "riscv64": "riscv64"}
"""Debian's name of an architecture -> name of a GuestAbi."""
MACHINES = {"x86_64": "x86_64", "aarch64": "arm64", "riscv64": "riscv64"}
"""Machine of the host, as uname(2) reports it -> name of a GuestAbi."""
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = ("sources.list", "sources.list.d/*.list", "sources.list.d/*.sources")
PACKAGE = re.compile(
    r"linux-(?:image|binary)-(?P<release>\d[^_]*)-(?P<flavour>[a-z0-9]+)_[^_]*_(?P<arch>\w+)\.deb$"
)
MINIMUM_SIZE = 1 << 20
"""Minimum size in bytes of a package with a kernel.

A smaller package contains no kernel, but depends on the package that does.
"""
KERNELS = "KPROBEFS_KERNELS"
"""Environment variable with the user's own kernels: paths of files and directories, separated by colons."""


def directory() -> Path:
    """Return the directory of fetched packages, in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and home.startswith("/") else Path.home() / ".cache") / "kprobefs" / "fetched"


def suite_and_flavour(name: str) -> tuple[str, str]:
    """Return (suite, flavour) of a kernel's name DISTRIBUTION:SUITE[/FLAVOUR]; the default flavour is amd64.

    Raises: CliError (the name is malformed, or the flavour is unknown).
    """
    found = NAME.match(name)
    if found is None:
        known = f"the flavours are {', '.join(FLAVOURS)}"
        raise CliError(f"{name}: not a kernel's name; use {USAGE}; {known}", ExitStatus.USAGE)
    flavour = found["flavour"] or "amd64"
    if flavour not in FLAVOURS:
        raise CliError(f"{name}: no such flavour; use {', '.join(FLAVOURS)}", ExitStatus.USAGE)
    return found["suite"], flavour


def fetch(name: str) -> Path:
    """Fetch a kernel with apt, and return the path of its package.

    `name`: see suite_and_flavour(). If the package was fetched before, nothing is downloaded.
    Raises: CliError (the name is wrong, or apt is missing or fails).
    """
    suite, flavour = suite_and_flavour(name)
    if shutil.which("apt-get") is None:
        raise CliError(f"{name}: no apt-get on this host; download the package and use --image FILE")
    try:
        return _fetch(name, suite, flavour)
    except OSError as error:
        way = "free some space, or set" if error.errno == errno.ENOSPC else "set"
        raise CliError(f"{error.filename or directory()}: {error.strerror}; {way} XDG_CACHE_HOME") from error


def _fetch(name: str, suite: str, flavour: str) -> Path:
    directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory()) as work:
        meta, architecture = FLAVOURS[flavour]
        apt = _Apt(Path(work), suite, name, architecture)
        place = directory() / suite
        place.mkdir(exist_ok=True)
        if not apt.has(meta):
            why = f"{suite} has no {meta}; name a later suite, or another flavour ({', '.join(FLAVOURS)})"
            raise CliError(f"{name}: {why}")
        package = apt.dependency(meta, "linux-image-")
        # Since 6.19 the kernel and its modules have packages of their own.
        with suppress(CliError):
            package = apt.dependency(package, "linux-binary-")
            apt.download(package.replace("linux-binary-", "linux-modules-"), place)
        return apt.download(package, place)


class _Apt:
    """Runs apt for one suite, with its own package lists, so that the user needs no special rights."""

    def __init__(self, work: Path, suite: str, name: str, architecture: str) -> None:
        """Fetch the list of the suite's packages for an architecture.

        `work`: directory for apt's files. `name`: the kernel as the user named it, for messages.
        `architecture`: Debian's name.

        Raises: CliError (apt fails, or the host's apt has no Debian archive).
        """
        self._name = name
        self._work = work
        lists = work / "lists"
        (lists / "partial").mkdir(parents=True)
        sources = work / "sources.list"
        keys = f"[signed-by={KEYS}] " if KEYS.exists() else ""
        sources.write_text(f"deb {keys}{_archive(name)} {suite} main\n")
        settings = {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "/nonexistent",
            "Dir::State::lists": lists,
            "Dir::Cache": work,
            # The packages that are installed here may be of another architecture.
            "Dir::State::status": "/dev/null",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Debug::NoLocking": "1",
        }
        self._options = [f"-o{option}={value}" for option, value in settings.items()]
        self._run("apt-get", "update", "-qq", "--error-on=any")

    def has(self, package: str) -> bool:
        """Return True if the suite has a package called `package`."""
        return package in self._run("apt-cache", "pkgnames", package).split()

    def dependency(self, package: str, begin: str) -> str:
        """Return the first dependency of `package` whose name starts with `begin`.

        Raises: CliError (there is none).
        """
        lines = self._run("apt-cache", "depends", package).splitlines()
        words = [line.split() for line in lines if line.strip().startswith("Depends:")]
        found = next((each[1] for each in words if each[1].startswith(begin)), None)
        if found is None:
            raise CliError(f"{self._name}: {package} depends on no {begin}*")
        return found

    def download(self, package: str, place: Path) -> Path:
        """Download a package, unless it is in the directory `place`, and return its path.

        Raises: CliError (apt fails).
        """
        known = self._run("apt-get", "download", "--print-uris", package).split()
        file = known[1] if known[1:] else ""
        if file and (place / file).exists():
            return place / file
        self._run("apt-get", "download", package)
        files = [*self._work.glob(f"{package}_*.deb")]
        if not files:
            raise CliError(f"{self._name}: apt-get download {package} left no package")
        kept = place / files[0].name
        files[0].rename(kept)
        return kept

    def _run(self, program: str, *words: str) -> str:
        done = subprocess.run(
            [program, *self._options, *words], cwd=self._work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["failed"]
            why = last[0].removeprefix("E: ")
            if "is not signed" in why and not KEYS.exists():
                why += " Install debian-archive-keyring, the package with Debian's keys."
            raise CliError(f"{self._name}: {program} {words[0]}: {why}")
        return done.stdout


def _archive(name: str) -> str:
    """Return the URL of the archive of Debian's packages that the host's apt uses.

    `name`: the kernel as the user named it, for the message. Raises: CliError (apt uses none).
    """
    for pattern in SOURCES:
        for file in sorted(Path("/etc/apt").glob(pattern)):
            with suppress(OSError):
                for word in file.read_text(errors="replace").split():
                    if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                        return word
    raise CliError(
        f"{name}: apt has no archive of Debian's packages; add it to apt's sources, or use --image FILE"
    )


def find(version: str, arch: str = "x86_64") -> Path | None:
    """Return the file of a kernel whose release begins with `version`, or None if there is no such kernel.

    `arch`: name of the kernel's GuestAbi. Four sources are searched in this order: $KPROBEFS_KERNELS, the
    fetched packages, the kernels that were booted and cached, and /boot. The result is the newest such kernel
    of the first source that has one. Raises: CliError (a path in $KPROBEFS_KERNELS cannot be read).
    """
    for files in (_named(), _fetched(), _booted(), _of_host()):
        known = ((_kernel(path), path) for path in files)
        found = [(release, path) for (release, of), path in known if of == arch and _is_of(release, version)]
        if found:
            return max(found, key=lambda each: [int(part) for part in re.findall(r"\d+", each[0])])[1]
    return None


def at_hand() -> Iterator[tuple[Path, str, str]]:
    """Yield (path, release, architecture) of each kernel that can be used without fetching it.

    The kernels are those that $KPROBEFS_KERNELS names, the fetched kernels, and those in /boot.
    Raises: CliError (a path in $KPROBEFS_KERNELS cannot be read).
    """
    for files in (_named(), _fetched(), _of_host()):
        for path in sorted(files):
            release, architecture = _kernel(path)
            if release:
                yield path, release, architecture


def _fetched() -> Iterator[Path]:
    return directory().glob("*/*.deb")


def _of_host() -> Iterator[Path]:
    return Path("/boot").glob("vmlinuz-*")


def _is_of(release: str, version: str) -> bool:
    return re.match(rf"{re.escape(version)}(?!\d)", release) is not None


def _named() -> Iterator[Path]:
    for word in filter(None, os.environ.get(KERNELS, "").split(":")):
        path = Path(word)
        try:
            path.stat()
            found = [*path.iterdir()] if path.is_dir() else [path]
        except OSError as error:
            why = f"{error.strerror}; correct the path or leave it out"
            raise CliError(f"${KERNELS}: {word}: {why}", ExitStatus.USAGE) from error
        yield from found


def _booted() -> Iterator[Path]:
    """Yield the files of the kernels in the boot cache, if the files still exist."""
    from emulated_kernel.guests.linux.boot import snapshot

    for kernel in snapshot.cached():
        if kernel.source and os.path.isfile(kernel.source):
            yield Path(kernel.source)


def _kernel(path: Path) -> tuple[str, str]:
    """Return (release, architecture) of the kernel in the file at `path`, according to the file's name.

    An image, `vmlinuz-RELEASE`, is assumed to be for the host's architecture. Return ("", "") if an image
    cannot be read, or if the file is neither an image nor a package with a kernel.
    """
    if path.name.startswith("vmlinuz-"):
        known = path.name.removeprefix("vmlinuz-"), MACHINES.get(os.uname().machine, "")
        return known if os.access(path, os.R_OK) else ("", "")
    found = PACKAGE.match(path.name)
    if found is None or found["arch"] not in ARCHITECTURES or path.stat().st_size < MINIMUM_SIZE:
        return "", ""
    return f"{found['release']}-{found['flavour']}", ARCHITECTURES[found["arch"]]
