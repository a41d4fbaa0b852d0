"""Host memory that the daemon of a distribution's kernel uses after requests, events, probes and tracers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.guests.linux import debian_kernel, test_arm64

pytestmark = [needs_fuse, pytest.mark.mounted]

LIMIT = 102 << 10
"""Maximum anonymous memory of the daemon, in KiB. Pages of files (libraries, the snapshot that mounts share)
are not counted: how many of them are resident depends on the host."""
TRACERS = ("function", "function_graph")
PROBES = 100


def steps(directory: Path) -> Iterator[str]:
    """Use a mount in several steps, and yield the name of each step after its end."""
    tracing, place = directory / "tracing", directory / "scratch/file"

    def work() -> None:
        for _ in range(30):
            place.write_text("hello\n")
            assert place.read_text() == "hello\n"

    work()
    yield "files"
    for group in ("sched", "syscalls"):
        (tracing / f"events/{group}/enable").write_text("1")
    work()
    assert (tracing / "trace").read_text().count("sys_read(") >= 30
    yield "events"
    (tracing / "events/enable").write_text("0")
    functions = [line.split()[0] for line in (tracing / "available_filter_functions").open()]
    with (directory / "kprobe_events").open("wb", buffering=0) as definitions:
        for number, function in enumerate([*functions[:: len(functions) // PROBES], "vfs_read"]):
            # Some of the functions are on the blacklist.
            with suppress(OSError):
                definitions.write(f"p:k{number} {function} $arg1\n".encode())
    yield "definitions"
    (tracing / "events/kprobes/enable").write_text("1")
    work()
    assert len((directory / "kprobes/list").read_text().splitlines()) > PROBES * 0.9
    yield "probes"
    assert " k" in (tracing / "trace").read_text()
    assert len((directory / "machine/kallsyms").read_text().splitlines()) > 50_000
    yield "texts"
    for tracer in TRACERS:
        (tracing / "current_tracer").write_text(tracer)
        work()
        assert "vfs_read" in (tracing / "trace").read_text()
        yield tracer
        (tracing / "current_tracer").write_text("nop")
        yield f"no {tracer}"


def anonymous(pid: int) -> int:
    """Return the resident anonymous memory of process `pid`, in KiB."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("meta", "suite"),
    [(debian_kernel.META, debian_kernel.SUITE), (test_arm64.META, test_arm64.SUITE)],
    ids=["default", "arm64"],
)
def test_typical_use(meta: str, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))
    directory = tmp_path / "mnt"
    directory.mkdir()
    # `env` starts the program: in a fork of this process, the memory of booted kernels would be counted.
    program = ["env", *REAL_PROGRAM]
    image = str(debian_kernel.image(meta, suite))
    with (
        debian_kernel.own_cache(meta, suite),
        daemon(directory, "--image", image, program=program) as mounted,
    ):
        taken = {step: anonymous(mounted.process.pid) for step in steps(directory)}
    assert {step: size for step, size in taken.items() if size >= LIMIT} == {}
