"""The manual pages name what there is: commands, options, exit statuses, files."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from emulated_kernel.kernel import Kernel
from kprobefs.cli import main
from kprobefs.failure import Exit
from tests.fuse.harness import ROOT

PAGES = ROOT / "docs" / "man"


def text(page: str) -> str:
    """A page without its markup of fonts and dashes."""
    return re.sub(r"\\f[BIRP]", "", (PAGES / page).read_text()).replace("\\-", "-")


@pytest.mark.parametrize(
    "command",
    [
        "mount",
        "umount",
        "status",
        "run",
        "trace",
        "top",
        "tour",
        "reboot",
        "load",
        "save",
        "install-service",
    ],
)
def test_every_option_is_described(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    for option in re.findall(r"--[a-z]+", capsys.readouterr().out):
        assert option in text("kprobefs.1") or option == "--help", option


def test_every_exit_status_is_described() -> None:
    section = text("kprobefs.1").partition(".SH EXIT STATUS")[2].partition(".SH ")[0]
    for status in Exit:
        assert re.search(rf"\b{int(status)}\b", section), status


def test_every_file_is_described() -> None:
    page = text("kprobefs.5")
    with Kernel() as kernel:
        tree = kernel.filesystem()
        kernel.tracing.kprobe_events.write(b"r:a vfs_read")
        for directory in ("/", "/kprobes", "/tracing", "/machine", "/kprobes/stats/kprobes/a"):
            for name, *_ in tree.readdir(directory)[2:]:
                assert re.search(rf"\b{name}\b", page), f"{directory}/{name}"


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.iterdir()))
def test_groff_finds_no_fault(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff")
    result = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", str(PAGES / page)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
