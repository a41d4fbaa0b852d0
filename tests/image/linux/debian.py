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
from functools import cache
from pathlib import Path

import pytest

_LIMIT = 400 << 20
"""Maximum number of bytes in the cache; the oldest packages are removed first."""
_SECONDS = 60
"""Maximum seconds of a fetch. A test may take longer, so that a slow network skips tests and fails none."""
_LISTS = f"lists-{os.getpid()}"
"""Name of this process's directory, because another worker may use apt at the same time."""
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
    options = () if not suite or _cached(directory, meta) else _other_release(directory, suite, architecture)
    name = _depends(meta, options) if options or not suite else None
    # Since 6.19 the kernel and its modules have packages of their own.
    binary = _depends(name, options, "linux-binary-") if name else None
    name = binary or name
    found: Path | str | None = _cached(directory, name or meta)
    if isinstance(found, Path):
        # A new mtime would be a new file for the caches of other processes. _prune() uses the atime.
        os.utime(found, ns=(time.time_ns(), found.stat().st_mtime_ns))
    elif name:
        found = _fetched(directory, name, options)
        if binary and isinstance(found, Path):
            _fetched(directory, binary.replace("linux-binary-", "linux-modules-"), options)
    shutil.rmtree(directory / _LISTS, ignore_errors=True)
    return found or f"no cached {meta} {suite}, and apt knows none"


def _cached(directory: Path, name: str) -> Path | None:
    """Return the newest cached package with this name, or for the meta package with this name."""
    flavour = re.escape(re.sub(r"^linux-(image|binary)-", "", name))
    form = rf"linux-(image|binary)-([\d.]+(-\d+|\+deb\d+)-)?{flavour}_.*\.deb"
    return max((path for path in directory.glob("*.deb") if re.fullmatch(form, path.name)), default=None)


def _other_release(directory: Path, suite: str, architecture: str) -> tuple[str, ...]:
    """Return options by which apt knows the packages of another release, or no options if apt cannot get the
    lists.
    """
    archives = [
        word
        for file in (
            *Path("/etc/apt").glob("sources.list"),
            *Path("/etc/apt/sources.list.d").glob("debian.*"),
        )
        for word in file.read_text().split()
        if word.startswith("http") and word.rstrip("/").endswith("/debian")
    ]
    if not archives or not shutil.which("apt-get"):
        return ()
    lists = directory / _LISTS
    (lists / "files" / "partial").mkdir(parents=True, exist_ok=True)
    sources = lists / "sources.list"
    sources.write_text(f"deb [signed-by={_KEYS}] {archives[0]} {suite} main\n")
    settings = ("Dir::Etc::sourcelist", sources), ("Dir::Etc::sourceparts", "/nonexistent")
    places = ("Dir::State::lists", lists / "files"), ("Dir::Cache", lists)
    options = tuple(f"-o{name}={value}" for name, value in settings + places)
    if architecture:
        # The packages that are installed here do not count.
        known = ("APT::Architecture", "APT::Architectures")
        options += tuple(f"-o{name}={architecture}" for name in known)
        options += ("-oDir::State::status=/dev/null",)
    try:
        done = subprocess.run(
            ("apt-get", *options, "update", "-qq"), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return () if done.returncode else options


def _directory() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "kprobefs" / "packages"


def _depends(meta: str, options: tuple[str, ...], begin: str = "linux-image-") -> str | None:
    """Return the package that `meta` depends on: linux-image-6.1.0-50-cloud-amd64 for
    linux-image-cloud-amd64.
    """
    words = [line.split() for line in _asked(meta, options).splitlines()]
    return next((each[1] for each in words if each[0] == "Depends:" and each[1].startswith(begin)), None)


def _asked(meta: str, options: tuple[str, ...]) -> str:
    """Return apt's answer, which takes a second of CPU, and is kept until the lists of apt change."""
    kept = _directory() / "depends" / meta
    if not options and kept.exists() and kept.stat().st_mtime_ns > _APT_LISTS.stat().st_mtime_ns:
        return kept.read_text()
    if not shutil.which("apt-cache"):
        return ""
    asked = subprocess.run(
        ("apt-cache", *options, "depends", meta),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if not options and not asked.returncode and _APT_LISTS.exists():
        kept.parent.mkdir(exist_ok=True)
        new = kept.with_name(f"{meta}.{os.getpid()}")
        new.write_text(asked.stdout)
        new.replace(kept)
    return asked.stdout


def _fetched(directory: Path, name: str, options: tuple[str, ...]) -> Path | str:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        try:
            done = subprocess.run(
                ("apt-get", *options, "download", name),
                cwd=place,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name} can't be fetched: {error}"
        files = list(Path(place).glob("*.deb"))
        if done.returncode or not files:
            return f"{name} can't be fetched"
        kept = directory / files[0].name
        files[0].rename(kept)
    _prune(directory, kept)
    return kept


def _prune(directory: Path, newest: Path) -> None:
    total = 0
    for file in sorted(directory.glob("*.deb"), key=lambda each: -each.stat().st_atime):
        total += file.stat().st_size
        if total > _LIMIT and file != newest:
            file.unlink()
