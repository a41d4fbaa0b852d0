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
            assert apply(copies, *saved(files)) == []
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
    """Files of a kernel that also count the writes of triggers."""

    triggers = 0

    def write(self, name: str, text: str) -> None:
        self.triggers += name.endswith("/trigger")
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
        assert files.triggers < 2 * number
