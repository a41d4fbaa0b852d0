"""`kprobefs apply` of a changed definition: the event is defined again; if this fails, the old
event stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.limits import Limit, Limits
from emulated_kernel.vfs.core.client import Client
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.syntax import Line
from kprobefs.definitions.tracefs_files import TreeFiles

GOOD = "p:send gcd+5 a=%di"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as made:
        yield made


def apply(kernel: Kernel, *texts: str) -> list[str]:
    files = TreeFiles(kernel.filesystem(), Client(1, 0, 0))
    return Loader(files).apply([Line("x", number, text) for number, text in enumerate(texts, 1)])


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("p:send gcd+6", "gcd+6"),
        ("p:kprobes/send nosuch", "nosuch"),
        ("p:send gcd a=%nosuch", "%nosuch"),
        ("p:send a=$arg1", "a=$arg1"),
        ("r:send gcd+5", "gcd+5"),
        ("p4:send gcd", "4:send gcd"),
    ],
)
def test_an_event_stays_if_its_new_definition_fails(kernel: Kernel, line: str, marked: str) -> None:
    assert apply(kernel, GOOD, "events/kprobes/send/enable = 1", "events/kprobes/send/filter = a > 0") == []
    before = kernel.read_file("/tracing/dynamic_events")
    kernel.call("gcd", 12, 18)
    profile = kernel.read_file("/kprobe_profile")
    [failed] = apply(kernel, line)
    _, shown, caret = failed.splitlines()
    assert shown[caret.index("^") :] == marked
    assert kernel.read_file("/tracing/dynamic_events") == before
    assert kernel.read_file("/kprobe_profile") == profile
    assert kernel.read_file("/tracing/events/kprobes/send/enable") == "1\n"
    assert kernel.read_file("/tracing/events/kprobes/send/filter") == "a > 0\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("p:one gcd", "r:one gcd r=$retval"),
        ("p:mine/one gcd", "p:mine/one int_sqrt"),
        ("s:one u64 lat", "s:one u64 lat; pid_t pid"),
        ("e:one sched.sched_switch", "e:one sched.sched_switch p=$next_pid"),
    ],
)
def test_a_changed_event_is_defined_again(kernel: Kernel, first: str, second: str) -> None:
    before = kernel.read_file("/tracing/dynamic_events").splitlines()
    assert apply(kernel, first) == []
    old = set(kernel.read_file("/tracing/dynamic_events").splitlines()) - set(before)
    assert apply(kernel, second) == []
    (new,) = set(kernel.read_file("/tracing/dynamic_events").splitlines()) - set(before)
    assert new not in old
    assert apply(kernel, f"-:{new.split()[0].partition(':')[2]}") == []
    assert kernel.read_file("/tracing/dynamic_events").splitlines() == before


def test_a_changed_event_needs_no_room_for_another() -> None:
    with Kernel(MachineConfig(limits=Limits({Limit.PROBES: 1}))) as kernel:
        assert apply(kernel, GOOD) == []
        assert apply(kernel, "p:send gcd") == []
        assert kernel.read_file("/tracing/dynamic_events") == "p:kprobes/send gcd\n"
        [failed] = apply(kernel, "p:send nosuch")
        assert "removed" not in failed
        assert kernel.read_file("/tracing/dynamic_events") == "p:kprobes/send gcd\n"
        # The kernel looks for room before it looks at the instruction.
        [failed] = apply(kernel, "p:send gcd+6")
        assert failed.splitlines()[0].endswith("; the old definition was removed")
        assert kernel.read_file("/tracing/dynamic_events") == ""
