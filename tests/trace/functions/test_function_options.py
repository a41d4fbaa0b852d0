"""Options of the function tracer: func_stack_trace for call chains, and func-no-repeats for counts of
repeated calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig

REPEATS = re.compile(r": gcd <-\S+ \(repeats: (\d+), last_ts: +(\d+)\.(\d{6})\)$")


@pytest.fixture(params=["x86_64", "i386"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="virtual")) as booted:
        booted.trace_arrays.top.functions.filter.write(b"gcd")
        booted.trace.set_tracer("function")
        yield booted


def _lines(kernel: Kernel) -> list[str]:
    return [line for line in kernel.trace.trace_text().splitlines() if not line.startswith("#")]


def test_func_stack_trace(kernel: Kernel) -> None:
    kernel.trace.options.set("func_stack_trace", 1)
    filters = kernel.trace_arrays.top.functions.filter
    filters.clear()
    filters.write(b"vfs_open")
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    syscalls.call(init, "close", syscalls.open(init, "/scratch", 0))
    call, title, *chain = _lines(kernel)
    assert ": vfs_open <-" in call
    assert title.endswith(": <stack trace>")
    names = [line.removeprefix(" => ") for line in chain]
    assert names[0] == "vfs_open"
    assert names.index("path_openat") < names.index("do_filp_open")


def test_repeated_calls_are_counted(kernel: Kernel) -> None:
    kernel.trace.options.set("func-no-repeats", 1)
    for _ in range(5):
        kernel.call("gcd", 12, 18)
    (only,) = _lines(kernel)
    assert ": gcd <-" in only
    kernel.trace_arrays.top.functions.filter.write(b"lcm")
    kernel.call("lcm", 12, 18)
    first, repeats, lcm, inner = _lines(kernel)
    found = REPEATS.search(repeats)
    assert found is not None
    assert found[1] == "4"
    last = float(f"{found[2]}.{found[3]}")
    assert _time(first) < last <= _time(repeats)
    assert ": lcm <-" in lcm
    assert ": gcd <-lcm" in inner


def test_repeats_raw_and_in_another_clock(kernel: Kernel) -> None:
    kernel.trace.options.set("func-no-repeats", 1)
    kernel.trace.set_clock("counter")
    for name in ("gcd", "gcd", "lcm"):
        kernel.trace_arrays.top.functions.filter.write(name.encode())
        kernel.call(name, 12, 18)
    text = kernel.trace.trace_text()
    assert re.search(r"\(repeats: 1, last_ts: +\d+\)$", text, re.M)
    kernel.trace.options.set("raw", 1)
    site = kernel.image.kallsyms.lookup_name("gcd")
    assert re.search(rf" {site} \d+ 1 \d+$", kernel.trace.trace_text(), re.M)


def test_with_both(kernel: Kernel) -> None:
    for name in ("func-no-repeats", "func_stack_trace"):
        kernel.trace.options.set(name, 1)
    for _ in range(3):
        kernel.call("gcd", 12, 18)
    assert [line.partition(": ")[2] for line in _lines(kernel)][1:2] == ["<stack trace>"]
    assert sum("<stack trace>" in line for line in _lines(kernel)) == 1


def _time(line: str) -> float:
    found = re.search(r" (\d+\.\d{6}): ", line)
    assert found is not None
    return float(found[1])


def test_several_arrays_ask_for_a_call_chain_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """If several trace arrays record call chains, the chain is determined once for each call, and all arrays
    record the same chain.
    """
    asked: list[list[int]] = []
    arrays = kernel.trace_arrays
    stack = arrays.top.array.system.stack
    find = type(stack).callers
    monkeypatch.setattr(
        type(stack), "callers", lambda self, regs: asked.append(find(self, regs)) or asked[-1]
    )
    several = [arrays.top, *(arrays.make(f"array{number}") for number in range(3))]
    for each in several:
        each.functions.filter.clear()
        each.functions.filter.write(b"vfs_open")
        each.functions.filter.write(b"path_openat")
        each.array.set_tracer("function")
        each.array.options.set("func_stack_trace", 1)
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    for _ in range(2):
        syscalls.call(init, "close", syscalls.open(init, "/scratch", 0))
    texts = [
        [line for line in each.array.trace_text().splitlines() if not line.startswith("#")]
        for each in several
    ]
    records = len([line for line in texts[0] if line.endswith("<stack trace>")])
    assert records == len(asked) >= 4
    names = [[line.rpartition(": ")[2] for line in text] for text in texts]
    assert all(each == names[0] for each in names)
    for each in several:
        each.array.set_tracer("nop")
        each.array.options.set("func_stack_trace", 0)
