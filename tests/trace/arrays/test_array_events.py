"""set_event: which events a written word selects, and how the word enables and disables these events."""

from __future__ import annotations

import errno

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.events.array_events import ArrayEvents
from emulated_kernel.util.errors import KernelError
from tests.trace.events.kernel import errno_of


@pytest.fixture
def events(kernel: Kernel) -> ArrayEvents:
    return kernel.trace_arrays.top.events


def enabled(events: ArrayEvents) -> str:
    """Return the enabled events, each by the last letter of its name, in the order of their definitions."""
    return "".join(line[-2] for line in reversed(events.records()))


@pytest.mark.parametrize(
    ("word", "chosen"),
    [
        ("kprobes:a", "a"),
        ("kprobes:*", "ab"),
        ("kprobes:", "ab"),
        ("kprobes", "ab"),
        ("*:c", "c"),
        (":c", "c"),
        ("c", "c"),
        ("g", "c"),
    ],
)
def test_words(events: ArrayEvents, word: str, chosen: str) -> None:
    assert events.write(f"{word}\n".encode()) == len(word) + 1
    assert enabled(events) == chosen
    events.write(f"!{word}".encode())
    assert enabled(events) == ""


@pytest.mark.parametrize("word", ["bogus", "kprobes:c", "g:a", "KPROBES:a", "kprobes:a:", "k*", "!x"])
def test_words_that_mean_nothing(events: ArrayEvents, word: str) -> None:
    assert errno_of(lambda: events.write(word.encode())) == "EINVAL"


def test_a_write_takes_one_word(events: ArrayEvents) -> None:
    data = b"a b\n"
    taken = events.write(data)
    assert (taken, enabled(events)) == (2, "a")
    assert events.write(data[taken:]) == 2
    assert enabled(events) == "ab"
    assert (events.write(b" \n"), events.write(b"")) == (2, 0)


def test_newest_first_and_clearing(events: ArrayEvents) -> None:
    for word in (b"a", b"b", b"c"):
        events.write(word)
    assert [line for line in events.records() if line[:-1] in ("kprobes:a", "kprobes:b", "g:c")] == [
        "g:c\n",
        "kprobes:b\n",
        "kprobes:a\n",
    ]
    events.clear()
    assert events.records() == []


def test_texts_of_sets(kernel: Kernel, events: ArrayEvents) -> None:
    members = list(kernel.tracing.kprobe_events.registry.in_group("kprobes").values())
    assert events.set_enabled_text([]) == "?"
    assert events.set_enabled_text(members) == "0"
    events.write(b"a")
    assert events.set_enabled_text(members) == "X"
    events.write(b"b")
    assert events.set_enabled_text(members) == "1"


def test_one_that_fails_does_not_keep_the_others(kernel: Kernel, events: ArrayEvents) -> None:
    kernel.tracing.kprobe_events.write(b"p:d strcpy\n")
    members = list(kernel.tracing.kprobe_events.registry.in_group("kprobes").values())
    kernel.tracing.kprobe_events.write(b"-:b\n")
    assert errno_of(lambda: events.set_all(members, True)) == "ENODEV"
    assert enabled(events) == "ad"


@pytest.mark.parametrize("word", ["*:*", "kprobes:*"])
def test_a_uprobe_event_among_others_does_not_keep_them(
    kernel: Kernel, events: ArrayEvents, word: str
) -> None:
    """A write that selects a uprobe event fails with EOPNOTSUPP, because such events cannot be enabled.

    All other selected events are enabled or disabled all the same.
    """
    uprobe = b"p:kprobes/program /bin/true:0x10\n"
    kernel.tracing.uprobe_events.write(uprobe)
    try:
        with pytest.raises(KernelError) as refused:
            events.write(word.encode())
        assert refused.value.errno == errno.EOPNOTSUPP
        on = events.records()
        assert {"kprobes:a\n", "kprobes:b\n"} <= set(on)
        assert "kprobes:program\n" not in on
        assert ("g:c\n" in on, "sched:sched_switch\n" in on) == (word == "*:*",) * 2
    finally:
        kernel.tracing.uprobe_events.write(b"-:kprobes/program\n")
