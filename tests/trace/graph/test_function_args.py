"""The options func-args and funcgraph-args of later Linux versions, which add arguments to the records of
calls.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.events.ftrace_entries import ftrace_entry_events
from emulated_kernel.trace.interface import Interface, InterfaceRule, interface_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.files import Files

CLIENT = Client(4001, 0, 0)
RULES = interface_named("linux-7.2").rules


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def mount(shared: Kernel) -> Mount:
    return shared.mount()


@pytest.fixture
def files(mount: Mount) -> Iterator[Files]:
    """Yield the files of the kernel, with a function filter that selects gcd and two functions that open a
    file.
    """
    found = Files(mount, CLIENT)
    for name in ("gcd", "do_sys_openat2", "do_filp_open"):
        found.write("/tracing/set_ftrace_filter", f"{name}\n", os.O_WRONLY | os.O_APPEND)
    yield found
    found.write("/tracing/current_tracer", "nop")
    for name in ("func-args", "funcgraph-args", "func_stack_trace"):
        found.write(f"/tracing/options/{name}", "0")
    found.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)


def recorded(files: Files, tracer: str) -> list[str]:
    """Return the trace's lines of a call of gcd and of the opening of a file, without the columns before the
    function.
    """
    files.write("/tracing/current_tracer", tracer)
    files.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
    files.write("/machine/call", "gcd 12 8\n")
    files.mount.release(files.mount.create(CLIENT, "/scratch/opened", 0o640, os.O_RDWR))
    lines = files.read("/tracing/trace").splitlines()
    return [re.sub(r"^.*?(: |\| +)", "", line) for line in lines if not line.startswith("#")]


def test_calls_of_the_function_tracer(files: Files) -> None:
    without = recorded(files, "function")
    assert any(line.startswith("gcd <-") for line in without)
    files.write("/tracing/options/func-args", "1")
    found = recorded(files, "function")
    assert any(line.startswith("gcd(a=0xc, b=0x8) <-") for line in found)
    assert len(found) == len(without)
    opened = next(line for line in found if line.startswith("do_sys_openat2"))
    assert re.match(r"do_sys_openat2\(dfd=-?\d+, filename=0x[0-9a-f]+, how=0x[0-9a-f]+\) <-", opened)


def test_calls_of_the_function_graph(files: Files) -> None:
    """The function graph shows the same calls with and without arguments. Guest code records calls without
    arguments; Python records calls with arguments.
    """
    without = recorded(files, "function_graph")
    files.write("/tracing/options/funcgraph-args", "1")
    found = recorded(files, "function_graph")
    assert "gcd();" in without
    assert "gcd(a=0xc, b=0x8);" in found
    assert [re.sub(r"\(.*\)", "()", line) for line in found] == without
    assert any(re.fullmatch(r"do_sys_openat2\(dfd=-?\d+, .*\) \{", line) for line in found)


def test_options_that_exclude_each_other(files: Files) -> None:
    files.write("/tracing/current_tracer", "function")
    files.write("/tracing/options/func_stack_trace", "1")
    with pytest.raises(KernelError) as refused:
        files.write("/tracing/options/func-args", "1")
    assert refused.value.errno == errno.EINVAL


def test_the_options_came_with_the_arguments(mount: Mount) -> None:
    with Kernel(profile=profile_named("linux-6.12")) as older:
        names = [
            {entry.name for entry in each.readdir("/tracing/options")} for each in (older.mount(), mount)
        ]
    assert names[1] - names[0] >= {"func-args", "funcgraph-args"}
    assert {name for name in names[0] if name.endswith("-args")} == set()


@pytest.mark.parametrize(
    ("rules", "depth", "shown"),
    [
        (RULES, "unsigned long depth;\toffset:16;\tsize:8;\tsigned:0;", "(%lu)"),
        (
            RULES - {InterfaceRule.GRAPH_DEPTH_WORD},
            "unsigned int depth;\toffset:16;\tsize:4;\tsigned:0;",
            "(%u)",
        ),
    ],
)
def test_formats(rules: frozenset[InterfaceRule], depth: str, shown: str) -> None:
    """The formats of entries for calls are those of Linux 7.2, and of 6.16, where the field `depth` is
    shorter.
    """
    events = {
        event.name: event.format_text() for event in ftrace_entry_events(8, Interface("linux", "7", rules))
    }
    args = "\tfield:unsigned long args[];\toffset:24;\tsize:0;\tsigned:0;\n"
    assert args in events["function"]
    assert f"\tfield:{depth}\n{args}" in events["funcgraph_entry"]
    assert f'print fmt: "--> %ps {shown}", ' in events["funcgraph_entry"]
    assert "\tfield:unsigned int depth;\toffset:16;\tsize:4;\tsigned:0;\n" in events["funcgraph_exit"]
