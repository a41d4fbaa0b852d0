"""The life of kprobe events: definition, probes of one event, enabling, hits and removal."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from emulated_kernel.trace.events.registry import FIRST_EVENT_ID
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.trace.probes.trace_probe import TraceProbe
from emulated_kernel.util.errors import KernelError
from tests.trace.events.kernel import (
    FUNCTIONS,
    FakeRecorder,
    Function,
    Hit,
    Kernel,
    errno_of,
    hit_all,
    make_kernel,
)
from tests.trace.events.plain_event import PlainEvent


@pytest.fixture
def kernel() -> Kernel:
    return make_kernel()


def _write(kernel: Kernel, text: str) -> str:
    return errno_of(lambda: kernel.events.write(text.encode()))


def _event(kernel: Kernel, name: str = "a") -> KprobeTraceEvent:
    event = kernel.events.find("kprobes", name)
    assert event is not None
    return event


def test_ids_run_on(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\np:b vfs_read\n-:a\n")
    assert _write(kernel, "p:c get_kprobe") == "EINVAL"
    kernel.events.write(b"p:a vfs_read\n")
    assert (_event(kernel, "b").id, _event(kernel).id) == (FIRST_EVENT_ID + 1, FIRST_EVENT_ID + 3)
    assert kernel.events.registry.by_id(FIRST_EVENT_ID + 3) is _event(kernel)
    assert kernel.events.registry.by_id(FIRST_EVENT_ID) is None


def test_a_removal_looks_at_those_of_its_name(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of an event compares only the probes of events with this name.

    Comparing all probes would be slow: scripts remove thousands of events by single commands.
    """
    asked: list[str] = []
    matches = TraceProbe.matches

    def counted(probe: TraceProbe, *words: Any) -> bool:
        asked.append(probe.event.name)
        return matches(probe, *words)

    monkeypatch.setattr(TraceProbe, "matches", counted)
    kernel.events.write(b"".join(b"p:e%d vfs_read\n" % number for number in range(50)))
    kernel.events.write(b"p:other/e7 vfs_read\n")
    kernel.events.write(b"".join(b"-:e%d\n" % number for number in range(50)))
    assert len(asked) == 51
    assert list(kernel.events.records()) == []
    assert _write(kernel, "-:e7") == "ENOENT"


def test_hits_are_counted_by_probe(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\np:a vfs_write\nr:b vfs_read\n")
    _event(kernel).enable(kernel.recorder)
    hit_all(kernel, Hit())
    hit_all(kernel, Hit())
    assert [probe.hits for probe in kernel.events.probes()] == [2, 2, 0]
    kernel.backend.handles[2].kprobe.nmissed = 7
    assert "".join(kernel.events.profile_records()).splitlines()[2].split() == ["b", "0", "7"]


def test_recorders_are_independent(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\n")
    event, instance = _event(kernel), FakeRecorder()
    event.enable(kernel.recorder)
    event.enable(instance)
    hit_all(kernel, Hit())
    event.disable(kernel.recorder)
    hit_all(kernel, Hit())
    assert (len(kernel.recorder.entries), len(instance.entries)) == (1, 2)
    assert event.is_enabled
    event.disable(instance)
    assert not kernel.backend.handles[0].enabled
    kernel.events.write(b"-:a\n")
    assert kernel.recorder.removed == instance.removed == [event]


def test_enabling_is_all_or_none(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\np:a vfs_write\n")
    kernel.backend.refuse_enabling.add(0xFFFFFFFF8134D3D0)
    assert errno_of(lambda: _event(kernel).enable(kernel.recorder)) == "EINVAL"
    assert not _event(kernel).is_enabled
    assert [handle.enabled for handle in kernel.backend.handles] == [False, False]


def test_appending_to_an_enabled_event_arms(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\n")
    _event(kernel).enable(kernel.recorder)
    kernel.events.write(b"p:a vfs_write\n")
    assert [handle.enabled for handle in kernel.backend.handles] == [True, True]


def test_removed_events_are_gone(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\n")
    event = _event(kernel)
    kernel.events.write(b"-:a\n")
    assert errno_of(lambda: event.enable(kernel.recorder)) == "ENODEV"
    assert errno_of(lambda: event.disable(kernel.recorder)) == "ENODEV"
    assert kernel.backend.handles == []


def test_busy_events_stay(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\np:b vfs_write\n")
    _event(kernel).enable(kernel.recorder)
    assert errno_of(kernel.events.clear) == "EBUSY"
    assert errno_of(kernel.dynamic_events.clear) == "EBUSY"
    assert _write(kernel, "-:a") == "EBUSY"
    assert len(kernel.events.probes()) == 2
    _event(kernel).disable(kernel.recorder)
    _event(kernel).references = 1
    assert _write(kernel, "-:a") == "EBUSY"
    _event(kernel).references = 0
    kernel.events.clear()
    assert "".join(kernel.events.records()) == ""


def test_one_of_several_probes_goes_while_enabled(kernel: Kernel) -> None:
    kernel.events.write(b"p:a vfs_read\np:a vfs_write\n")
    _event(kernel).enable(kernel.recorder)
    assert _write(kernel, "-:a vfs_read") == ""
    assert "".join(kernel.events.records()) == "p:kprobes/a vfs_write\n"
    assert _write(kernel, "-:a") == "EBUSY"


def test_a_busy_event_keeps_its_last_place(kernel: Kernel) -> None:
    """The removal of an enabled event fails with EBUSY, but removes all probes of the event except the last
    one, as in Linux.
    """
    kernel.events.write(b"p:a vfs_read\np:a vfs_write\np:a vfs_write+5\np:b vfs_read\n")
    _event(kernel).enable(kernel.recorder)
    assert _write(kernel, "-:a") == "EBUSY"
    assert "".join(kernel.events.records()) == "p:kprobes/a vfs_write+5\np:kprobes/b vfs_read\n"


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("-:a", "b g/a"),
        ("-:g/a", "a b"),
        ("-:g/", "a b"),
        ("-:kprobes/", "g/a"),
        ("-:b vfs_write+5 x=%di", "a g/a"),
        ("-:b vfs_write+5 x=%di y=%si", "a g/a"),
    ],
)
def test_removal_by_name_group_and_place(kernel: Kernel, command: str, left: str) -> None:
    kernel.events.write(b"p:a vfs_read\np:b vfs_write+5 x=%di y=%si\np:g/a vfs_read\n")
    expected = [f"kprobes/{each}" if "/" not in each else each for each in left.split()]
    if command == "-:a":
        expected = ["kprobes/b"]
    assert _write(kernel, command) == ""
    assert [line.split()[0][2:] for line in "".join(kernel.events.records()).splitlines()] == expected


def test_text_beyond_63_bytes_never_matches(kernel: Kernel) -> None:
    name = "s" * 64
    kernel = make_kernel([*FUNCTIONS, Function(name, 0xFFFFFFFF81900000)])
    kernel.events.write(f"p:a {name}\n".encode())
    assert _write(kernel, f"-:a {name}") == "ENOENT"
    assert _write(kernel, f"-:a {name[:63]}") == ""


def test_a_pending_probe_registers_with_its_module(kernel: Kernel) -> None:
    kernel.events.write(b"r:a late:init $retval\n")
    assert "".join(kernel.events.records()) == "r:kprobes/a late:init arg1=$retval\n"
    _event(kernel).enable(kernel.recorder)
    assert kernel.backend.handles == []
    kernel.symbols.functions.append(Function("init", 0xFFFFFFFFC0300000, module="late"))
    kernel.symbols.modules.add("late")
    kernel.events.module_coming("other")
    assert kernel.backend.handles == []
    kernel.events.module_coming("late")
    assert [handle.enabled for handle in kernel.backend.handles] == [True]
    assert "".join(kernel.events.records()) == "r10:kprobes/a late:init arg1=$retval\n"


def test_what_a_module_lacks_stays_pending(kernel: Kernel) -> None:
    kernel.events.write(b"p:a late:init\n")
    kernel.events.module_coming("late")
    assert kernel.messages[-1] == "trace_kprobe: Failed to re-register probe a on late: -2"
    assert kernel.events.probes()[0].nmissed == 0


def test_gone_probes_are_left_out_of_enabling(kernel: Kernel) -> None:
    kernel.events.write(b"p:a ktgt:ktgt_add\n")
    kernel.backend.handles[0].gone()
    _event(kernel).enable(kernel.recorder)
    assert not kernel.backend.handles[0].enabled


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EOPNOTSUPP, "Failed to register probe event"),
        (errno.EILSEQ, "Probe point is not an instruction boundary"),
        (errno.ENOENT, "Invalid probed address or symbol"),
        (errno.ENOMEM, ""),
    ],
)
def test_the_engines_errors_are_logged(code: int, text: str) -> None:
    kernel = make_kernel([Function("f", 0xFFFFFFFF81000100, refused=code)])
    assert _write(kernel, "p:a f") == KernelError(code).name
    log = "".join(kernel.events.error_log.records())
    assert text in log
    assert bool(log) == bool(text)
    assert list(kernel.events.registry) == []


def test_all_raw_addresses_count_as_one_place(kernel: Kernel) -> None:
    kernel.events.write(b"p:a 0xffffffff8134cc50\n")
    assert _write(kernel, "p:a 0xffffffff8134d3d0") == "EEXIST"
    assert "There is already the exact same probe event" in "".join(kernel.events.error_log.records())


def test_names_by_default(kernel: Kernel) -> None:
    kernel.events.write(b"p ktgt:ktgt_add+5\np 0xffffffff8134cc50\np:g/ vfs_read\nr:h. vfs_read\n")
    names = [line.split()[0] for line in "".join(kernel.events.records()).splitlines()]
    assert names == [
        "p:kprobes/p_ktgt_ktgt_add_5",
        "p:kprobes/p_0xffffffff8134cc50",
        "p:g/p_vfs_read_0",
        "r10:h/r_vfs_read_0",
    ]


def test_a_cold_part_is_as_notrace_as_its_function() -> None:
    parts = [
        Function("traced", 0xFFFFFFFF81000000),
        Function("traced.cold", 0xFFFFFFFF81001000, fentry=False),
        Function("hidden", 0xFFFFFFFF81002000, fentry=False),
        Function("hidden.cold", 0xFFFFFFFF81003000, fentry=False),
    ]
    kernel = make_kernel(parts)
    assert _write(kernel, "p:a traced.cold") == ""
    assert _write(kernel, "p:b hidden.cold") == "EINVAL"
    assert kernel.messages == ["trace_kprobe: Could not probe notrace function hidden.cold"]


def test_other_events_names_are_taken(kernel: Kernel) -> None:
    kernel.events.registry.add(PlainEvent("sched", "sched_switch"))
    assert _write(kernel, "p:sched/sched_switch vfs_read") == "EEXIST"
    with pytest.raises(KernelError):
        kernel.events.write(b"p:sched/sched_switch vfs_read")


def test_dynamic_events_tries_each_kind(kernel: Kernel) -> None:
    taken: list[str] = []

    class Other:
        def create(self, command: str) -> bool:
            taken.append(command)
            return command.startswith("s:")

    other: Any = Other()
    dynamic_events = DynamicEvents(kernel.commands, kernel.events, other)
    dynamic_events.write(b"p:a vfs_read\ns:x int a\n\n")
    assert taken == ["s:x int a"]
    assert errno_of(lambda: dynamic_events.write(b"p:up /bin/sh:0x10\n")) == "EINVAL"
    assert taken[-1] == "p:up /bin/sh:0x10"
    dynamic_events.write(b"!:kprobes/a\n")
    assert dynamic_events.records() == []
