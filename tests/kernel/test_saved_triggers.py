"""Triggers, filters and definitions in the form in which the kernel shows them, saved and applied again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.saver import saved_in_steps
from kprobefs.definitions.syntax import SETTING, Line, saved_triggers
from kprobefs.definitions.tracefs_files import TreeFiles
from tests.oracle.recorded import oracle_directory
from tests.sample import share

EVENTS = (
    "p:a vfs_read c=$arg3 d=$arg3:x32 fn=+0($arg1):string at=%ip:symbol",
    "r:b vfs_read ret=$retval:s64",
    "p:my_g/cc vfs_write c=$arg3",
    "s:lat u64 ns; u64 size",
)
TRIGGERS = (
    *(f"hist:keys=c.{each}:sort=c" for each in ("log2", "hex", "buckets=10")),
    *(f"hist:keys=at.{each}:sort=at.descending" for each in ("sym", "sym-offset")),
    "hist:keys=common_pid.execname:sort=common_pid",
    "hist:keys=common_pid:vals=c.hex,d:sort=c,d.descending",
    "hist:keys=common_pid:val=c.percent,hitcount:sort=c.ascending",
    "hist:keys=common_pid:values=c.graph:sort=c",
    "hist:key=c.log2,c:sort=c:size=200",
    "hist:keys=common_cpu:sort=common_cpu",
    "hist:keys=common_timestamp.usecs:sort=common_timestamp",
    "hist:keys=common_pid:t=common_timestamp.usecs,n=common_pid.execname:clock=mono",
    "hist:keys=common_pid:vals=c-d-c,-(c):sort=c-d-c:x=c.hex+1,y=-(c+d)",
    "hist:keys=c/2,d-1:sort=d-1",
    "hist:keys=stacktrace",
    "hist:keys=fn,common_pid.execname:vals=c.hex:sort=common_pid,fn",
    "hist:name=foo:keys=c.log2:sort=c:pause",
    'hist:keys=c:pause if fn == "a if b" && c > 2',
    "hist:keys=c if fn != ' [paused]' || fn == ':sort=c.hex'",
    "hist:keys=common_pid:x=c:onmax($x).save(at,common_pid)",
    "hist:keys=common_pid:x=c:onchange($x).snapshot()",
    "hist:keys=common_pid:x=c:onmax($x).trace(lat,$x,at)",
    "traceoff",
    "traceoff:0",
    "traceon:1 if fn == ':unlimited'",
    "stacktrace:5 if c > 1",
    "snapshot:2",
    "enable_event:my_g:cc:7 if c>1 || d<3",
    "disable_event:kprobes:b",
)
ON_RETURN = (
    "hist:keys=common_pid:d=common_timestamp-$t:onmatch(kprobes.a).lat($d,ret)",
    "hist:keys=common_pid:d=ret+kprobes.a.$t:vals=kprobes.a.$t",
    "hist:keys=common_pid:vals=$u.hex:sort=u",
    "hist:keys=common_pid:vals=$u:sort=u.descending",
    "hist:keys=ret.log2:sort=ret:pause if ret > 0",
    "disable_hist:kprobes:a:2 if ret<0",
)
"""Triggers of the event `b`. The event `a` has the variables `t` and `u`, and the event `cc` has `t`."""
PROFILES = ("linux-5.10", "linux-6.1", "linux-6.12", "linux-7.2")
A_TRIGGER = "events/kprobes/a/trigger"
B_TRIGGER = "events/kprobes/b/trigger"


def files_of(kernel: Kernel) -> TreeFiles:
    # A tree of its own for each call would be thousands of objects of garbage.
    return TreeFiles(kernel._control_files, Client(pid=0, uid=0, gid=0))


def saved(kernel: Kernel) -> list[str]:
    with kernel.lock:
        lines = saved_in_steps(files_of(kernel), lambda: kernel.kretprobes.default_maxactive)
        return [line for line in lines if line.strip()]


def apply(kernel: Kernel, *lines: str) -> list[str]:
    with kernel.lock:
        numbered = [Line("f", number, line) for number, line in enumerate(lines, 1)]
        return Loader(files_of(kernel)).apply(numbered)


def remove(kernel: Kernel, lines: list[str]) -> None:
    """Remove the triggers that `lines` set, the last first, by their saved form."""
    for line in reversed(lines):
        setting = SETTING.match(line)
        assert setting is not None
        kernel.write_file(f"tracing/{setting['file']}", f"!{setting['value']}")


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, Kernel]]:
    """Yield profile -> kernel with the events EVENTS."""
    with ExitStack() as stack:
        booted = {name: stack.enter_context(Kernel(profile=profile_named(name))) for name in PROFILES}
        for kernel in booted.values():
            for definition in EVENTS:
                kernel.write_file("tracing/dynamic_events", definition)
        yield booted


@pytest.fixture(params=PROFILES)
def kernel(request: pytest.FixtureRequest, kernels: dict[str, Kernel]) -> Kernel:
    return kernels[request.param]


CASES = (
    *((A_TRIGGER, each, ()) for each in TRIGGERS),
    *(
        (
            B_TRIGGER,
            each,
            (
                (A_TRIGGER, "hist:keys=common_pid:t=common_timestamp,u=c"),
                ("events/my_g/cc/trigger", "hist:keys=common_pid:t=c"),
            ),
        )
        for each in ON_RETURN
    ),
)
"""(file, trigger, other files with their triggers).

In a short run, two of the four versions test a case; one of the two is older than 6.12.
"""


@pytest.mark.parametrize(
    ("kernel", "file", "trigger", "first"),
    [(profile, *case) for number, profile in enumerate(PROFILES) for case in share(CASES, number, 2)],
    indirect=["kernel"],
)
def test_triggers_are_saved_as_the_kernel_accepts_them(
    kernel: Kernel, file: str, trigger: str, first: tuple[tuple[str, str], ...]
) -> None:
    for name, text in first:
        kernel.write_file(f"tracing/{name}", text)
    try:
        kernel.write_file(f"tracing/{file}", trigger)
    except KernelError:
        remove(kernel, [line for line in saved(kernel) if "/trigger = " in line])
        # Linux 7.2 has all of them but a modifier of a variable.
        assert kernel.kprobes.profile.name != "linux-7.2" or "$u.hex" in trigger
        pytest.skip("this version has no such trigger")
    shown = kernel.read_file(f"tracing/{file}")
    everything = saved(kernel)
    lines = [line for line in everything if "/trigger = " in line]
    assert apply(kernel, *everything) == []
    assert kernel.read_file(f"tracing/{file}") == shown
    remove(kernel, lines)
    assert saved_triggers(kernel.read_file(f"tracing/{file}")) == []
    assert apply(kernel, *everything) == []
    assert kernel.read_file(f"tracing/{file}") == shown
    assert saved(kernel) == everything
    remove(kernel, lines)


@pytest.mark.parametrize(
    "trigger",
    [
        "hist:key=c.log2:sort=c",
        "hist:keys=common_pid:vals=c.hex,d:sort=c.descending,d.ascending",
        "hist:keys=c:val=hitcount,d:size=200",
        "hist:keys=c:values=d:pause if c > 3",
        "traceoff:3 if c > 3",
    ],
)
def test_a_trigger_that_exists_is_not_written_again(kernel: Kernel, trigger: str) -> None:
    line = f"{A_TRIGGER} = {trigger}"
    assert apply(kernel, line) == []
    shown = kernel.read_file(f"tracing/{A_TRIGGER}")
    assert apply(kernel, line) == []
    assert kernel.read_file(f"tracing/{A_TRIGGER}") == shown
    remove(kernel, [line for line in saved(kernel) if "/trigger = " in line])


RECORDINGS = oracle_directory() / "errors-6.1.jsonl"
DEFINING = "tracing/kprobe_events", "tracing/dynamic_events", "tracing/uprobe_events"
ENDINGS = (*DEFINING, "/trigger", "/a/filter")


@pytest.mark.skipif(not RECORDINGS.exists(), reason=f"no recorded answers in {RECORDINGS.parent}")
def test_what_linux_was_recorded_to_accept_is_saved_in_an_accepted_form() -> None:
    """After each recorded write that succeeded, the saved lines restore the files in an empty kernel."""
    compared = 0
    with Kernel(profile=profile_named("linux-6.1")) as kernel:
        for text in RECORDINGS.read_text().splitlines():
            record = json.loads(text)
            steps = [each for each in record["setup"] if isinstance(each, str)]
            if record["errno"] or not record["file"].endswith(ENDINGS) or steps != record["setup"]:
                continue
            try:
                for step in steps:
                    kernel.write_file("tracing/kprobe_events", step)
                kernel.write_file(record["file"], record["bytes"])
            except KernelError:
                # The recorded kernel has functions that ours lacks.
                continue
            names = ["tracing/dynamic_events"]
            if record["file"] not in DEFINING:
                names.append(record["file"])
            before = [kernel.read_file(name) for name in names]
            lines = saved(kernel)
            if any("/trigger = " in line for line in lines):
                # A trigger by the field `cpu` is shown with common_cpu, and Linux removes it only by `cpu`.
                kernel.write_file(record["file"], f"!{record['bytes']}")
            with kernel.lock:
                kernel.tracing.dynamic_events.clear()
            assert apply(kernel, *lines) == [], record
            assert [kernel.read_file(name) for name in names] == before
            remove(kernel, [line for line in lines if "/trigger = " in line])
            with kernel.lock:
                kernel.tracing.dynamic_events.clear()
            compared += 1
    assert compared > 200
