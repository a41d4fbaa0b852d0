"""Contents of the Debian package that scripts/package builds: its tree of files and its control files."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "usr/lib/kprobefs"
EXTRAS = ("", "completion")
NOT_NEEDED = {"..", "__pycache__", "include"}
"""Parts of paths of files that are left out of Python packages: commands, bytecode, C headers."""
LINK = re.compile(r"!?\[(?P<words>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
"""Pattern of a link in a Markdown document."""
LAUNCHER = """\
#!/usr/bin/python3 -I
# The program's own directory comes first: Debian has other versions of its requirements.
import site
import sys

sys.path.insert(0, "/{library}")
site.addsitedir("/{library}")

from {module} import main

sys.exit(main())
"""
LAUNCHERS = {
    "usr/bin/kprobefs": "kprobefs.__main__",
    "usr/sbin/mount.fuse.kprobefs": "kprobefs.cli.mount_helper",
}
PLACES = {
    "kprobefs.service": ("usr/lib/systemd/system",),
    "kprobefs@.service": ("usr/lib/systemd/system",),
    "user/kprobefs.service": ("usr/lib/systemd/user",),
    "90-kprobefs.preset": ("usr/lib/systemd/system-preset", "usr/lib/systemd/user-preset"),
    "kprobefs.conf": ("usr/lib/tmpfiles.d",),
}
COMPLETION = {
    "bash-completion/completions/kprobefs": "bash-completion/completions/kprobefs",
    "zsh/site-functions/_kprobefs": "zsh/vendor-completions/_kprobefs",
    "fish/vendor_completions.d/kprobefs.fish": "fish/vendor_completions.d/kprobefs.fish",
}
"""Path below share/ in the wheel -> path below share/ in Debian."""
DEFAULTS = """\
# Options of `kprobefs mount` for the services of kprobefs, for example --layout tracefs --limit probes=1000
KPROBEFS_OPTIONS=
"""
CONTROL = """\
Package: kprobefs
Version: {version}
Architecture: {architecture}
Maintainer: The kprobefs developers <kprobefs@localhost>
Installed-Size: {size}
Depends: python3 (>= {python}), python3 (<< {next_python}), libfuse2t64 | libfuse2, libc6
Recommends: fuse3
Suggests: systemd, gcc
Section: devel
Priority: optional
Description: {summary}
 Tracing tools and scripts run on it unchanged, in a container or in CI.
 .
 The Python packages that it needs are part of it, in /{library}: Debian has
 other versions of them, or none ({vendored}).
"""
POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d "$DPKG_ROOT/run/systemd/system" ]; then
    systemd-tmpfiles --create kprobefs.conf || :
    systemctl daemon-reload || :
fi
"""
PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d "$DPKG_ROOT/run/systemd/system" ]; then
    systemctl stop kprobefs.service 'kprobefs@*.service' || :
fi
# dpkg's list of files lacks the bytecode that interpreters with other options have compiled.
if [ "$1" = remove ]; then
    find "$DPKG_ROOT/{library}" -depth -name __pycache__ -type d -exec rm -rf {{}} + || :
fi
"""
POSTRM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d "$DPKG_ROOT/run/systemd/system" ]; then
    systemctl daemon-reload || :
fi
# The StateDirectory= of the services.
[ "$1" != purge ] || rm -rf "$DPKG_ROOT/var/lib/kprobefs"
"""


def build(output: Path, *, is_quick: bool) -> Path:
    """Build the package in the directory `output`, and return its path.

    If `is_quick` is true, the Python files are not compiled and the package is not compressed.
    """
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work, "tree")
        tree.mkdir(mode=0o755)
        install_program(tree, Path(work))
        vendored = install_requirements(tree)
        install_launchers(tree)
        install_documents(tree)
        if not is_quick:
            compile_library(tree)
        name = write_control(tree, vendored)
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".new-") as aside:
            options = ["--root-owner-group", "-Znone" if is_quick else "-Zxz"]
            command = ["dpkg-deb", *options, "--build", tree, aside]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (built,) = Path(aside).iterdir()
            # The final name must never belong to an incomplete package.
            return built.replace(output / f"{name}.deb")


def compile_library(tree: Path) -> None:
    """Compile the Python files of the package, so that no run of the program writes bytecode."""
    # The tree is temporary: -s and -p put the installed paths into the bytecode.
    options = ["-q", "-s", tree, "-p", "/", "--invalidation-mode", "unchecked-hash"]
    # -I ignores PYTHONPYCACHEPREFIX, which would have the bytecode written elsewhere.
    subprocess.run([sys.executable, "-I", "-m", "compileall", *options, tree / LIBRARY], check=True)


def install_program(tree: Path, work: Path) -> None:
    """Install the files of the wheel, with manual pages, completion and units in Debian's directories."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--wheel-dir", work]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT], check=True)
    (wheel,) = work.glob("*.whl")
    library = tree / LIBRARY
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(library)
    (data,) = library.glob("*.data")
    for page in (data / "data/share/man").rglob("*.[1-8]"):
        put(
            tree / "usr" / page.relative_to(data / "data").with_name(f"{page.name}.gz"),
            packed(page.read_bytes()),
        )
    for source, place in COMPLETION.items():
        put(tree / "usr/share" / place, (data / "data/share" / source).read_bytes())
    shutil.rmtree(data)
    for unit, places in PLACES.items():
        for place in places:
            put(tree / place / Path(unit).name, (library / "kprobefs/systemd" / unit).read_bytes())


def install_requirements(tree: Path) -> list[str]:
    """Install the program's requirements from this environment, and return their names and versions.

    The requirements of these packages are included.
    """
    found: dict[str, metadata.Distribution] = {}
    wanted = [("kprobefs", EXTRAS)]
    while wanted:
        name, extras = wanted.pop()
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
                continue
            if requirement.name not in found:
                found[requirement.name] = metadata.distribution(requirement.name)
                wanted.append((requirement.name, ("", *requirement.extras)))
    for distribution in found.values():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if not NOT_NEEDED & set(file.parts) and file.suffix not in (".a", ".h") and source.is_file():
                put(tree / LIBRARY / file, source.read_bytes(), source.stat().st_mode & 0o755)
    return sorted(f"{each.name} {each.version}" for each in found.values())


def install_launchers(tree: Path) -> None:
    """Install the commands, and the file with the options of the services."""
    for path, module in LAUNCHERS.items():
        put(tree / path, LAUNCHER.format(library=LIBRARY, module=module).encode(), 0o755)
    put(tree / "etc/default/kprobefs", DEFAULTS.encode())
    (tree / "etc/kprobefs/probes.d").mkdir(parents=True)


def install_documents(tree: Path) -> None:
    """Install the licence, the changelog and the documentation."""
    place = tree / "usr/share/doc/kprobefs"
    put(place / "copyright", (ROOT / "LICENSE").read_bytes())
    put(place / "changelog.gz", packed((ROOT / "CHANGELOG.md").read_bytes()))
    pictures = (ROOT / "docs").rglob("*.svg")
    shipped = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(pictures)]
    for document in shipped:
        data = document.read_bytes()
        if document.suffix == ".md":
            data = without_dead_links(data.decode(), document, {path.resolve() for path in shipped}).encode()
        put(place / document.relative_to(ROOT), data)


def without_dead_links(text: str, document: Path, shipped: Collection[Path]) -> str:
    """Return a document's text in which links to files that are not `shipped` are plain words."""

    def kept(link: re.Match[str]) -> str:
        path = link["target"].partition("#")[0]
        is_alive = not path or "://" in path or (document.parent / path).resolve() in shipped
        return link[0] if is_alive else link["words"]

    return LINK.sub(kept, text)


def write_control(tree: Path, vendored: list[str]) -> str:
    """Write the directory DEBIAN of a finished tree; return the package's name with version and architecture.

    `vendored`: names and versions of the included Python packages.
    """
    program = metadata.metadata("kprobefs")
    command = ["dpkg", "--print-architecture"]
    architecture = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    major, minor = sys.version_info[:2]
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
    control = CONTROL.format(
        version=program["Version"],
        architecture=architecture,
        size=size,
        python=f"{major}.{minor}",
        next_python=f"{major}.{minor + 1}",
        summary=program["Summary"],
        library=LIBRARY,
        vendored=", ".join(vendored),
    )
    put(tree / "DEBIAN/control", control.encode())
    put(tree / "DEBIAN/conffiles", b"/etc/default/kprobefs\n")
    for name, script in (
        ("postinst", POSTINST),
        ("prerm", PRERM.format(library=LIBRARY)),
        ("postrm", POSTRM),
    ):
        put(tree / "DEBIAN" / name, script.encode(), 0o755)
    for directory, _, _ in os.walk(tree):
        os.chmod(directory, 0o755)
    return f"kprobefs_{program['Version']}_{architecture}"


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to the file `path` with the permissions `mode`; create the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def packed(data: bytes) -> bytes:
    """Compress data as `gzip -9n` does, without a name and a time."""
    return gzip.compress(data, 9, mtime=0)


if __name__ == "__main__":
    # Exit by an exception on SIGTERM, so that the temporary directories are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(build(Path(sys.argv[1]), is_quick="--quick" in sys.argv[2:]))
