"""Addresses in trace records: machine/kallsyms has a symbol for each of these addresses."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from tests.vfs.files import read, write

STEPS = {
    "stacktrace": {"events/kprobes/enable": "1", "options/stacktrace": "1"},
    "function": {"current_tracer": "function", "options/func_stack_trace": "1"},
    "function_graph": {"events/kprobes/enable": "1", "current_tracer": "function_graph"},
    "marker": {},
}


@pytest.fixture(params=["x86_64", "i386", "riscv64"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as booted:
        booted.tracing.kprobe_events.write(b"p:entry vfs_open\nr:exit do_filp_open\nr:closed filp_close\n")
        yield booted


@pytest.mark.parametrize("step", STEPS)
def test_each_address_has_a_symbol(kernel: Kernel, step: str) -> None:
    tree = kernel.filesystem()
    settings = {"options/sym-addr": "1", "set_ftrace_filter": "vfs_open path_openat close_fd", **STEPS[step]}
    for name, value in settings.items():
        for word in value.split():
            write(tree, f"/tracing/{name}", f"{word}\n")
    for _ in range(3):
        kernel.guest.close_file(kernel.guest.open_file("/tracing/trace", 0))
    write(tree, "/tracing/trace_marker", "a marker")
    text = read(tree, "/tracing/trace")
    symbols = [line.split(maxsplit=3) for line in read(tree, "/machine/kallsyms").splitlines()]
    names = {int(symbol[0], 16): symbol[2] for symbol in symbols if symbol[1] != "A"}
    starts = sorted(names)
    found = {int(address, 16) for address in re.findall(r"<([0-9a-f]{8,16})>", text)}
    assert found
    for address in found:
        start = starts[bisect_right(starts, address) - 1]
        assert address - start < 1 << 16
        assert kernel.tracing.symbols.symbol_at(address) is not None
    assert re.search(r"(<-|=> |: )0x[0-9a-f]+", text) is None
    if step == "function_graph":
        assert "/* a marker" in text
    else:
        (marker,) = re.findall(r"tracing_mark_write <([0-9a-f]+)>: a marker", text)
        assert names[int(marker, 16)] == "tracing_mark_write"
