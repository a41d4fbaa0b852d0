"""If a function has several users, their number changes the preempt count of their records and the line in
enabled_functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from tests.sample import fewer

FUNCTION, OTHER = "vfs_mkdir", "vfs_rmdir"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(clock="virtual")) as booted:
        booted.tracing.kprobe_events.write(f"p:e1 {FUNCTION}\nr:r1 {FUNCTION}\np:other {OTHER}\n".encode())
        booted.trace_arrays.top.functions.filter.write(FUNCTION.encode())
        yield booted


def _switch(kernel: Kernel, name: str, *, on: bool) -> None:
    if name in ("function", "function_graph"):
        kernel.trace.set_tracer(name if on else "nop")
        return
    if name == "stacktrace":
        kernel.trace_arrays.top.functions.filter.write(f"{'' if on else '!'}{FUNCTION}:stacktrace".encode())
        return
    event = kernel.tracing.kprobe_events.find("kprobes", name)
    assert event is not None
    kernel.trace_arrays.top.events.set_enabled(event, on)


def _lines(kernel: Kernel) -> list[str]:
    """Return the trace's lines of one mkdir(2) call, without headers and stacks."""
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    kernel.trace.clear_trace()
    syscalls.with_path(init, "mkdir", "/scratch/a", 0o755)
    text = kernel.trace.trace_text()
    syscalls.with_path(init, "rmdir", "/scratch/a")
    return [line for line in text.splitlines() if line and not line.startswith(("#", " =>"))]


def _enabled(kernel: Kernel, function: str = FUNCTION) -> str:
    lines = "".join(kernel.tracing.functions.enabled()).splitlines(keepends=True)
    return next((line for line in lines if line.startswith(f"{function} ")), "")


USERS = ("function", "stacktrace", "e1", "r1")


@settings(max_examples=fewer(40, 4))
@given(st.lists(st.sampled_from(USERS), min_size=1, max_size=4, unique=True))
def test_preemption_is_disabled_for_several(kernel: Kernel, users: Sequence[str]) -> None:
    """If a function has several users, all records except those of returns show a preempt count of 1.

    The kprobe event and the return event together count as one user.
    """
    for name in users:
        _switch(kernel, name, on=True)
    count = len(users) - ({"e1", "r1"} <= {*users})
    depth = "." if count == 1 else "1"
    lines = [line for _ in range(2) for line in _lines(kernel)]
    assert lines
    for line in lines:
        expected = "....." if " r1: " in line else f"...{depth}."
        assert line.split("] ")[1][:5] == expected, line
    assert f"({count})" in _enabled(kernel)
    for name in users:
        _switch(kernel, name, on=False)
    assert all(" r1: " in line for line in _lines(kernel))
    assert not _enabled(kernel)


def test_a_probe_alone_is_counted_anew(kernel: Kernel) -> None:
    """If the function tracer is turned off and a probe is the only user left, its records show no preempt
    count any more.
    """
    for name in ("function", "e1"):
        _switch(kernel, name, on=True)
    assert [line.split("] ")[1][:5] for line in _lines(kernel)] == ["...1."] * 2
    _switch(kernel, "function", on=False)
    for _ in range(3):
        assert [line.split("] ")[1][:5] for line in _lines(kernel)] == ["....."]
    _switch(kernel, "e1", on=False)


def test_the_graph_counts_its_own_guard(kernel: Kernel) -> None:
    kernel.trace.options.set("latency-format", 1)
    _switch(kernel, "function_graph", on=True)
    assert [line.split()[1] for line in _lines(kernel)] == ["...1."]
    _switch(kernel, "e1", on=True)
    assert [line.split()[1] for line in _lines(kernel)] == ["...1.", "...2."]
    _switch(kernel, "e1", on=False)
    _switch(kernel, "function_graph", on=False)
    kernel.trace.options.set("latency-format", 0)


def test_no_count_without_preemption() -> None:
    with Kernel(MachineConfig(clock="virtual", profile="linux-6.1-nopreempt")) as kernel:
        kernel.tracing.kprobe_events.write(f"p:e1 {FUNCTION}\n".encode())
        kernel.trace_arrays.top.functions.filter.write(FUNCTION.encode())
        for name in ("function", "e1"):
            _switch(kernel, name, on=True)
        assert [line.split("] ")[1][:5] for line in _lines(kernel)] == ["....."] * 2


WAYS = {
    "function": "function_trace_call",
    "function_graph": "ftrace_graph_func",
    "stacktrace": "function_trace_probe_call",
    "e1": "kprobe_ftrace_handler",
}


@pytest.mark.parametrize("name", WAYS)
def test_a_single_user_has_a_trampoline(kernel: Kernel, name: str) -> None:
    _switch(kernel, name, on=True)
    flags = " R" if name == "e1" else "  "
    way = re.escape(f"({WAYS[name]}) ->{WAYS[name]}")
    assert re.fullmatch(rf"{FUNCTION} \(1\){flags}    \ttramp: 0x[0-9a-f]{{16}} {way}\n", _enabled(kernel))
    _switch(kernel, name, on=False)


def test_several_users_have_a_list(kernel: Kernel) -> None:
    for name in ("function", "stacktrace", "e1"):
        _switch(kernel, name, on=True)
    assert _enabled(kernel) == f"{FUNCTION} (3) R     ->arch_ftrace_ops_list_func\n"
    for name in ("function", "stacktrace", "e1"):
        _switch(kernel, name, on=False)


def test_which_function_records_calls(kernel: Kernel) -> None:
    options, functions = kernel.trace.options, kernel.trace_arrays.top.functions
    _switch(kernel, "function", on=True)
    options.set("func_stack_trace", 1)
    assert "(function_stack_trace_call)" in _enabled(kernel)
    options.set("func-no-repeats", 1)
    assert "(function_stack_no_repeats_trace_call)" in _enabled(kernel)
    options.set("func_stack_trace", 0)
    assert "(function_no_repeats_trace_call)" in _enabled(kernel)
    functions.pids.traced.write(b"1")
    assert "(ftrace_pid_func)" in _enabled(kernel)
    functions.pids.traced.clear()
    options.set("func-no-repeats", 0)
    _switch(kernel, "function", on=False)


def test_a_handler_behind_the_instruction_may_change_where_it_goes_on(kernel: Kernel) -> None:
    probe = Kprobe(symbol_name=FUNCTION, post_handler=lambda *_: None)
    kernel.register_kprobe(probe)
    assert f"{FUNCTION} (1) R I  \ttramp: " in _enabled(kernel)
    kernel.unregister_kprobe(probe)


def test_a_probe_leaves_its_registers_behind(kernel: Kernel) -> None:
    """After a probe is disabled, enabled_functions keeps the flag R while the function has other users and
    other probes are armed, as in 6.1.
    """
    for name in ("function", "e1"):
        _switch(kernel, name, on=True)
    _switch(kernel, "e1", on=False)
    assert _enabled(kernel).startswith(f"{FUNCTION} (1)      ")
    for name in ("other", "e1"):
        _switch(kernel, name, on=True)
    _switch(kernel, "e1", on=False)
    assert _enabled(kernel).startswith(f"{FUNCTION} (1) R    ")
    _switch(kernel, "function", on=False)
    _switch(kernel, "function", on=True)
    assert _enabled(kernel).startswith(f"{FUNCTION} (1)      ")
    for name in ("function", "other"):
        _switch(kernel, name, on=False)


@pytest.mark.parametrize("arch", ["i386", "riscv64"])
def test_other_architectures_have_no_trampolines(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        kernel.trace_arrays.top.functions.filter.write(FUNCTION.encode())
        kernel.trace.set_tracer("function")
        assert _enabled(kernel) == f"{FUNCTION} (1)      \n"


def _text_of(kernel: Kernel, option: str) -> str:
    kernel.trace.options.set(option, 1)
    text = kernel.trace.trace_text()
    kernel.trace.options.set(option, 0)
    return text


def test_calls_without_words(kernel: Kernel) -> None:
    """With the option hex, a call's record shows both addresses as digits, the highest digit first. With bin,
    it shows the bytes of the addresses.
    """
    _switch(kernel, "function", on=True)
    assert len(_lines(kernel)) == 1
    kernel.trace.set_tracing_on(False)
    raw = re.search(r"([0-9a-f]{16}) ([0-9a-f]{16})\n", _text_of(kernel, "raw"))
    assert raw is not None
    assert _text_of(kernel, "hex").endswith(f" {raw[1]} {raw[2]} \n")
    words = b"".join(int(word, 16).to_bytes(8, "little") for word in raw.groups())
    assert _text_of(kernel, "bin").encode("utf-8", "surrogateescape").endswith(words)
    kernel.trace.set_tracing_on(True)
    _switch(kernel, "function", on=False)


def test_a_limited_stack_trace_waits_for_tracing(kernel: Kernel) -> None:
    """While tracing is off, calls do not reduce the remaining count of a limited `stacktrace` command."""
    functions = kernel.trace_arrays.top.functions.filter
    functions.write(f"{FUNCTION}:stacktrace:3".encode())
    kernel.trace.set_tracing_on(False)
    _lines(kernel)
    assert f"{FUNCTION}:stacktrace:count=3\n" in functions.records()
    kernel.trace.set_tracing_on(True)
    _lines(kernel)
    assert f"{FUNCTION}:stacktrace:count=2\n" in functions.records()
    functions.write(f"!{FUNCTION}:stacktrace:0".encode())
