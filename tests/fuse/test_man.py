"""The manual pages describe all commands, options, exit statuses, directories, files, tracers and modules."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from kprobefs.cli.main import main
from kprobefs.cli.parser import BENCH_OPTIONS
from kprobefs.common.errors import ExitStatus
from tests.fuse.harness import PATIENCE, ROOT

PAGES = ROOT / "docs" / "man"


def text(page: str) -> str:
    """Return the text of a manual page without markup of fonts and dashes."""
    return re.sub(r"\\f[BIRP]", "", (PAGES / page).read_text()).replace("\\-", "-")


def words(command: str) -> set[str]:
    """Return the words of the line in the synopsis that shows the command `command`."""
    synopsis = text("kprobefs.1").partition(".SH SYNOPSIS\n")[2].partition(".SH ")[0]
    [found] = [
        each for each in synopsis.split(".br\n") if re.match(rf"\.BR? kprobefs {re.escape(command)}\s", each)
    ]
    return set(re.findall(r"[\w-]+", found))


def said(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*command.split(), "--help"]) == 0
    return capsys.readouterr().out


def test_every_command_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^    ([a-z][a-z-]*)(?: |$)", said("", capsys), re.MULTILINE)
    assert {"mount", "images", "djprobe-analyze", "bench", "coverage", "completion"} <= set(commands)
    page = text("kprobefs.1").partition(".SH COMMANDS")[2]
    for command in commands:
        told = said(command, capsys)
        for option in re.findall(r"(?<![\w-])--[a-z-]+", told):
            assert option == "--help" or re.search(rf"{option}(?![\w-])", page), (command, option)
        own, machine, _ = told.partition("the emulated machine:")
        synopsis = words(command)
        assert ("MACHINE" in synopsis) == bool(machine), command
        for line in re.findall(r"^  (-.*?)(?:  |$)", own.partition("\noptions:")[2], re.MULTILINE):
            forms = re.findall(r"(?<![\w-])--?[a-z-]+", line)
            assert forms
            assert "--help" in forms or synopsis & set(forms), (command, line)
        if choices := re.search(r" \{([a-z,]+)\}$", own.partition("\n\n")[0]):
            assert set(choices[1].split(",")) <= synopsis, (command, choices[1])
    assert set(BENCH_OPTIONS) <= words("bench")


def test_every_directory_is_in_the_synopsis() -> None:
    synopsis = text("kprobefs.5").partition(".SH SYNOPSIS")[2].partition(".SH ")[0]
    with Kernel() as kernel:
        tree = kernel.filesystem()
        found = [name for name, *_ in tree.readdir("/")[2:] if stat.S_ISDIR(tree.getattr(f"/{name}").mode)]
    assert sorted(re.findall(r"/(\w+)/", synopsis)) == sorted(found)


def test_every_tracer_is_described() -> None:
    told = text("kprobefs.5").partition(".IR current_tracer")[2].partition("\n.TP")[0]
    with Kernel() as kernel:
        names = kernel.trace.tracers()
    assert {"function", "nop"} <= set(names)
    for name in names:
        assert re.search(rf"^\.BR? {name}\b", told, re.MULTILINE), name


def test_every_exit_status_is_described() -> None:
    section = text("kprobefs.1").partition(".SH EXIT STATUS")[2].partition(".SH ")[0]
    for status in ExitStatus:
        assert re.search(rf"\b{int(status)}\b", section), status


def test_every_file_is_described() -> None:
    page = text("kprobefs.5")
    with Kernel() as kernel:
        tree = kernel.filesystem()
        kernel.tracing.kprobe_events.write(b"r:a vfs_read")
        for directory in ("/", "/kprobes", "/tracing", "/machine", "/kprobes/stats/kprobes/a"):
            for name, *_ in tree.readdir(directory)[2:]:
                assert re.search(rf"\b{name}\b", page), f"{directory}/{name}"
        # The devices belong to the guest. The tree has only their directory.
        devices = page.partition(".SS dev/")[2].partition(".SH ")[0]
        mount = kernel.mounted(tree)
        found = {entry.name for entry in mount.readdir("/dev")} - {".", ".."}
        assert {"null", "zero"} <= found
        for name in found:
            assert re.search(rf"\b{name}\b", devices), name


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.iterdir()))
def test_groff_finds_no_fault(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff")
    result = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", str(PAGES / page)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_module_is_named() -> None:
    """kprobefs(5) names all modules that come with kprobefs's own kernel."""
    said = text("kprobefs.5").partition("loads a module that comes with the kernel")[2].partition(".BI")[0]
    modules = {path.stem for path in (PREBUILT / "x86_64" / "modules").glob("*.ko")}
    assert set(re.findall(r"[a-z]+(?:_[a-z]+)*", said.partition("\n")[2])) >= modules
