"""Addresses in trace records: machine/kallsyms has a symbol for each of these addresses."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.symbols import ADDED_TEXT
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
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


def test_kallsyms_lists_the_trampolines(kernel: Kernel) -> None:
    """kallsyms lists each trampoline whose name files print, and a listed trampoline cannot be probed."""
    tree = kernel.filesystem()
    symbols = kernel.tracing.symbols
    write(tree, "/tracing/events/kprobes/enable", "1")
    write(tree, "/tracing/current_tracer", "function_graph")
    kernel.guest.close_file(kernel.guest.open_file("/tracing/trace", 0))
    lines = read(tree, "/machine/kallsyms").splitlines()
    generated = [address for pages in kernel.machine.text.generated for address in pages]
    found = {where.symbol for address in generated if (where := symbols.lookup(address)) is not None}
    assert {symbol.name for symbol in found} == ADDED_TEXT
    listed = [
        f"{symbol.address:0{len(lines[0].split()[0])}x} t {symbol.name}"
        for symbol in sorted(found, key=attrgetter("address"))
    ]
    at = lines.index(listed[0])
    assert lines[at : at + len(listed)] == listed
    for symbol in found:
        assert kernel.image.kallsyms.lookup_name(symbol.name) is None
        for place in (symbol.name, f"{symbol.address:#x}"):
            with pytest.raises(KernelError) as refused:
                write(tree, "/tracing/kprobe_events", f"p:trampoline {place}\n")
            assert refused.value.name in ("ENOENT", "EINVAL")


def test_a_page_of_kallsyms_starts_at_any_line(kernel: Kernel) -> None:
    symbols = kernel.tracing.symbols
    kernel.load_module("counter")
    write(kernel.filesystem(), "/tracing/events/kprobes/enable", "1")
    lines = list(symbols.kallsyms_lines(0, zero_addresses=False))
    first = next(number for number, line in enumerate(lines) if "[counter]" in line)
    assert any("arch_rethook_trampoline" in line for line in lines[first:])
    for start in range(first - 1, len(lines) + 2):
        assert list(symbols.kallsyms_lines(start, zero_addresses=False)) == lines[start:]
    hidden = list(symbols.kallsyms_lines(first, zero_addresses=True))
    assert [line.split(maxsplit=1)[1] for line in hidden] == [
        line.split(maxsplit=1)[1] for line in lines[first:]
    ]
    assert {int(line.split()[0], 16) for line in hidden} == {0}
