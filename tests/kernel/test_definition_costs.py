"""Costs of definitions: a file of triggers is read once, not once for each of its lines."""

from __future__ import annotations

from collections import Counter

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Client
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.saver import saved
from kprobefs.definitions.syntax import Line
from kprobefs.definitions.tracefs_files import TreeFiles

EVENT = "p:h int_sqrt a=$arg1 b=$arg2"
TRIGGER = "events/kprobes/h/trigger"


class CountedFiles(TreeFiles):
    """Files of a kernel that count their reads."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.filesystem(), Client(1, 0, 0))
        self.reads: Counter[str] = Counter()

    def read(self, name: str) -> str:
        self.reads[name.removeprefix("tracing/")] += 1
        return super().read(name)


def apply(files: CountedFiles, *texts: str) -> list[str]:
    return Loader(files).apply([Line("file", number, text) for number, text in enumerate(texts, 1)])


def test_a_trigger_file_is_read_once() -> None:
    lines = [f"{TRIGGER} = hist:name=n{number}:keys=a" for number in range(50)]
    lines += [f"{TRIGGER} = hist:keys=a if a == {number}" for number in range(50)]
    with Kernel() as kernel, kernel.lock:
        files = CountedFiles(kernel)
        assert apply(files, EVENT, *lines) == []
        assert files.reads[TRIGGER] == 1
        assert files.read(f"tracing/{TRIGGER}").count("\n") == 100
        files.reads.clear()
        assert apply(files, EVENT, *lines) == []
        assert files.reads[TRIGGER] == 1
        assert files.read(f"tracing/{TRIGGER}").count("\n") == 100
        with Kernel() as other, other.lock:
            copies = CountedFiles(other)
            assert apply(copies, *saved(files, lambda: 0)) == []
            assert copies.read(f"tracing/{TRIGGER}") == files.read(f"tracing/{TRIGGER}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("hist:keys=a", "hist:keys=a:sort=hitcount"),
        ("hist:keys=a", "hist:keys=a:vals=hitcount"),
        ("hist:name=x:keys=a", "hist:keys=a"),
        ("hist:keys=a if b > 3", "hist:keys=a if b > 3"),
        ("traceoff:5", "traceoff"),
        ("stacktrace:3 if a == 1", "stacktrace:4 if a == 1"),
    ],
)
def test_a_trigger_that_the_kernel_completed_is_found(first: str, second: str) -> None:
    with Kernel() as kernel, kernel.lock:
        files = CountedFiles(kernel)
        assert apply(files, EVENT, f"{TRIGGER} = {first}", f"{TRIGGER} = {second}") == []
        assert files.read(f"tracing/{TRIGGER}").count("\n") == 1


def test_a_definition_between_two_settings_reads_the_definitions_once() -> None:
    lines = []
    for number in range(30):
        lines += [f"p:e{number} int_sqrt", f"events/kprobes/e{number}/enable = 1"]
    with Kernel() as kernel, kernel.lock:
        files = CountedFiles(kernel)
        assert apply(files, *lines) == []
        assert files.reads["dynamic_events"] == 1


class CountedWrites(CountedFiles):
    """Files of a kernel that also count their writes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.writes: Counter[str] = Counter()
        """Last component of a file's name -> number of writes."""

    def write(self, name: str, text: str) -> None:
        self.writes[name.rpartition("/")[2]] += 1
        super().write(name, text)


@pytest.mark.parametrize("stride", [1, -1, 7])
def test_triggers_that_need_each_others_variables_take_two_passes(stride: int) -> None:
    number = 40
    events = [f"p:h{each} int_sqrt a=$arg1" for each in range(number)]
    chain = [
        f"events/kprobes/h{each}/trigger = hist:keys=a:v{each}="
        + (f"$v{each + 1}" if each + 1 < number else "common_timestamp.usecs")
        for each in range(number)
    ]
    lines = [chain[each * stride % number] for each in range(number)]
    with Kernel() as kernel, kernel.lock:
        files = CountedWrites(kernel)
        assert apply(files, *events, *lines) == []
        assert files.writes["trigger"] < 2 * number


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("set_event_pid", [*map(str, range(1, 2001))]),
        ("set_ftrace_notrace_pid", ["7", "9"]),
        ("set_ftrace_filter", ["gcd", "int_sqrt", "vfs_read:traceoff:5", "vfs_write:traceoff"]),
        ("set_graph_notrace", ["gcd", "int_sqrt"]),
    ],
)
def test_the_missing_words_of_a_list_are_one_write(name: str, words: list[str]) -> None:
    with Kernel() as kernel, kernel.lock:
        files = CountedWrites(kernel)
        assert apply(files, f"{name} = {words[0]}") == []
        assert apply(files, f"{name} = {' '.join(words)}") == []
        assert files.writes[name] == 2
        settings = [line.partition(" = ")[::2] for line in saved(files, lambda: 0)]
        listed = [value for path, value in settings if path.rpartition("/")[2] == name]
        assert sorted(" ".join(listed).split()) == sorted(words)


@pytest.mark.parametrize("name", ["set_ftrace_filter", "set_event_pid"])
def test_the_word_of_a_list_that_fails_is_shown(name: str) -> None:
    """The error of a list shows that a word is refused, and the words before this word stay set."""
    first, wrong = ("gcd", "nosuch") if name == "set_ftrace_filter" else ("77", "x")
    with Kernel() as kernel, kernel.lock:
        files = CountedFiles(kernel)
        [failed] = apply(files, f"{name} = {first} {wrong}")
        assert "Invalid argument" in failed
        assert files.read(f"tracing/{name}") == f"{first}\n"
