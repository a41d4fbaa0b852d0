"""The function tracer: recorded calls, filters, selected tasks, commands, and probes at the same
functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.tracers.function_tracer import FunctionTracer
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.trace.events.kernel import errno_of


@pytest.fixture(params=["x86_64", "i386", "riscv64", "riscv64i"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="virtual")) as booted:
        yield booted


@pytest.fixture
def tracer(kernel: Kernel) -> FunctionTracer:
    """Return the function tracer of the top trace array."""
    return kernel.trace_arrays.top.functions


def _calls(kernel: Kernel) -> list[str]:
    lines = kernel.trace.trace_text().splitlines()
    return [line.split(": ", 1)[1] for line in lines if " <-" in line]


def _read(kernel: Kernel) -> None:
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    fd = syscalls.open(init, "/scratch", 0)
    syscalls.call(init, "close", fd)


def test_all_functions_and_their_callers(kernel: Kernel) -> None:
    kernel.trace.set_tracer("function")
    _read(kernel)
    calls = _calls(kernel)
    assert "path_openat <-do_filp_open" in calls
    assert "vfs_open <-do_open" in calls
    names = {function.name for function in kernel.tracing.functions.functions}
    assert {call.split(" <-")[0] for call in calls} <= names
    kernel.trace.set_tracer("nop")
    assert kernel.machine.text.ledger == {}
    assert kernel.trace.trace_text().startswith("# tracer: nop\n")


def test_filters_are_chosen_by_patterns(kernel: Kernel, tracer: FunctionTracer) -> None:
    kernel.trace.set_tracer("function")
    for words in (b"path_*open*", b"vfs_open close_fd", b"!*_fd"):
        tracer.filter.write(words)
    assert list(tracer.filter.records()) == ["vfs_open\n", "path_openat\n"] or set(
        tracer.filter.records()
    ) == {"vfs_open\n", "path_openat\n"}
    tracer.notrace.write(b"vfs_*")
    _read(kernel)
    assert _calls(kernel) == ["path_openat <-do_filp_open"]
    tracer.notrace.clear()
    assert list(tracer.notrace.records()) == ["#### no functions disabled ####\n"]
    tracer.filter.clear()
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]


@pytest.mark.parametrize(
    "words", [b"no_such_function", b"*nothing*", b"schedule:bad", b"nothing:traceoff", b"schedule:traceoff:x"]
)
def test_what_means_nothing_is_refused(kernel: Kernel, tracer: FunctionTracer, words: bytes) -> None:
    with pytest.raises(KernelError) as refused:
        tracer.filter.write(words)
    assert refused.value.name == "EINVAL"
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]
    assert kernel.machine.text.ledger == {}


def test_a_number_is_a_place_in_the_list(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"3")
    assert list(tracer.filter.records()) == [f"{list(kernel.tracing.functions.functions)[2].name}\n"]


def test_a_probe_and_the_tracer_share_a_site(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"vfs_open")
    hits: list[int] = []
    probe = Kprobe(symbol_name="vfs_open", pre_handler=lambda kprobe, _regs: hits.append(kprobe.address))
    kernel.register_kprobe(probe)
    expected = 0
    for tracers, probed in ((True, True), (True, False), (True, True), (False, True), (False, False)):
        kernel.trace.set_tracer("function" if tracers else "nop")
        (kernel.enable_kprobe if probed else kernel.disable_kprobe)(probe)
        kernel.trace.clear_trace()
        _read(kernel)
        expected += probed
        assert (len(hits), len(_calls(kernel))) == (expected, int(tracers))
        count = tracers + probed
        users = [line.split()[1] for line in kernel.tracing.functions.enabled()]
        assert users == ([f"({count})"] if count else [])
    kernel.unregister_kprobe(probe)
    assert kernel.machine.text.ledger == {}


def test_only_the_wanted_tasks(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"vfs_open")
    kernel.trace.set_tracer("function")
    assert tracer.pids.traced.records() == ["no pid\n"]
    tracer.pids.traced.write(b"4000000")
    _read(kernel)
    assert _calls(kernel) == []
    tracer.pids.traced.write(b"1")
    assert tracer.pids.traced.records() == ["1\n", "4000000\n"]
    _read(kernel)
    assert len(_calls(kernel)) == 1
    tracer.pids.untraced.write(b"1")
    _read(kernel)
    assert len(_calls(kernel)) == 1
    kernel.trace.options.flags |= TraceOption.FUNC_FORK
    kernel.trace_arrays.forked(1, 77)
    assert "77\n" in tracer.pids.traced.records()


def test_commands_act_with_any_tracer(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"vfs_open:traceoff:1")
    tracer.filter.write(b"close_fd:stacktrace")
    assert set(list(tracer.filter.records())[1:]) == {
        "vfs_open:traceoff:count=1\n",
        "close_fd:stacktrace:unlimited\n",
    }
    kernel.call("strlen", "a")
    _read(kernel)
    assert not kernel.trace.tracing_on
    kernel.trace.set_tracing_on(True)
    _read(kernel)
    assert kernel.trace.tracing_on
    assert " => close_fd" in kernel.trace.trace_text()
    tracer.filter.write(b"!*:traceoff:1")
    tracer.filter.write(b"!*:stacktrace")
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]
    assert kernel.machine.text.ledger == {}


def test_commands_switch_events(kernel: Kernel, tracer: FunctionTracer) -> None:
    kernel.tracing.kprobe_events.write(b"p:ev close_fd\n")
    event = kernel.tracing.kprobe_events.find("kprobes", "ev")
    assert event is not None
    events = kernel.trace_arrays.top.events
    tracer.filter.write(b"vfs_open:enable_event:kprobes:ev:1")
    assert events.enabled_text(event) == "0*"
    _read(kernel)
    assert events.enabled_text(event) == "1*"
    assert "ev: (close_fd" in kernel.trace.trace_text()
    assert "vfs_open:enable_event:kprobes:ev:count=0\n" in tracer.filter.records()
    tracer.filter.write(b"!vfs_open:enable_event:kprobes:ev:0")
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]


def test_a_function_has_a_command_once_with_and_once_without_limit(
    kernel: Kernel, tracer: FunctionTracer
) -> None:
    def answers(*words: str) -> list[str]:
        return [errno_of(partial(tracer.filter.write, word.encode())) for word in words]

    kernel.tracing.kprobe_events.write(b"p:one close_fd\np:two close_fd\n")
    assert answers("!vfs_open:traceon", "vfs_open:traceon", "vfs_open:traceon") == ["ENODEV", "", "EINVAL"]
    assert answers("vfs_open:traceon:2:x", "vfs_open:traceon:", "vfs_*:traceon") == ["", "EINVAL", ""]
    assert answers("!close_fd:traceon", "!vfs_*:traceon", "!vfs_*:traceon") == ["EINVAL", "", "ENODEV"]
    assert list(tracer.filter.records())[1:] == ["vfs_open:traceon:count=2\n"]
    event = "vfs_open:enable_event:kprobes"
    assert answers(f"{event}:one", f"{event}:two", f"{event}:two:", f"{event}:two:5") == [
        *("", "EINVAL", "EINVAL", "")
    ]
    assert answers(f"!{event}:two", f"!{event}:two", f"!{event}:one:0") == ["", "ENODEV", ""]
    assert answers("!vfs_open:traceon:0", "vfs_open:traceon:") == ["", ""]
    assert list(tracer.filter.records())[1:] == ["vfs_open:traceon:count=-1\n"]
    assert answers("!vfs_open:traceon:") == [""]
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]


def test_instances_trace_their_own(kernel: Kernel) -> None:
    one = kernel.trace_arrays.make("one")
    one.functions.filter.write(b"vfs_open")
    one.array.set_tracer("function")
    _read(kernel)
    assert "vfs_open <-" in one.array.trace_text()
    assert _calls(kernel) == []
    kernel.trace_arrays.remove("one")
    assert kernel.machine.text.ledger == {}


def test_options_of_the_text(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"vfs_open")
    kernel.trace.set_tracer("function")
    _read(kernel)
    kernel.trace.options.set("sym-offset", 1)
    assert "vfs_open+0x0/0x" in kernel.trace.trace_text()
    kernel.trace.options.set("print-parent", 0)
    assert " <-" not in kernel.trace.trace_text()


@pytest.mark.parametrize("word", [b"!!vfs_read", b"!!*", b"!!vfs_read:traceoff"])
def test_one_exclamation_mark_removes(tracer: FunctionTracer, word: bytes) -> None:
    """A word of a filter file that begins with two exclamation marks is refused.

    The second mark counts as part of the pattern, which then matches no function and no command.
    """
    tracer.filter.write(b"vfs_read")
    tracer.filter.write(b"vfs_read:traceoff")
    before = list(tracer.filter.records())
    assert errno_of(partial(tracer.filter.write, word)) == "EINVAL"
    assert list(tracer.filter.records()) == before
