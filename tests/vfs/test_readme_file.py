"""tracing/README, compared with Linux's: the files that it names, and the patterns that tools search for."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.trees.readme import readme_text
from tests.vfs import oracle
from tests.vfs.files import names, read

LINUX_NAMES = (
    "available_filter_functions", "buffer_size_kb", "buffer_total_size_kb", "current_tracer",
    "dynamic_events", "enable", "error_log", "events", "filter", "instances", "kprobe_events",
    "max_graph_depth", "saved_cmdlines_size", "set_ftrace_filter", "set_ftrace_notrace",
    "set_ftrace_notrace_pid", "set_ftrace_pid", "set_graph_function", "set_graph_notrace", "snapshot",
    "stack_max_size", "stack_trace", "stack_trace_filter", "synthetic_events", "timestamp_mode",
    "trace", "trace_clock", "trace_marker", "trace_marker_raw", "trace_options", "trace_pipe",
    "tracing_cpumask", "tracing_on", "trigger", "uprobe_events",
)  # fmt: skip
"""Files that the README of Linux 6.1 names."""
BY_PERF = (
    "*type: * x8/16/32/64,*",
    "*place (kretprobe): *",
    "*ref_ctr_offset*",
    "*u]<offset>*",
    "*Create/append/*",
    "*\\imm-value,*",
)
"""Patterns of lines that perf probe looks for, to know what it may write."""
BY_SELFTESTS = (
    "<attached-group>.<attached-event> [<args>]",
    "<var1>=<field|var_ref|numeric_literal>",
    "Create/append/",
    "char name[]' >> synthetic_events",
    "e[:[<group>/][<event>]] <attached-group>.<attached-event> [<args>]",
    "onchange(var)",
    "place (kretprobe): [<module>:]<symbol>",
    "place: [<module>:]<symbol>",
    "s:[synthetic/]",
    "snapshot()",
    "trace(<synthetic_event>",
    "x8/16/32/64",
    "$arg<N>",
    "<symbol>[+<offset>]%return",
    "r[maxactive]",
    "glob-matching-pattern",
    "imm-string",
    " <type>\\[<array-size>\\]",
)
"""Texts that Linux's selftests search for in README."""


README = readme_text(LINUX_6_1)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _lacks(text: str) -> list[str]:
    """Return the patterns of perf and of Linux's selftests that `text`, a tracing/README, does not match."""
    lines = text.splitlines()
    by_perf = [each for each in BY_PERF if not any(fnmatchcase(line, _glob(each)) for line in lines)]
    fetched = re.search(r"fetcharg:.*\n?.*\$comm", text)
    return (
        by_perf + [each for each in BY_SELFTESTS if each not in text] + ["$comm" for _ in [1] if not fetched]
    )


def _glob(pattern: str) -> str:
    return pattern.replace("[", "[[]")


def test_what_tools_search_for() -> None:
    assert _lacks(README) == []
    assert _lacks(README.replace("x8/16/32/64", "x8")) == [BY_PERF[0], "x8/16/32/64"]


@pytest.fixture(scope="module")
def present(unchanged: NodeTree) -> set[str]:
    """Return the names of the files in tracing/ and in the directory of an event."""
    return {*names(unchanged, "/tracing"), *names(unchanged, "/tracing/events/kprobes/a")}


def test_files_that_linuxs_names_are_named(unchanged: NodeTree, present: set[str]) -> None:
    text = read(unchanged, "/tracing/README")
    assert {*LINUX_NAMES} - present == set()
    assert {*LINUX_NAMES} - _words(text) == set()


def test_files_that_it_names_are_there(unchanged: NodeTree, present: set[str]) -> None:
    begins = re.findall(
        r"^ {2,6}([a-z_]+(?:, [a-z_]+/)?)\s+- ", read(unchanged, "/tracing/README"), re.MULTILINE
    )
    named = {name.rstrip("/") for each in begins for name in each.split(", ")}
    assert len(named) > 40
    assert named - present == set()


def test_the_recorded_one_has_them_too() -> None:
    linux = oracle.oracle_path("samples/README.tracefs").read_text()
    assert _lacks(linux) == []
    assert {*LINUX_NAMES} <= _words(linux)
    assert linux != README
