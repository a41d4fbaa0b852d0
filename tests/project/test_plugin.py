"""The pytest plugin and its example, run by a separate pytest as users run them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from emulated_kernel.util.config import ARCHITECTURES
from kprobefs.cli.ended_hint import GONE
from kprobefs.cli.main import main
from kprobefs.common import kernel_packages
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.kernel_packages import FLAVOURS, find
from tests.fuse.harness import PYTEST, REAL_PROGRAM, kprobefs, needs_fuse
from tests.guests.linux import debian_kernel
from tests.image.linux.debian import package

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = "kprobefs.pytest_plugin"


def run_pytest(directory: Path, *arguments: str, run: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the tests in a directory, without plugins of others.

    `run`: words of `kprobefs run` that run pytest, if any.
    """
    options = ("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *arguments)
    own = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if run:
        return kprobefs(*run, *PYTEST, *options, program=REAL_PROGRAM, cwd=str(directory), **own)
    return kprobefs(*options, program=PYTEST, cwd=str(directory), **own)


def test_it_is_found_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # The plugin has the name of its module, so that pytest loads it only once if -p also names it.
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}


def test_importing_it_is_cheap() -> None:
    """Importing the plugin imports no large module, because each pytest of an environment imports the
    plugin.
    """
    script = f"import sys, pytest, {PLUGIN}; print([m for m in sys.modules if m.split('.')[0] in {{names}}])"
    script = script.replace("{names}", "('emulated_kernel', 'unicorn', 'rich', 'fuse')")
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


TESTS = """\
import pytest

@pytest.mark.architectures("i386", "riscv64")
def test_marked(kernel, kprobefs_arch):
    assert kernel.config.arch == kprobefs_arch
    assert kernel.call("strlen", "four") == 4

def test_unmarked(kernel):
    assert kernel.config.arch == "x86_64"
"""


def test_kernels_in_the_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    result = run_pytest(tmp_path, "-v")
    assert result.returncode == 0, result.stdout
    assert re.findall(r"::(\S+) PASSED", result.stdout) == [
        "test_marked[i386]",
        "test_marked[riscv64]",
        "test_unmarked",
    ]


@pytest.mark.parametrize(
    ("marker", "why"), [('"vax"', "no architecture: ['vax']"), ("", "uses no fixture of kprobefs")]
)
def test_a_wrong_marker_is_told(marker: str, why: str, tmp_path: Path) -> None:
    arguments = "kernel" if marker else ""
    text = f"import pytest\n@pytest.mark.architectures({marker})\ndef test_it({arguments}): pass\n"
    (tmp_path / "test_it.py").write_text(text)
    result = run_pytest(tmp_path)
    assert result.returncode != 0
    [told] = [line for line in result.stdout.splitlines() if why in line]
    assert "Traceback" not in result.stdout + result.stderr
    assert not marker or told.endswith(f"there are {', '.join(ARCHITECTURES)}")


TWO_ARCHITECTURES = "a distribution's kernel has its own architecture; leave"
WRONG_KERNELS = {
    "kernels(6.10)": '6.1 is not a string; write a version as "6.1"',
    "kernels()": "no version given",
    'kernels("arm64:6.1")': "'arm64:6.1': kprobefs runs kernels for arm64 from Linux 6.5 on",
    'kernels("arm64:5")': "'arm64:5': kprobefs runs kernels for arm64 from Linux 6.5 on",
    'kernels("mips:6.12")': "'mips:6.12': no architecture of a distribution's kernel; use x86_64, ",
    'kernels("5.10")|architectures("x86_64", "i386")': TWO_ARCHITECTURES,
    'kernels("5.10")|architectures()': TWO_ARCHITECTURES,
}
"""Markers of a test -> the start of the reason why they are refused."""


def test_wrong_kernels_are_found_at_collection(tmp_path: Path) -> None:
    """Wrong `kernels` markers are errors at collection, one for each test file. Other files are collected."""
    for number, markers in enumerate(WRONG_KERNELS):
        lines = [f"@pytest.mark.{marker}" for marker in markers.split("|")]
        text = "\n".join(["import pytest", *lines, f"def test_{number}(tracefs): pass\n"])
        (tmp_path / f"test_{number}.py").write_text(text)
    (tmp_path / "test_right.py").write_text("def test_right(tracefs): pass\n")
    result = run_pytest(tmp_path, "--collect-only")
    assert result.returncode != 0
    for number, why in enumerate(WRONG_KERNELS.values()):
        assert [line for line in result.stdout.splitlines() if f"test_{number}: kernels: {why}" in line]
    assert f"1 test collected, {len(WRONG_KERNELS)} errors" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_kernels_of_a_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_KERNELS", str(tmp_path / "none"))
    (tmp_path / "test_it.py").write_text(KERNELS)
    result = run_pytest(tmp_path)
    assert result.returncode != 0
    assert f"$KPROBEFS_KERNELS: {tmp_path / 'none'}: No such file or directory; correct" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"arch": "mips"}, "argument --arch: invalid choice: 'mips'"),
        ({"cpus": 0}, "'0' is not a number from"),
        ({"cpu": "milan"}, "--cpu: only possible with a distribution's kernel"),
    ],
)
def test_a_mount_that_fails_says_why(
    options: dict[str, object], why: str, kprobefs_mount: Callable[..., Path]
) -> None:
    with pytest.raises(RuntimeError, match=f"^kprobefs: .*{why}") as told:
        kprobefs_mount(**options)
    assert "\n" not in str(told.value)


REFUSED = """\
import pytest

@pytest.mark.parametrize("line", ["p:a nosuch", "f:a vfs_read"])
def test_refused(tracefs, line):
    (tracefs / "dynamic_events").write_text(f"{line}\\n")

@pytest.fixture
def prepared(tracefs):
    (tracefs / "nosuch").write_text("1")

def test_missing(prepared):
    pass

def test_accepted(tracefs):
    (tracefs / "dynamic_events").write_text("p:a vfs_read\\n")
    assert False
"""


@needs_fuse
@pytest.mark.mounted
def test_the_report_has_the_refused_definition(tmp_path: Path) -> None:
    """The report of a test names the definition that was refused, because the error of the write has only an
    errno.
    """
    (tmp_path / "test_it.py").write_text(REFUSED)
    result = run_pytest(tmp_path)
    assert result.stdout.count("- kprobefs -") == 3, result.stdout
    assert 'Invalid probed address or symbol" for "p:a nosuch"' in result.stdout
    assert 'dynamic_events has refused "f:a vfs_read": this kernel has no events of kind f' in result.stdout
    assert "this kernel has no file tracing/nosuch" in result.stdout


LOST = """\
import os, subprocess
from kprobefs.common.daemon_registry import running

def unmount(directory):
    subprocess.run(["umount", "-l", directory], check=True)

def kill(directory):
    os.kill(running(str(directory)).pid, 9)

def test_unmounted(kprobefs_mount):
    mount = kprobefs_mount()
    unmount(mount)
    (mount / "kprobe_events").read_text()

def test_killed(kprobefs_mount):
    mount = kprobefs_mount()
    kill(mount)
    (mount / "kprobe_events").read_text()

def test_passed(kprobefs_mount):
    kill(kprobefs_mount())

def test_later(tracefs):
    (tracefs / "kprobe_events").read_text()
"""


@needs_fuse
@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="unmounts")
def test_a_mount_that_is_gone(tmp_path: Path) -> None:
    """The report of a failed test says that its mount is gone. A test that passed has a warning."""
    (tmp_path / "test_it.py").write_text(LOST)
    result = run_pytest(tmp_path)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert re.search("^=+ 2 failed, 2 passed, 3 warnings in", result.stdout, re.MULTILINE)
    assert result.stdout.splitlines().count(GONE) == 2
    assert f"UserWarning: kprobefs: {GONE}" in result.stdout


FAILING = """\
def test_definition(kernel):
    kernel.write_file("tracing/kprobe_events", "p:x vfs_raed")

def test_symbol(kernel):
    kernel.kallsyms_lookup_name("nosuch")

def test_again(kernel):
    try:
        kernel.read_file("tracing/nosuch")
    except OSError:
        kernel.write_file("tracing/kprobe_events", "p:x vfs_raed")
"""
MOUNTING = """\
def test_mount(kprobefs_mount):
    kprobefs_mount(image="/nosuch.deb")

def test_refused(tracefs):
    (tracefs / "dynamic_events").write_text("p:x vfs_raed")
"""
FAULT = """\
from emulated_kernel.trace.symbols import sprint_symbol

def test_fault(kernel):
    try:
        kernel.read_file("tracing/nosuch")
    except OSError:
        sprint_symbol(None, None)
"""
OWN_FRAME = re.compile(r"^\S*(?:emulated_kernel|kprobefs|contextlib)\S*\.py:\d+: ", re.MULTILINE)
"""Pattern for the end of a frame of kprobefs's code, or of contextlib's, in pytest's report."""


def test_the_report_of_a_refusal_ends_with_the_users_line(tmp_path: Path) -> None:
    """The report of a refused call ends with a line of the user's test.

    The report names symbols that exist, as `kprobefs check` does.
    """
    (tmp_path / "test_it.py").write_text(FAILING)
    shown = run_pytest(tmp_path).stdout
    assert not OWN_FRAME.search(shown), shown
    assert shown.count("KernelError: [Errno 2] Invalid probed address or symbol") >= 2
    assert shown.count('for "p:x vfs_raed", at "vfs_raed"; similar names: vfs_read') == 2
    assert 'kernel.kallsyms_lookup_name("nosuch")\nE ' in shown
    assert OWN_FRAME.search(run_pytest(tmp_path, "--full-trace").stdout)


@needs_fuse
@pytest.mark.mounted
def test_the_report_of_a_refused_mount_ends_with_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MOUNTING)
    shown = run_pytest(tmp_path).stdout
    assert not OWN_FRAME.search(shown), shown
    assert "E       RuntimeError: kprobefs: /nosuch.deb: No such file" in shown
    assert 'for "p:x vfs_raed", at "vfs_raed"; similar names: vfs_read' in shown


def test_the_report_of_a_fault_has_its_frames(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAULT)
    assert OWN_FRAME.search(run_pytest(tmp_path).stdout)


KERNELS = """\
import pytest

@pytest.mark.kernels("6.1", "6", "4.99", "riscv64:6.12", "arm64:6.12")
def test_on_each(request, kprobefs_image):
    assert kprobefs_image is not None and "6.1" in kprobefs_image.name
    assert kprobefs_image.stem.endswith("riscv64") == ("riscv64:" in request.node.name)
"""


def test_kernels_that_are_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest package of a version in $KPROBEFS_KERNELS is taken.

    If there is none, the test is skipped with the reason.
    """
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    monkeypatch.setenv("KPROBEFS_KERNELS", str(kernels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("6.1.0-9-amd64_6.1.2-1", "6.1.0-10-amd64_6.1.3-1", "6.12.0-1-amd64_6.12.1-1"):
        with (kernels / f"linux-image-{name}_amd64.deb").open("wb") as file:
            file.truncate(2 << 20)
    riscv = kernels / "linux-image-6.12.0-1-riscv64_6.12.1-1_riscv64.deb"
    with riscv.open("wb") as file:
        file.truncate(2 << 20)
    # This package contains no kernel.
    (kernels / "linux-image-6.99.0-1-amd64_6.99.1-1_amd64.deb").write_bytes(b"")
    assert find("6.1") == kernels / "linux-image-6.1.0-10-amd64_6.1.3-1_amd64.deb"
    assert find("6") == kernels / "linux-image-6.12.0-1-amd64_6.12.1-1_amd64.deb"
    assert find("6.12", "riscv64") == riscv
    (tmp_path / "test_it.py").write_text(KERNELS)
    result = run_pytest(tmp_path, "-v", "-rs")
    assert re.findall(r"::(\S+) (PASSED|SKIPPED)", result.stdout) == [
        ("test_on_each[6.1]", "PASSED"),
        ("test_on_each[6]", "PASSED"),
        ("test_on_each[4.99]", "SKIPPED"),
        ("test_on_each[riscv64:6.12]", "PASSED"),
        ("test_on_each[arm64:6.12]", "SKIPPED"),
    ]
    assert "4.99: no such kernel; run kprobefs images fetch" in result.stdout


def test_images_lists_kernels_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kprobefs images` lists kernels that were not booted with their architecture and size, and with neither
    age nor boot time.
    """
    kernel = tmp_path / "linux-image-6.12.0-1-riscv64_6.12.1-1_riscv64.deb"
    with kernel.open("wb") as file:
        file.truncate(3 << 20)
    monkeypatch.setenv("KPROBEFS_KERNELS", str(kernel))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["images"]) == ExitStatus.OK
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["RELEASE", "ARCH", "KEPT", "SIZE", "AGE", "BOOT", "FILE"]
    assert ["6.12.0-1-riscv64", "riscv64", "-", "3", "MiB", "-", "-", str(kernel)] in lines


def test_each_flavour_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "--help"]) == ExitStatus.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert all(flavour in shown for flavour in FLAVOURS)


@needs_fuse
@pytest.mark.mounted
def test_a_mount_takes_a_kernel_a_clock_and_a_profile(kprobefs_mount: Callable[..., Path]) -> None:
    image = package("linux-image-cloud-amd64")
    for kprobes, clock in (("kernel", "real"), ("kprobefs", "virtual")):
        mounted = kprobefs_mount(image=image, kprobes=kprobes, clock=clock)
        assert "Linux version 6." in (mounted / "machine" / "version").read_text()
    mounted = kprobefs_mount(profile="kprobes-2010", return_hook="objpool", clock="real")
    assert "[objpool]" in (mounted / "kprobes" / "return_hook").read_text()


IN_A_RUN = """\
import os
import pytest

def test_mount(kprobefs_mount):
    with open(kprobefs_mount() / "machine" / "version") as own, \\
            open(os.environ["KPROBEFS"] + "/machine/version") as of_run:
        assert own.read() == of_run.read()

def test_chosen(kprobefs_mount):
    version = kprobefs_mount(profile="linux-6.1") / "machine" / "version"
    assert "6.1.0-kprobefs" in version.read_text()

@pytest.mark.architectures("i386")
def test_marked(kprobefs_mount):
    assert "6.1.0-kprobefs" in (kprobefs_mount() / "machine" / "version").read_text()

def test_in_process(kernel):
    assert kernel.config.profile == "linux-6.12"
"""
WAY = """\
import json
import subprocess
import sys
import pytest

@pytest.fixture
def way(kprobefs_mount):
    def of(**options):
        mounted = kprobefs_mount(**options)
        words = sys.executable, "-m", "kprobefs", "status", "--json", mounted
        (found,) = json.loads(subprocess.check_output(words))
        return not (mounted / "kprobes" / "stats").exists(), found["daemon"]["clock"] == "model"
    return of

def test_plain(way):
    assert way() == (True, True)

@pytest.mark.kernels("6")
def test_another_kernel(way):
    assert way() == (True, True)

@pytest.mark.kernels("6")
def test_another_way(way):
    assert way(kprobes="kprobefs", clock="virtual") == (False, False)

def test_of_kprobefs(way):
    assert way(arch="x86_64") == (False, True)
"""


@needs_fuse
@pytest.mark.mounted
def test_fixtures_have_the_kernel_of_the_run(tmp_path: Path) -> None:
    """Under `kprobefs run`, the fixtures have the kernel of the run.

    Otherwise each row of a matrix would test kprobefs's own kernel.
    """
    (tmp_path / "test_it.py").write_text(IN_A_RUN)
    kernel = "linux-image-cloud-amd64", "trixie"
    image = debian_kernel.image(*kernel)
    for options, passed in ((("--image", str(image)), 3), (("--profile", "linux-6.12"), 4)):
        with debian_kernel.own_cache(*kernel):
            result = run_pytest(tmp_path, run=("run", *options, "--"))
        assert f"{passed} passed" in result.stdout, result.stdout
        assert ("the fixture `kernel` has no distribution's kernel" in result.stdout) == (passed == 3)


@needs_fuse
@pytest.mark.mounted
def test_marked_tests_have_the_clock_and_the_way_of_probing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `kprobefs run`, marked tests have the clock and the kprobes of the run.

    Otherwise tests with --kprobes kernel would pass without the kernel's kprobes.
    """
    (tmp_path / "test_it.py").write_text(WAY)
    image = debian_kernel.image()
    monkeypatch.setenv("KPROBEFS_KERNELS", str(image))
    run = "run", "--image", str(image), "--kprobes", "kernel"
    result = run_pytest(tmp_path, run=(*run, "--clock", "model", "--"))
    assert "4 passed" in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bookworm", "not a kernel's name; use debian:SUITE[/FLAVOUR]"),
        ("debian:bookworm/big", "no such flavour; use amd64, cloud, rt"),
    ],
)
def test_a_kernel_that_cannot_be_fetched(
    name: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of the names is wrong, `images fetch` reports it and fetches no kernel."""
    monkeypatch.setattr("kprobefs.common.kernel_packages.fetch", pytest.fail)
    assert main(["images", "fetch", "debian:bookworm/cloud", name]) == ExitStatus.USAGE
    assert capsys.readouterr().err.startswith(f"kprobefs: {name}: {why}")


@needs_fuse
@pytest.mark.mounted
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the example pass and leave no mount."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = run_pytest(EXAMPLES, "-vv")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(" PASSED ") == len(ARCHITECTURES) + 2, result.stdout
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_package_of_keys_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    """On a host other than Debian, apt does not trust Debian's archive. The error says what to install."""
    apt, keys = tmp_path / "apt-get", tmp_path / "keys"
    apt.write_text("#!/bin/sh\necho \"E: The repository 'debian' is not signed.\" >&2\nexit 100\n")
    apt.chmod(0o755)
    if has_keys:
        keys.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_packages, "KEYS", keys)
    monkeypatch.setattr(kernel_packages, "_archive", lambda _name: "file:/debian")
    with pytest.raises(CliError, match="is not signed") as caught:
        kernel_packages.fetch("debian:bookworm/cloud")
    assert ("Install debian-archive-keyring" in str(caught.value)) is not has_keys


def test_a_full_disk_for_fetched_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the error names the directory of fetched kernels, although an error of write(2)
    names no file.
    """

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_packages, "_Apt", full)
    monkeypatch.setattr(shutil, "which", str)
    with pytest.raises(CliError, match=f"^{tmp_path}/.*: No space left on device; .* XDG_CACHE_HOME"):
        kernel_packages.fetch("debian:bookworm/cloud")
