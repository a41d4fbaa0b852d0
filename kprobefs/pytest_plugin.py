"""The pytest plugin: provides kernels and mounts for tests of tracing tools, without root or KVM.

Fixtures: `tracefs`, `kernel`, `kprobefs_mount`, `kprobefs_arch` and `kprobefs_image`; the markers
`architectures` and `kernels`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emulated_kernel import Kernel

MARKER = "architectures"
KERNELS_MARKER = "kernels"
KERNELS_ARCH = "x86_64"
"""Architecture of a kernel that the marker `kernels` selects, unless its version is as in "arm64:6.12"."""
KERNELS_ARCHES = {"x86_64": "cloud", "arm64": "arm64", "riscv64": "riscv64"}
"""Architecture that a version in the marker `kernels` may name -> flavour of Debian's kernel to fetch."""
OLDEST = {"arm64": (6, 5)}
"""Architecture -> oldest version of Linux whose kernels kprobefs can run; others have no limit."""
_OWN_MODULES = ("emulated_kernel.", "kprobefs.", "contextlib")
"""Beginnings of the names of modules whose frames are hidden from the report of a refusal."""
END_TIMEOUT = 20.0
"""Maximum seconds that a mount may take to end."""
# `run` ends when its command ends, and the command when its standard input does: nothing outlives pytest.
_STAY = ("sh", "-c", 'printf "%s\\n" "$KPROBEFS"; exec cat > /dev/null')
_mounted_now: list[str] = []
"""Directories of the mounts of the running test."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers `architectures` and `kernels`."""
    config.addinivalue_line(
        "markers",
        f"{KERNELS_MARKER}(*versions): run the test on each of these kernels, such as 6.1, that is at hand",
    )
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*names): run the test once on each architecture (default: on all)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test run once for each architecture or kernel that its marker names."""
    kernels = metafunc.definition.get_closest_marker(KERNELS_MARKER)
    if kernels is not None:
        if why := _wrong_versions(metafunc, kernels.args):
            pytest.fail(f"{metafunc.definition.nodeid}: {KERNELS_MARKER}: {why}", pytrace=False)
        metafunc.parametrize("kprobefs_image", kernels.args, indirect=True)
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is None:
        return
    from emulated_kernel import ARCHITECTURES

    names = marker.args or tuple(ARCHITECTURES)
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown or "kprobefs_arch" not in metafunc.fixturenames:
        known = f"there are {', '.join(ARCHITECTURES)}"
        why = f"no architecture: {unknown}; {known}" if unknown else "the test uses no fixture of kprobefs"
        pytest.fail(f"{metafunc.definition.nodeid}: {MARKER}: {why}", pytrace=False)
    metafunc.parametrize("kprobefs_arch", names, indirect=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """If a test or fixture fails, add hints to the report: the last requests that its kernels have refused.

    A request is, for example, a write to a file of tracefs. The traceback of a refused request ends with the
    user's line: it has no frames of kprobefs.
    """
    error = None if call.excinfo is None else call.excinfo.value
    with _own_frames_hidden(error):
        outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if call.when == "teardown" or not report.failed:
        return
    hints = [hint for directory in _mounted_now for hint in _refusals(directory)]
    hints += _refusals_in_process(getattr(item, "funcargs", {}).get("kernel"), error)
    if hints:
        report.sections.append(("kprobefs", "\n".join(hints)))


@contextmanager
def _own_frames_hidden(error: BaseException | None) -> Iterator[None]:
    """Hide the frames of kprobefs from the report of a refusal, during the `with` block.

    The report keeps these frames if the error may be a fault of kprobefs, or with --full-trace.
    """
    hidden: list[dict[str, object]] = []
    seen: list[BaseException] = []
    while error is not None and error not in seen and (seen or _is_refusal(error)):
        seen.append(error)
        for frame, _ in walk_tb(error.__traceback__):
            names = frame.f_globals
            if str(names.get("__name__")).startswith(_OWN_MODULES):
                names["__tracebackhide__"] = True
                hidden.append(names)
        error = error.__cause__ or error.__context__
    try:
        yield
    finally:
        for names in hidden:
            names.pop("__tracebackhide__", None)


def _is_refusal(error: BaseException) -> bool:
    """Return True if `error` is a KernelError, or is raised in this module itself, as for a failed mount."""
    # If the error is a KernelError, its module is loaded, so no import is needed.
    errors = sys.modules.get("emulated_kernel.util.errors")
    if errors is not None and isinstance(error, errors.KernelError):
        return True
    *_, (frame, _) = (None, 0), *walk_tb(error.__traceback__)
    return frame is not None and frame.f_globals is globals()


def _refusals_in_process(kernel: Kernel | None, error: BaseException | None) -> Iterator[str]:
    """Yield the hint about the definition that the fixture `kernel` has refused with `error`, if any.

    `kernel`: None if the test does not use the fixture. `error`: None if no exception has ended the test.
    """
    if kernel is None or error is None or not _is_refusal(error):
        return
    from emulated_kernel.util.errors import KernelError
    from kprobefs.cli.refusal_hint import last_logged, logged_refusal
    from kprobefs.common.errors import escape_for_terminal

    # The test may have closed the kernel.
    with suppress(KernelError):
        entry = last_logged(kernel.read_file("/tracing/error_log"))
        if entry is not None and entry[1].endswith(str(getattr(error, "strerror", None))):
            options = ("--arch", kernel.config.arch)
            hint = logged_refusal(entry, lambda: kernel.read_file("/machine/kallsyms"), options)
            yield escape_for_terminal(hint)


def _refusals(directory: str) -> Iterator[str]:
    """Yield the hints of `kprobefs run` about the last requests that a mount has refused, if any.

    They are about the last file that could not be created, and the last write that failed. `directory`: that
    of the mount. If the mount has lost its kernel, the only hint says so.
    """
    from contextlib import closing

    from kprobefs.cli.ended_hint import ended_hint
    from kprobefs.cli.nothing_hint import History
    from kprobefs.cli.refusal_hint import refusals
    from kprobefs.common.errors import CliError, escape_for_terminal
    from kprobefs.definitions.tracefs_files import control_root

    if ended := ended_hint(directory):
        yield escape_for_terminal(ended)
        return
    # The mount may end meanwhile.
    with suppress(OSError, CliError), closing(History(control_root(directory))) as history:
        yield from map(escape_for_terminal, refusals(directory, history.read()))


def _wrong_versions(metafunc: pytest.Metafunc, versions: tuple[object, ...]) -> str:
    """Return the reason why the versions in the marker `kernels` do not fit the test; "" if they do."""
    if not versions:
        return "no version given"
    for version in versions:
        # The number 6.10 is 6.1.
        if not isinstance(version, str):
            return f'{version!r} is not a string; write a version as "6.1"'
        arch = version.rpartition(":")[0] or KERNELS_ARCH
        if arch not in KERNELS_ARCHES:
            return f"{version!r}: no architecture of a distribution's kernel; use {', '.join(KERNELS_ARCHES)}"
        oldest = OLDEST.get(arch, ())
        number = tuple(map(int, re.findall(r"\d+", version.rpartition(":")[2])))
        # The version 6 stands for each 6.N.
        if number < oldest[: len(number)]:
            return f"{version!r}: kprobefs runs kernels for {arch} from Linux {'.'.join(map(str, oldest))} on"
    if "kprobefs_image" not in metafunc.fixturenames:
        return "the test uses no mount of kprobefs"
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is not None and set(marker.args) != {KERNELS_ARCH}:
        return (
            f"a distribution's kernel has its own architecture; leave the marker {MARKER} out, "
            'or name kernels of others as in "riscv64:6.12"'
        )
    return ""


@pytest.fixture
def kprobefs_arch(request: pytest.FixtureRequest) -> str:
    """Return the architecture that the marker `architectures` chose for this run; default: x86_64."""
    from emulated_kernel import ARCHITECTURES

    return str(getattr(request, "param", next(iter(ARCHITECTURES))))


@pytest.fixture
def kprobefs_image(request: pytest.FixtureRequest) -> Path | None:
    """Return the file of the kernel that the marker `kernels` chose for this run.

    Without the marker, return None, which stands for kprobefs's own kernel.

    Skip the test if the host does not have that kernel.
    """
    wanted = getattr(request, "param", None)
    if wanted is None:
        return None
    from kprobefs.common.errors import CliError
    from kprobefs.common.kernel_packages import KERNELS, find

    arch, _, version = str(wanted).rpartition(":")
    try:
        found = find(version, arch or KERNELS_ARCH)
    except CliError as error:
        pytest.fail(f"{wanted}: {error}", pytrace=False)
    if found is None:
        flavour = KERNELS_ARCHES[arch or KERNELS_ARCH]
        fetch = f"kprobefs images fetch debian:SUITE/{flavour}"
        pytest.skip(f"{wanted}: no such kernel; run {fetch}, or name its file in ${KERNELS}")
    return found


def _is_marked(request: pytest.FixtureRequest) -> bool:
    """Return True if a marker chooses the test's kernel."""
    return any(map(request.node.get_closest_marker, (MARKER, KERNELS_MARKER)))


def _options_of_run() -> dict[str, str]:
    """Return the options of the mount in which `kprobefs run` or `kprobefs matrix` runs pytest, or {}.

    The result maps the name of an option without `--` to its value. The options select the kernel, the
    kprobes and the clock. {}: neither command runs pytest.
    """
    if "KPROBEFS" not in os.environ:
        return {}
    words = shlex.split(os.environ.get("KPROBEFS_OPTIONS", ""))
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.fixture
def kernel(kprobefs_arch: str, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Boot an emulated kernel in this process, for the Python API; FUSE is not needed.

    In a command of `kprobefs run` or `kprobefs matrix`, the kernel has the architecture, profile and strategy
    of that command's kernel, unless a marker chooses the kernel. If that command's kernel is a
    distribution's, the test fails.
    """
    from emulated_kernel import Kernel, MachineConfig
    from emulated_kernel.util.fast_dataclass import replace

    chosen = {} if _is_marked(request) else _options_of_run()
    if image := chosen.get("image") or chosen.get("vmcore"):
        why = "the fixture `kernel` has no distribution's kernel; use `tracefs` or `kprobefs_mount`"
        pytest.fail(f"{image}: {why}", pytrace=False)
    config = MachineConfig(arch=chosen.get("arch", kprobefs_arch))
    if "profile" in chosen:
        config = replace(config, profile=chosen["profile"])
    config = replace(config, strategy=chosen.get("strategy"))
    with Kernel(config) as booted:
        yield booted


@pytest.fixture
def kprobefs_mount(
    kprobefs_arch: str, kprobefs_image: Path | None, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a kernel until the test ends, and returns the mount's directory.

    The keyword arguments are options of `kprobefs mount`, with these defaults: `arch` (the marker's, or
    x86_64), `image` (a distribution's kernel; default: the marker's, or kprobefs's own), `kprobes`
    ("kprobefs" or "kernel"), `cpus` (1), `seed` (1), `clock` ("virtual"), `profile`, `cpu` (that of the
    machine with a distribution's kernel), `return_hook`, and `layout` ("full": kprobes/, tracing/, machine/,
    scratch/; "tracefs": tracefs itself). For an argument that is None, the default of `kprobefs mount` is
    used.

    In a command of `kprobefs run` or `kprobefs matrix`, the mount has the kernel of that command, unless a
    marker, `arch`, `image` or `profile` chooses another one. The mount always has the clock of that command.
    A mount with a distribution's kernel also has the command's value of --kprobes.
    """
    with ExitStack() as stack:

        def mount(
            *,
            arch: str | None = None,
            image: Path | str | None = kprobefs_image,
            kprobes: str | None = None,
            cpus: int = 1,
            seed: int = 1,
            clock: str | None = None,
            profile: str | None = None,
            cpu: str | None = None,
            return_hook: str | None = None,
            layout: str = "full",
        ) -> Path:
            options: dict[str, object] = {**_options_of_run()}
            if _is_marked(request) or any(each is not None for each in (arch, image, profile)):
                kept = ("clock",) if image is None else ("clock", "kprobes")
                options = {name: value for name, value in options.items() if name in kept}
            if not options.keys() & {"arch", "image", "vmcore"}:
                options["arch"] = arch or kprobefs_arch
            given = {
                "image": image,
                "kprobes": kprobes,
                "cpus": cpus,
                "seed": seed,
                "clock": clock,
                "profile": profile,
                "cpu": cpu,
                "return-hook": return_hook,
                "layout": layout,
            }
            options |= {name: value for name, value in given.items() if value is not None}
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            return stack.enter_context(_mounted(words))

        yield mount


@pytest.fixture
def tracefs(kprobefs_mount: Callable[..., Path]) -> Path:
    """Mount a kernel, and return the path of its tracefs.

    Files in `../scratch` are files of the emulated kernel.
    """
    return kprobefs_mount() / "tracing"


@contextmanager
def _mounted(options: list[str]) -> Iterator[Path]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no access to /dev/fuse: give the container --device /dev/fuse")
    process = subprocess.Popen(
        [sys.executable, "-m", "kprobefs", "run", *options, "--", *_STAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    directory = ""
    try:
        directory = process.stdout.readline().rstrip("\n")
        if not directory:
            # communicate() also closes the standard input.
            raise RuntimeError(process.communicate()[1].strip())
        _mounted_now.append(directory)
        yield Path(directory)
    finally:
        if directory in _mounted_now:
            _mounted_now.remove(directory)
        process.stdin.close()
        process.wait(END_TIMEOUT)
        # If the mount has failed, the error was read already.
        if process.stderr is not None and not process.stderr.closed and (hint := process.stderr.read()):
            warnings.warn(
                hint.strip().replace("--clock model or real", 'clock="model" or "real"'), stacklevel=1
            )
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
