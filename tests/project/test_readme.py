"""README is true: its console blocks show the outputs of a mount, and its Python example runs."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from emulated_kernel.image import build_images
from emulated_kernel.kernel.api import Kernel
from tests.fuse.harness import PYTEST, REAL_PROGRAM, kprobefs
from tests.guests.linux import debian_kernel
from tests.guests.linux.debian_kernel import lasting_cache
from tests.project.readme import README, Step, blocks, normalise, of_image, steps

KPROBEFS = Path(sys.executable).with_name("kprobefs")
EXAMPLES, FIRST, OWN, ASSEMBLY, REAL, TESTING, LIBRARY, DURATIONS, DEBUGGERS, OPTIMIZATION = (
    README.parent / "docs/guide" / name
    for name in (
        "examples.md",
        "first-probe.md",
        "own-kernel.md",
        "assembly.md",
        "real-linux.md",
        "testing.md",
        "library.md",
        "durations.md",
        "debuggers.md",
        "optimization.md",
    )
)
SESSIONS = [
    # Blocks of a page continue each other on one mount; each example has a separate mount.
    *(
        pytest.param([step for body in blocks("console mounted", page) for step in steps(body)], id=page.stem)
        for page in (README, FIRST, OPTIMIZATION)
    ),
    *(
        pytest.param(steps(body), id=f"example {number}")
        for number, body in enumerate(blocks("console mounted", EXAMPLES), 1)
    ),
]
DAY = 86400
"""Seconds after which unused compiled objects of another version of the sources are removed."""
MARK = "\x1e"
"""Character that ends the output of each command. No file of a mount contains it."""


@pytest.mark.mounted
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.parametrize("session", SESSIONS)
def test_console_blocks_show_what_a_mount_shows(session: list[Step]) -> None:
    _compare_session(session)


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
def test_the_page_of_distributions_kernels_shows_what_debians_shows() -> None:
    session = [step for body in blocks("console image", REAL) for step in steps(body)]
    _compare_session([Step('cd "$KPROBEFS"', ""), *session], "--image", str(debian_kernel.image()))


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="e2fsprogs is not installed")
def test_the_page_shows_what_a_file_system_on_a_disk_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(README.parent)
    session = [step for body in blocks("console ext4", REAL) for step in steps(body)]
    _compare_session(session, "--image", str(debian_kernel.image()))


@pytest.mark.mounted
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
def test_the_page_of_the_optimizer_shows_what_risc_v_shows() -> None:
    session = [step for body in blocks("console riscv", OPTIMIZATION) for step in steps(body)]
    _compare_session(session, "--arch", "riscv64", "--profile", "riscv-optprobes-2023")


@pytest.mark.mounted
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.parametrize("clock", ["model", "real"])
def test_the_page_of_durations_shows_what_the_clocks_show(clock: str) -> None:
    session = [step for body in blocks("console real", DURATIONS) for step in steps(body)]
    _compare_session(session, "--clock", clock)


@pytest.mark.mounted
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
@pytest.mark.skipif(not KPROBEFS.with_name("drgn").exists(), reason="drgn is not installed")
def test_the_page_of_debuggers_shows_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of debuggers shows the outputs of gdb and drgn on one mount: the tasks, and a read that gdb
    has stopped.
    """
    monkeypatch.setenv("PATH", f"{KPROBEFS.parent}:{os.environ['PATH']}")
    session = [step for body in blocks("console debugged", DEBUGGERS) for step in steps(body)]
    _compare_session(session)


def _compare_session(session: list[Step], *options: str) -> None:
    """Run the commands on one mount, and compare their outputs with those that the page shows."""
    script = "".join(f"{step.command}\nprintf '{MARK}'\n" for step in session)
    command = ("run", *options, "--", "bash", "-c", f"exec 2>&1\n{script}")
    done = kprobefs(*command, program=REAL_PROGRAM, limit=60)
    outputs = done.stdout.split(MARK)
    assert len(outputs) == len(session) + 1, done.stdout + done.stderr
    for step, output in zip(session, outputs, strict=False):
        assert normalise(output) == normalise(step.output), step.command


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_ones_own_module_and_image(tmp_path: Path) -> None:
    """The page about modules and images of one's own shows the outputs of its commands.

    Compiled objects are kept for later runs: the same sources and compiler give the same objects.
    """
    session = [step for body in blocks("console", OWN) for step in steps(body)]
    script = "".join(f"{step.command}\nprintf '{MARK}'\n" for step in session)
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        cwd=tmp_path,
        env={**os.environ, **_keeping_compiler(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    for step, output in zip(session, done.stdout.split(MARK), strict=False):
        assert normalise(output) == normalise(step.output), step.command


def _keeping_compiler(directory: Path) -> dict[str, str]:
    """Create a gcc in `directory` that keeps compiled objects.

    Return environment variables with which the shell finds this gcc.
    """
    compiler = shutil.which("gcc")
    assert compiler is not None
    directory.mkdir()
    (directory / "gcc").symlink_to(Path(__file__).with_name("kept_objects.sh"))
    objects = lasting_cache("objects") / _sources_and_compiler()
    objects.mkdir(parents=True, exist_ok=True)
    os.utime(objects)
    for other in objects.parent.iterdir():
        # Another worker may have removed it.
        with suppress(FileNotFoundError):
            if other.stat().st_mtime < time.time() - DAY:
                shutil.rmtree(other, ignore_errors=True)
    path = f"{directory}:{KPROBEFS.parent}:{os.environ['PATH']}"
    return {"PATH": path, "KEPT_OBJECTS": str(objects), "KEPT_COMPILER": compiler}


def _sources_and_compiler() -> str:
    """Return a digest of all files that compilations include, and of the compiler's version.

    The names of kept objects depend on the compiler's options.
    """
    digest = hashlib.sha256(build_images.tool_version("gcc").encode())
    for file in sorted(path for path in build_images.SOURCE.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(build_images.SOURCE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("page", [README, FIRST, EXAMPLES], ids=lambda page: page.stem)
def test_addresses_and_sizes_are_of_this_image(page: Path) -> None:
    """Addresses and sizes in the pages are those of this image.

    Both change with each build of the image. If the assertion fails, the right side is the line to write.
    """
    with Kernel() as kernel:
        for body in blocks("console mounted", page):
            for line in body.splitlines():
                assert line == of_image(line, kernel.image.kallsyms)


def test_the_memory_that_the_kernel_has_is_told() -> None:
    with Kernel() as kernel:
        (known,) = [line for line in map(str, kernel.guest.messages()) if "K available" in line]
        mebibytes = int(re.findall(r"/(\d+)K available", known)[0]) >> 10
        told = f"{kernel.config.ram_size >> 20} MiB, of which {mebibytes} MiB belong to the kernel"
    assert f"RAM is {told}" in " ".join((README.parent / "docs/reference/security.md").read_text().split())


def test_a_sample_of_another_image_is_found() -> None:
    with Kernel() as kernel:
        symbols = kernel.image.kallsyms
        [function] = symbols.by_name("vfs_read")
        assert of_image("ffffffff81000000  k  vfs_read+0x0    [FTRACE]", symbols) == (
            f"{function.address:x}  k  vfs_read+0x0    [FTRACE]"
        )
        assert of_image("ffffffff81000000 T vfs_read", symbols) == f"{function.address:x} T vfs_read"
        assert of_image("(vfs_read+0x3/0x7777)", symbols) == f"(vfs_read+0x3/{function.size:#x})"


def test_it_begins_with_a_quick_start_and_the_readers_jobs() -> None:
    text = README.read_text()
    before, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    commands = re.findall(r"^    (.*)", before, re.MULTILINE)
    assert len(commands) == 2
    assert "scripts/run" in commands[0]
    assert "kprobefs trace" in commands[1]
    [picture] = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", before)
    assert (README.parent / picture).exists()
    titles = [section.partition("\n")[0] for section in sections]
    for title, anchor in re.findall(r"^- \[([^\]]+)\]\(#([^)]+)\)", before, re.MULTILINE):
        assert anchor in {each.lower().replace(" ", "-") for each in titles}, title


@pytest.mark.parametrize("page", [README, FIRST, ASSEMBLY, LIBRARY], ids=lambda page: page.stem)
def test_the_python_examples_run(page: Path, tmp_path: Path) -> None:
    examples = blocks("python", page)
    assert examples
    (tmp_path / "example.py").write_text("\n\n".join(examples))
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")


def test_the_example_of_the_testing_page_passes(tmp_path: Path) -> None:
    [example] = blocks("python", TESTING)
    file = tmp_path / "test_example.py"
    file.write_text(example)
    done = kprobefs("-q", "-p", "no:cacheprovider", str(file), program=PYTEST, cwd=str(tmp_path))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "document", [README, *sorted((README.parent / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
