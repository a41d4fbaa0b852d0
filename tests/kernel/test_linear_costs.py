"""Costs of definitions are linear in their number: a further definition is as much work as an earlier one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from kprobefs.definitions.syntax import Line
from kprobefs.plan.check import check_lines
from kprobefs.plan.planned_kernel import planned_kernel
from tests.counting import lines_of
from tests.shell import Shell

FEW, MANY = 60, 480
MARGIN = 1.3
DYNAMIC = "/tracing/dynamic_events"
KPROBES = "/tracing/events/kprobes"
REFUSED = (
    ("/kprobe_events", "p:e nosuch\n"),
    # The event exists since the first step.
    ("/kprobe_events", "p:e0 int_sqrt\n"),
    (DYNAMIC, "p:e int_sqrt a=+x\n"),
    (f"{KPROBES}/e0/filter", "nosuch == 1\n"),
    (f"{KPROBES}/e0/trigger", "nosuch\n"),
    ("/tracing/current_tracer", "nosuch\n"),
)
"""Pairs of a file and a text that the file refuses."""
Lines = Callable[[int], str]
"""Function that takes a number and returns a line that defines something."""
Step = Callable[[], object]


def siblings(place: str) -> Lines:
    """Return a function that maps a number to a definition of one more probe at `place` for the event `e`.

    Each definition has a different argument.
    """
    return lambda number: f"p:e {place} a=@{0xFFFF880000001000 + 8 * number:#x}\n"


def one_by_one(shell: Shell, number: int, path: str, line: Lines) -> Step:
    """Return a step that writes the first `number` lines of `line` to the file `path`, with one write per
    line.
    """
    lines = [line(each) for each in range(number)]
    return lambda: [shell.write(path, text) for text in lines]


def defined_siblings(shell: Shell, number: int) -> Iterator[Step]:
    """Add many probes to one event, enable the event, read kprobe_profile, and disable and remove the
    event.
    """
    yield one_by_one(shell, number, DYNAMIC, siblings("int_sqrt"))
    yield partial(shell.write, f"{KPROBES}/e/enable", "1")
    yield partial(shell.read, "/kprobe_profile")
    yield partial(shell.write, f"{KPROBES}/e/enable", "0")
    yield partial(shell.write, DYNAMIC, "-:e\n")


def siblings_in_a_module(shell: Shell, number: int) -> Iterator[Step]:
    """Load and unload a module in which one enabled event has many probes."""
    shell.write(DYNAMIC, "".join(map(siblings("counter:counter_add"), range(number))))
    shell.write(f"{KPROBES}/e/enable", "1")
    yield partial(shell.write, "/machine/modules", "load counter\n")
    yield partial(shell.write, "/machine/modules", "unload counter\n")


def events_of_one_name(shell: Shell, number: int) -> Iterator[Step]:
    """Define events of one name in many groups, and remove them by their name."""
    yield one_by_one(shell, number, DYNAMIC, lambda each: f"p:g{each}/e int_sqrt\n")
    yield partial(shell.write, DYNAMIC, "-:e\n")


def enabled_one_by_one(shell: Shell, number: int) -> Iterator[Step]:
    """Enable and disable many events of one function, one by one."""
    shell.write(DYNAMIC, "".join(f"p:e{each} vfs_read\n" for each in range(number)))
    for value in "10":
        paths = [f"{KPROBES}/e{each}/enable" for each in range(number)]
        yield lambda paths=paths, value=value: [shell.write(path, value) for path in paths]  # type: ignore[misc]


def fprobes(shell: Shell, number: int) -> Iterator[Step]:
    """Define, enable, list and remove fprobe events of one function."""
    yield one_by_one(shell, number, DYNAMIC, lambda each: f"f:e{each} int_sqrt\n")
    yield partial(shell.write, "/tracing/events/fprobes/enable", "1")
    yield partial(shell.read, "/tracing/enabled_functions")
    yield partial(shell.write, "/tracing/events/fprobes/enable", "0")
    yield partial(shell.write, DYNAMIC, "".join(f"-:e{each}\n" for each in range(number)))


def uprobes(shell: Shell, number: int) -> Iterator[Step]:
    """Define uprobe events in one file."""
    yield one_by_one(shell, number, DYNAMIC, lambda each: f"p:u{each} {Path(__file__)}:{16 * each:#x}\n")


def switching_triggers(shell: Shell, number: int) -> Iterator[Step]:
    """Add to one event triggers that enable many other events, and remove the triggers."""
    shell.write(DYNAMIC, "p:base gcd\n" + "".join(f"p:e{each} int_sqrt\n" for each in range(number)))
    for sign in ("", "!"):
        switch = partial("{}enable_event:kprobes:e{}\n".format, sign)
        yield one_by_one(shell, number, f"{KPROBES}/base/trigger", switch)


SCENARIOS: dict[str, Callable[[Shell, int], Iterator[Step]]] = {
    each.__name__: each
    for each in (
        defined_siblings,
        siblings_in_a_module,
        events_of_one_name,
        enabled_one_by_one,
        fprobes,
        uprobes,
        switching_triggers,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_work_is_proportional_to_the_number(name: str) -> None:
    totals = []
    for number in (FEW, MANY):
        with Kernel(MachineConfig(profile="linux-6.12")) as kernel:
            steps = SCENARIOS[name](Shell(kernel), number)
            totals.append([lines_of(step) for step in steps])
    for few, many in zip(*totals, strict=True):
        assert many < MARGIN * MANY / FEW * few, totals


def test_checked_lines_are_proportional_work() -> None:
    kernel = planned_kernel("x86_64", None, None, None)
    check_lines(kernel, [Line("x", 1, "p:first int_sqrt")])
    few, many = (
        lines_of(
            partial(check_lines, kernel, [Line("x", each, f"p:e{each} int_sqrt") for each in range(number)])
        )
        for number in (FEW, MANY)
    )
    assert many < 1.1 * MANY / FEW * few


def refused(shell: Shell, path: str, text: str) -> None:
    """Write `text` repeatedly to the file `path`, which must refuse it. Do not keep the errors.

    The server does not keep errors either after its reply to a client.
    """
    for _ in range(FEW):
        try:
            shell.write(path, text)
        except KernelError:
            continue
        pytest.fail(f"{path} takes {text!r}")


@pytest.mark.usefixtures("objects_excluded")
@pytest.mark.parametrize("is_watched", [False, True])
def test_requests_leave_no_garbage(is_watched: bool) -> None:
    """All objects of a request are freed at its end, without a collection of reference cycles."""
    with Kernel() as kernel:
        shell = Shell(kernel)
        if is_watched:
            shell.write(DYNAMIC, "p:watching vfs_write\np:reading vfs_read\n")
            shell.write(f"{KPROBES}/enable", "1")
        steps = (
            one_by_one(shell, FEW, "/kprobe_events", lambda each: f"p:e{each} int_sqrt\n"),
            lambda: [shell.read("/kprobe_events") for _ in range(FEW)],
            *(partial(refused, shell, path, text) for path, text in REFUSED),
        )
        steps[-1]()
        for step in steps:
            gc.collect()
            gc.disable()
            try:
                step()
                # A few objects may be those of a cache that is filled at the first use.
                assert gc.collect() < FEW
            finally:
                gc.enable()
