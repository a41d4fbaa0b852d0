"""Plain triggers: their effects at a hit, their counts, and the text of the file `trigger`."""

from __future__ import annotations

import errno
import re
from itertools import groupby

import pytest

from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.errors import KernelError
from tests.trace.events.kernel import errno_of
from tests.trace.trigger.control import TriggerKernel


@pytest.fixture
def kernel() -> TriggerKernel:
    """Return a kernel with two disabled events on two functions."""
    made = TriggerKernel()
    made.define("p:a vfs_read n=%di:u32 s=%si:s16\n", "p:b vfs_write\n")
    return made


def _enable(kernel: TriggerKernel, name: str) -> None:
    event = kernel.kernel.events.find("kprobes", name)
    assert event is not None
    event.file(kernel.kernel.recorder).enable()


def test_without_triggers_the_file_lists_them(kernel: TriggerKernel) -> None:
    assert kernel.show() == (
        "# Available triggers:\n"
        "# traceon traceoff snapshot stacktrace enable_event disable_event enable_hist disable_hist hist\n"
    )


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("traceoff", "traceoff:unlimited"),
        ("  traceoff  \n", "traceoff:unlimited"),
        ("traceoff:5", "traceoff:count=5"),
        ("traceoff 0x10", "traceoff:count=16"),
        ("traceoff:5:ignored", "traceoff:count=5"),
        ("traceoff:18446744073709551615", "traceoff:unlimited"),
        ("traceoff if n > 5", "traceoff:unlimited if n > 5"),
        ("traceoff:3   if  n > 5", "traceoff:count=3 if  n > 5"),
        ("stacktrace", "stacktrace:unlimited"),
        ("snapshot:2", "snapshot:count=2"),
        ("enable_event:kprobes:b", "enable_event:kprobes:b:unlimited"),
        ("disable_event:kprobes:b:2 if n == 1", "disable_event:kprobes:b:count=2 if n == 1"),
        ("enable_hist:kprobes:b:1", "enable_hist:kprobes:b:count=1"),
    ],
)
def test_shown(kernel: TriggerKernel, written: str, shown: str) -> None:
    kernel.write(written)
    assert kernel.show() == f"{shown}\n"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("traceoff:x", "EINVAL"),
        ("traceoff:", ""),
        ("traceoff:5x", "EINVAL"),
        ("traceoff:18446744073709551616", "ERANGE"),
        ("traceoff if", "EINVAL"),
        ("traceoff if n >", "EINVAL"),
        ("traceoff if n > 5)", "EPERM"),
        ("traceoff if (n > 5", "ENOENT"),
        ("traceoff iff n > 5", "EINVAL"),
        ("nonsense", "EINVAL"),
        ("!nonsense", "EINVAL"),
        ("", ""),
        (" ", "EINVAL"),
        ("!", "EINVAL"),
        ("!traceoff", ""),
        ("!traceoff:x if nothing", ""),
        ("enable_event", "EINVAL"),
        ("enable_event:", "EINVAL"),
        ("enable_event:kprobes", "EINVAL"),
        ("enable_event:kprobes:none", "EINVAL"),
        ("enable_event:kprobes:b:", "EINVAL"),
        ("!enable_event:kprobes:b", ""),
        ("x" * 4096, "EINVAL"),
    ],
)
def test_errors(kernel: TriggerKernel, written: str, name: str) -> None:
    assert errno_of(lambda: kernel.write(written)) == name
    assert "".join(kernel.kernel.events.error_log.records()) == ""


@pytest.mark.parametrize("command", ["traceoff", "traceoff:5", "enable_event:kprobes:b"])
@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("if", "trigger: the filter after `if` is empty"),
        ("if ", "trigger: the filter after `if` is empty"),
        ("iff n > 5", "'iff': a filter must start with 'if'"),
        ("n > 5", "'n': a filter must start with 'if'"),
    ],
)
def test_a_malformed_filter_is_refused_with_its_fault(
    kernel: TriggerKernel, command: str, condition: str, why: str
) -> None:
    with pytest.raises(KernelError, match=rf"^\[Errno {errno.EINVAL}\] {re.escape(why)}$"):
        kernel.write(f"{command} {condition}")


def test_one_of_a_kind(kernel: TriggerKernel) -> None:
    kernel.write("traceoff")
    kernel.write("enable_event:kprobes:b")
    assert errno_of(lambda: kernel.write("traceon:1")) == "EEXIST"
    assert errno_of(lambda: kernel.write("disable_event:kprobes:b")) == "EEXIST"
    kernel.write("enable_event:kprobes:a")
    kernel.write("stacktrace")
    assert kernel.show().splitlines() == [
        "stacktrace:unlimited",
        "enable_event:kprobes:a:unlimited",
        "enable_event:kprobes:b:unlimited",
        "traceoff:unlimited",
    ]
    kernel.write("!traceon")
    assert "traceoff" not in kernel.show()


def test_a_trigger_alone_keeps_the_event_in_soft_mode(kernel: TriggerKernel) -> None:
    kernel.write("stacktrace")
    assert kernel.enabled() == "0*"
    kernel.hit()
    assert kernel.recorded == []
    assert kernel.control.actions == ["stack"]
    _enable(kernel, "a")
    assert kernel.enabled() == "1*"
    kernel.hit()
    assert kernel.recorded == ["a"]
    kernel.write("!stacktrace")
    assert kernel.enabled() == "1"


def test_the_hit_that_enables_its_own_event_is_not_recorded(kernel: TriggerKernel) -> None:
    """If a hit's trigger enables the event of this hit, the hit is not recorded.

    A trigger that does not need the record runs before the record is made.
    """
    kernel.write("enable_event:kprobes:a")
    kernel.hit()
    assert kernel.recorded == []
    assert kernel.enabled() == "1*"
    kernel.hit()
    assert kernel.recorded == ["a"]


def test_disabling_in_soft_mode(kernel: TriggerKernel) -> None:
    _enable(kernel, "a")
    kernel.write("stacktrace")
    event = kernel.kernel.events.find("kprobes", "a")
    assert event is not None
    event.file(kernel.kernel.recorder).disable()
    assert kernel.enabled() == "0*"
    assert event.needs_entry
    kernel.write("!stacktrace")
    assert kernel.enabled() == "0"
    assert not event.needs_entry
    assert not event.is_enabled


def test_counts(kernel: TriggerKernel) -> None:
    kernel.write("stacktrace:2")
    for _ in range(3):
        kernel.hit()
    assert kernel.control.actions == ["stack", "stack"]
    assert kernel.show() == "stacktrace:count=0\n"


def test_filters(kernel: TriggerKernel) -> None:
    kernel.write("snapshot if n == 7")
    kernel.hit(di=6)
    kernel.hit(di=7)
    assert kernel.control.actions == ["allocate", "snapshot"]


def test_traceoff_counts_only_what_it_switches_and_runs_behind_the_record(kernel: TriggerKernel) -> None:
    _enable(kernel, "a")
    kernel.write("traceoff:2")
    kernel.hit()
    assert kernel.recorded == ["a"]
    assert kernel.control.actions == ["tracing_on 0"]
    kernel.hit()
    assert kernel.show() == "traceoff:count=1\n"
    kernel.control.tracing_on = True
    kernel.hit()
    kernel.control.tracing_on = True
    kernel.hit()
    assert kernel.control.tracing_on


def test_traceon(kernel: TriggerKernel) -> None:
    kernel.control.tracing_on = False
    kernel.write("traceon")
    kernel.hit()
    assert kernel.control.tracing_on


def test_enable_and_disable_event(kernel: TriggerKernel) -> None:
    kernel.write("enable_event:kprobes:b:1 if n == 1")
    assert kernel.enabled("b") == "0*"
    kernel.hit(di=0)
    assert kernel.enabled("b") == "0*"
    kernel.hit(di=1)
    assert kernel.enabled("b") == "1*"
    assert kernel.show() == "enable_event:kprobes:b:count=0 if n == 1\n"
    kernel.hit(di=1)
    assert kernel.recorded == ["b"]
    kernel.write("!enable_event:kprobes:b")
    assert kernel.enabled("b") == "1"
    kernel.write("disable_event:kprobes:b")
    kernel.hit()
    assert kernel.enabled("b") == "0*"


def test_a_referred_event_stays(kernel: TriggerKernel) -> None:
    kernel.write("enable_event:kprobes:b")
    assert errno_of(kernel.kernel.events.clear) == "EBUSY"
    assert errno_of(lambda: kernel.define("-:b\n")) == "EBUSY"
    kernel.write("!enable_event:kprobes:b")
    kernel.kernel.events.clear()


def test_changes_are_told(kernel: TriggerKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    event = kernel.kernel.events.find("kprobes", "b")
    assert event is not None
    told: list[bool] = []

    def changed(told_of: KprobeTraceEvent) -> None:
        if told_of is event:
            told.append(told_of.needs_entry)

    monkeypatch.setattr(KprobeTraceEvent, "changed", changed)
    kernel.write("enable_event:kprobes:b")
    kernel.write("!enable_event:kprobes:b")
    # The event is changed first for the recorder, and then for the trigger.
    assert [key for key, _ in groupby(told)] == [False, True, False]


def test_a_failing_probe_takes_the_trigger_back(kernel: TriggerKernel) -> None:
    backend = kernel.kernel.backend
    backend.refuse_enabling.add(backend.handles[0].address)
    before = kernel.show()
    assert errno_of(lambda: kernel.write("stacktrace")) == "EINVAL"
    assert errno_of(lambda: kernel.write("enable_event:kprobes:b")) == "EINVAL"
    assert kernel.show() == before
    assert (kernel.enabled("a"), kernel.enabled("b")) == ("0", "0")


def test_truncating_drops_what_switches_histograms(kernel: TriggerKernel) -> None:
    kernel.write("enable_hist:kprobes:b")
    kernel.write("enable_event:kprobes:b")
    event = kernel.kernel.events.find("kprobes", "a")
    assert event is not None
    kernel.triggers.truncate(event)
    assert kernel.show() == "enable_event:kprobes:b:unlimited\n"
    kernel.triggers.clear()
    assert kernel.enabled() == "0"
