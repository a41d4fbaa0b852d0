"""Debian's own kernel packages, kept in a cache outside of the project. Tests are skipped without a
package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

_LIMIT = 400 << 20
"""Maximum number of bytes in the cache; the oldest packages are removed first."""
_SECONDS = 80
"""Maximum seconds of all that apt does for a package.

A test may take longer, so that a slow network skips tests and fails none.
"""
_AFTER_A_LATE_ONE = 15
"""Maximum seconds for each further package, after apt was not done in time.

One test may need several packages.
"""
_LISTS = f"lists-{os.getpid()}"
"""Name of a directory for this process only, because another worker may use apt at the same time."""
_APT_LISTS = Path("/var/lib/apt/lists")
"""apt's lists of packages; each update of them changes the directory."""
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-amd64")


def package(meta: str, suite: str = "", architecture: str = "") -> Path:
    """Return the package that a meta package depends on, fetched once. Skip the test if the package is not
    available.

    `suite`: another release of Debian than the host's release, from the same archive.

    `architecture`: another architecture, which needs a `suite`.
    """
    found = _package(meta, suite, architecture)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _package(meta: str, suite: str, architecture: str) -> Path | str:
    directory = _directory() / "-".join(filter(None, (suite, architecture)))
    directory.mkdir(parents=True, exist_ok=True)
    apt = _Apt(_AFTER_A_LATE_ONE if _Apt.was_late else _SECONDS)
    is_other = bool(suite) and not _cached(directory, meta)
    knows = apt.read_other_release(directory, suite, architecture) if is_other else not suite
    name = _depends(meta, apt) if knows else None
    # Since 6.19 the kernel and its modules have packages of their own.
    binary = _depends(name, apt, "linux-binary-") if name else None
    name = binary or name
    found: Path | str | None = _cached(directory, name or meta)
    if isinstance(found, Path):
        # A new mtime would be a new file for the caches of other processes. _prune() uses the atime.
        os.utime(found, ns=(time.time_ns(), found.stat().st_mtime_ns))
    elif name:
        found = _fetched(directory, name, apt)
        if binary and isinstance(found, Path):
            _fetched(directory, binary.replace("linux-binary-", "linux-modules-"), apt)
    shutil.rmtree(directory / _LISTS, ignore_errors=True)
    return found or f"no cached {meta} {suite}, and apt knows none"


def _cached(directory: Path, name: str) -> Path | None:
    """Return the newest cached package called `name`. If `name` is a meta package, return the newest of its
    packages.
    """
    flavour = re.escape(re.sub(r"^linux-(image|binary)-", "", name))
    form = rf"linux-(image|binary)-([\d.]+(-\d+|\+deb\d+)-)?{flavour}_.*\.deb"
    return max((path for path in directory.glob("*.deb") if re.fullmatch(form, path.name)), default=None)


class _Apt:
    """Runs commands of apt, all together for at most `seconds`. The commands use the host's lists of packages
    until read_other_release().
    """

    was_late = False
    """Whether apt was not done in time once in this process."""

    def __init__(self, seconds: float) -> None:
        self.options: tuple[str, ...] = ()
        """Options that select other lists than the host's."""
        self._end = time.monotonic() + seconds

    def run(self, program: str, *words: str, cwd: Path | None = None) -> str | None:
        """Return the output of a program of apt, or None if the program fails or is not done in time."""
        try:
            return subprocess.run(
                (program, *self.options, *words),
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=max(0, self._end - time.monotonic()),
                check=True,
            ).stdout
        except subprocess.TimeoutExpired:
            _Apt.was_late = True
        except (OSError, subprocess.CalledProcessError):
            pass
        return None

    def read_other_release(self, directory: Path, suite: str, architecture: str) -> bool:
        """Use the lists of another release. Return True if apt could get them."""
        archives = [
            word
            for file in (
                *Path("/etc/apt").glob("sources.list"),
                *Path("/etc/apt/sources.list.d").glob("debian.*"),
            )
            for word in file.read_text().split()
            if word.startswith("http") and word.rstrip("/").endswith("/debian")
        ]
        if not archives:
            return False
        lists = directory / _LISTS
        (lists / "files" / "partial").mkdir(parents=True, exist_ok=True)
        sources = lists / "sources.list"
        sources.write_text(f"deb [signed-by={_KEYS}] {archives[0]} {suite} main\n")
        settings = ("Dir::Etc::sourcelist", sources), ("Dir::Etc::sourceparts", "/nonexistent")
        places = ("Dir::State::lists", lists / "files"), ("Dir::Cache", lists)
        self.options = tuple(f"-o{name}={value}" for name, value in settings + places)
        if architecture:
            # The packages that are installed here do not count.
            known = ("APT::Architecture", "APT::Architectures")
            self.options += tuple(f"-o{name}={architecture}" for name in known)
            self.options += ("-oDir::State::status=/dev/null",)
        return self.run("apt-get", "update", "-qq") is not None


def _directory() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "kprobefs" / "packages"


def _depends(meta: str, apt: _Apt, begin: str = "linux-image-") -> str | None:
    """Return the package that `meta` depends on and whose name starts with `begin`; None if there is none.

    An example is linux-image-6.1.0-50-cloud-amd64 for linux-image-cloud-amd64.
    """
    words = [line.split() for line in _asked(meta, apt).splitlines()]
    return next((each[1] for each in words if each[0] == "Depends:" and each[1].startswith(begin)), None)


def _asked(meta: str, apt: _Apt) -> str:
    """Return the output of `apt-cache depends`. The output is kept until the lists of apt change, because the
    command takes a second of CPU.
    """
    kept = _directory() / "depends" / meta
    if not apt.options and kept.exists() and kept.stat().st_mtime_ns > _APT_LISTS.stat().st_mtime_ns:
        return kept.read_text()
    answer = apt.run("apt-cache", "depends", meta)
    if not apt.options and answer is not None and _APT_LISTS.exists():
        kept.parent.mkdir(exist_ok=True)
        new = kept.with_name(f"{meta}.{os.getpid()}")
        new.write_text(answer)
        new.replace(kept)
    return answer or ""


def _fetched(directory: Path, name: str, apt: _Apt) -> Path | str:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        if apt.run("apt-get", "download", name, cwd=Path(place)) is None:
            return f"{name} can't be fetched"
        files = list(Path(place).glob("*.deb"))
        kept = directory / files[0].name
        files[0].rename(kept)
    _prune(directory, kept)
    return kept


def _prune(directory: Path, newest: Path) -> None:
    total = 0
    # Another worker may remove the same packages.
    with suppress(FileNotFoundError):
        for file in sorted(directory.glob("*.deb"), key=lambda each: -each.stat().st_atime):
            total += file.stat().st_size
            if total > _LIMIT and file != newest:
                file.unlink()
