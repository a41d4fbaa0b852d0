"""Tracers and probes of one function are called newest first, whatever the order of registrations and
removals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.return_hook.return_hook import RethookNode
from emulated_kernel.trace.tracers.fgraph import GraphUser
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches
from tests.sample import fewer

PLAIN, OTHER, STEPPED = "gcd", "lcm", "int_sqrt"
"""Probed functions. Only the probe of STEPPED has a post_handler.

For ftrace, all probes without a post_handler are one user. So those of PLAIN and OTHER have the same place in
the order of calls.
"""
ARGUMENTS = {PLAIN: (12, 18), STEPPED: (49,)}


class _Graph(GraphUser):
    data_size = 0
    symbols = ("enter", "return")

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def entered(self, func: int, caller: RethookNode | None, regs: Any) -> None:
        del func, caller, regs
        self._tell()

    def returned(self, instance: RethookNode, regs: Any) -> None:
        raise AssertionError(f"nothing is awaited: {instance} {regs}")


Switch = tuple[Callable[[], object], Callable[[], object]]


class Users:
    """Tracers and probes that log their calls, with the order in which a call should reach them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._called: list[str] = []
        self._groups: list[list[str]] = []
        """Groups of registered tracers and probes, the newest first. A group is a single user for ftrace."""
        assert kernel.tracing.function_graph is not None
        graph, functions = kernel.tracing.function_graph._graph, kernel.tracing.functions
        self.switches: dict[str, Switch] = {
            "graph": (partial(graph.register, _Graph(partial(self._told, "graph"))), graph.unregister)
        }
        for function in ARGUMENTS:
            kernel.trace_arrays.top.functions.filter.write(function.encode())
        sites = functions.functions.matching(PLAIN.encode()) | functions.functions.matching(STEPPED.encode())
        for name in ("tracer 1", "tracer 2"):
            user = functions.user(partial(self._told, name), lambda: "tracer")
            self.switches[name] = partial(functions.attach, user, sites), partial(functions.detach, user)
        for name, filter_ in (("fprobe 1", PLAIN), ("fprobe 2", "[gi][cn][dt]*")):
            fprobe = Fprobe(filter_, entry_handler=partial(self._told, name))
            self.switches[name] = (
                partial(kernel.fprobes.register_fprobe, fprobe),
                partial(kernel.fprobes.unregister_fprobe, fprobe),
            )
        for function in (PLAIN, OTHER, STEPPED):
            tell = partial(self._told, f"kprobe {function}")
            probe = Kprobe(symbol_name=function, pre_handler=tell, disabled=True)
            if function == STEPPED:
                probe.post_handler = lambda *_: None
            kernel.register_kprobe(probe)
            self.switches[f"kprobe {function}"] = (
                partial(kernel.kprobes.enable_kprobe, probe),
                partial(kernel.kprobes.disable_kprobe, probe),
            )

    def _told(self, name: str, *_about: object) -> None:
        self._called.append(name)

    def toggle(self, name: str) -> None:
        """Remove the tracer or probe called `name` if it is registered; otherwise register it."""
        start, stop = self.switches[name]
        group = next((group for group in self._groups if name in group), None)
        with self._kernel.lock:
            if group is not None:
                stop()
                group.remove(name)
            else:
                start()
                self._join(name)
        self._groups = [group for group in self._groups if group]

    def _join(self, name: str) -> None:
        family = {f"kprobe {PLAIN}", f"kprobe {OTHER}"}
        group = next((group for group in self._groups if {name, *group} <= family), None)
        if group is None:
            self._groups.insert(0, [name])
        else:
            group.append(name)

    def leave(self) -> None:
        """Remove all registered tracers and probes."""
        for name in [name for group in self._groups for name in group]:
            self.toggle(name)

    def expected(self, function: str) -> list[str]:
        """Return the names of the tracers and probes that a call of `function` should reach, in order."""
        unused = {f"kprobe {other}" for other in (PLAIN, OTHER, STEPPED)} - {f"kprobe {function}"}
        if function == STEPPED:
            unused.add("fprobe 1")
        return [name for group in self._groups for name in group if name not in unused]

    def called(self, function: str) -> list[str]:
        """Call `function`. Return the names of the tracers and probes that were called, in order."""
        self._called.clear()
        self._kernel.call(function, *ARGUMENTS[function])
        return self._called


@pytest.fixture(scope="module")
def shared() -> Iterator[Users]:
    with Kernel() as kernel:
        users = Users(kernel)
        yield users
        users.leave()
        assert ledger_mismatches(kernel.machine.text) == []


NAMES = (*("graph", "tracer 1", "tracer 2", "fprobe 1", "fprobe 2"),
         *(f"kprobe {name}" for name in (PLAIN, OTHER, STEPPED)))  # fmt: skip


@settings(max_examples=fewer(60, 4))
@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=12))
def test_newest_first(shared: Users, coming: list[str]) -> None:
    shared.leave()
    for name in coming:
        shared.toggle(name)
        for function in ARGUMENTS:
            assert shared.called(function) == shared.expected(function)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(clock="virtual")) as kernel:
        kernel.tracing.kprobe_events.write(b"p:e1 vfs_mkdir\nr:r1 vfs_mkdir\n")
        kernel.trace_arrays.top.functions.filter.write(b"vfs_mkdir")
        yield kernel


def _switch(kernel: Kernel, name: str, *, on: bool = True) -> None:
    event = kernel.tracing.kprobe_events.find("kprobes", name)
    assert event is not None
    kernel.trace_arrays.top.events.set_enabled(event, on)


def _records(kernel: Kernel) -> list[str]:
    """Return the records of the last of three mkdir(2) calls, without times and offsets. By then, hits are
    handled by guest code where possible.
    """
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    for name in ("/scratch/a", "/scratch/b", "/scratch/c"):
        kernel.trace.clear_trace()
        syscalls.with_path(init, "mkdir", name, 0o755)
    for name in ("/scratch/a", "/scratch/b", "/scratch/c"):
        syscalls.with_path(init, "rmdir", name)
    lines = re.sub(r"\+0x[0-9a-f]+(?:/0x[0-9a-f]+)?", "", kernel.trace.trace_text()).splitlines()
    return [
        line.split("|")[-1].strip() if line.startswith(" 0)") else line.split(": ", 1)[1]
        for line in lines
        if line and not line.startswith("#")
    ]


CALL, PROBE = "vfs_mkdir <-do_mkdirat", "e1: (vfs_mkdir)"


def test_a_tracer_and_a_probe(kernel: Kernel) -> None:
    """A tracer and a probe of one function are called newest first.

    An event becomes the newest user when it is enabled again. The tracer becomes the newest when an option
    changes its function for recording calls.
    """
    _switch(kernel, "e1")
    kernel.trace.set_tracer("function")
    assert _records(kernel) == [CALL, PROBE]
    _switch(kernel, "e1", on=False)
    _switch(kernel, "e1")
    assert _records(kernel) == [PROBE, CALL]
    kernel.trace.options.set("func-no-repeats", 1)
    kernel.trace.options.set("func-no-repeats", 0)
    assert _records(kernel) == [CALL, PROBE]
    kernel.trace.set_tracer("nop")
    assert _records(kernel) == [PROBE]


@pytest.mark.parametrize("is_older", [True, False])
def test_a_command_against_a_probe(kernel: Kernel, is_older: bool) -> None:
    """After the command `traceoff`, an older probe of the function records nothing. A newer probe has
    recorded the call before the command runs.
    """
    tracing = kernel.trace_arrays.top
    if is_older:
        _switch(kernel, "e1")
    tracing.functions.filter.write(b"vfs_mkdir:traceoff")
    if not is_older:
        _switch(kernel, "e1")
    assert _records(kernel) == []
    kernel.trace.clear_trace()
    kernel.trace.set_tracing_on(True)
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    syscalls.with_path(init, "mkdir", "/scratch/d", 0o755)
    assert ("e1: (vfs_mkdir" in kernel.trace.trace_text()) is not is_older
    assert not kernel.trace.tracing_on


def test_commands_of_one_kind_are_one_user(kernel: Kernel) -> None:
    """Commands of one kind count as one user, which is as old as its first command, whatever the functions
    are.

    A command with a limit is of another kind than one without.
    """
    write = kernel.trace_arrays.top.functions.filter.write
    write(b"vfs_rmdir:stacktrace")
    write(b"vfs_mkdir:traceoff")
    write(b"vfs_mkdir:stacktrace")
    assert list(kernel.trace_arrays.top.functions.filter.records()) == [
        "vfs_mkdir\n",
        "vfs_mkdir:traceoff:unlimited\n",
        *("vfs_mkdir:stacktrace:unlimited\n", "vfs_rmdir:stacktrace:unlimited\n"),
    ]
    kernel.trace.set_tracing_on(True)
    assert _records(kernel) == []
    write(b"vfs_mkdir:stacktrace:9")
    kernel.trace.set_tracing_on(True)
    kernel.guest.syscalls.with_path(kernel.guest.processes.init, "mkdir", "/scratch/d", 0o755)
    assert kernel.trace.trace_text().count("<stack trace>") == 1
    assert "vfs_mkdir:stacktrace:count=8\n" in kernel.trace_arrays.top.functions.filter.records()


def test_a_return_probe_and_the_graph(kernel: Kernel) -> None:
    """If a return probe and the function graph hook one call, the older user finds the newer user's
    trampoline in place of the return address.
    """
    _switch(kernel, "r1")
    kernel.trace.set_tracer("function_graph")
    assert "/* r1: (return_to_handler <- vfs_mkdir) */" in _records(kernel)
    kernel.trace.set_tracer("nop")
    _switch(kernel, "r1", on=False)
    kernel.trace.set_tracer("function_graph")
    _switch(kernel, "r1")
    assert "/* r1: (do_mkdirat <- vfs_mkdir) */" in _records(kernel)


def test_a_probe_stands_before_or_in_the_call_of_the_graph(kernel: Kernel) -> None:
    _switch(kernel, "e1")
    kernel.trace.set_tracer("function_graph")
    lines = _records(kernel)
    assert lines[:2] == ["vfs_mkdir() {", "/* e1: (vfs_mkdir) */"]
    _switch(kernel, "e1", on=False)
    _switch(kernel, "e1")
    lines = _records(kernel)
    assert lines[0] == "/* e1: (vfs_mkdir) */"
    assert lines[1].startswith("vfs_mkdir")


def test_a_handler_in_assembly_keeps_the_order() -> None:
    """A probe with an assembly handler, which the guest runs, is called in order between a newer and an older
    fprobe in Python.
    """
    told: list[str] = []
    with Kernel() as kernel:
        older = Fprobe(PLAIN, entry_handler=lambda *_: told.append("older"))
        newer = Fprobe(PLAIN, entry_handler=lambda *_: told.append("newer"))
        probe = Kprobe(
            symbol_name=PLAIN, code="inc qword ptr [hits]", pre_handler=lambda *_: told.append("probe")
        )
        kernel.fprobes.register_fprobe(older)
        kernel.register_kprobe(probe)
        for _ in range(2):
            assert kernel.call(PLAIN, *ARGUMENTS[PLAIN]) == 6
        kernel.fprobes.register_fprobe(newer)
        assert kernel.call(PLAIN, *ARGUMENTS[PLAIN]) == 6
        assert told == ["probe", "older"] * 2 + ["newer", "probe", "older"]
        assert probe.cells["hits"] == 3
