"""The formats of ftrace's own entries give the offsets at which the fields are written."""

from __future__ import annotations

import pytest

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.ftrace_entries import ftrace_entry_events
from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.trace.output.graph_output import GraphRecords
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, repeats_entry, stack_entry, user_stack_entry


@pytest.fixture(params=[4, 8])
def word(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def _event(name: str, word: int) -> TraceEvent:
    return next(event for event in ftrace_entry_events(word, LINUX_6_1) if event.name == name)


def _fields(name: str, word: int, payload: bytes) -> dict[str, int]:
    """Return name -> number in `payload`, for each field of the ftrace entry `name`.

    `word`: size of a word in bytes.
    """
    return {
        field.name: int.from_bytes(payload[field.offset - COMMON_SIZE :][: field.size], "little")
        for field in _event(name, word).fields
    }


def test_numbers_are_where_formats_say(word: int) -> None:
    graph, call = GraphRecords(word), (5).to_bytes(word, "little") + (6).to_bytes(word, "little")
    assert _fields("funcgraph_entry", word, graph.entered.pack(5, 6)) == {"func": 5, "depth": 6}
    returned = _fields("funcgraph_exit", word, graph.returned.pack(1, 2, 3, 4, 5))
    assert returned == {"func": 1, "depth": 2, "overrun": 3, "calltime": 4, "rettime": 5}
    assert _fields("function", word, call) == {"ip": 5, "parent_ip": 6}
    repeats = _fields("func_repeats", word, repeats_entry(call, 7, (8 << 32) + 9))
    assert repeats == {"ip": 5, "parent_ip": 6, "count": 7, "top_delta_ts": 8, "bottom_delta_ts": 9}


def test_stacks_have_eight_callers_or_as_many_as_they_say(word: int) -> None:
    callers = range(1, 9)
    in_order = sum(caller << 8 * word * index for index, caller in enumerate(callers))
    for name, payload, first in (
        ("kernel_stack", stack_entry(callers, word), "size"),
        ("user_stack", user_stack_entry(8, callers, word), "tgid"),
    ):
        found = _fields(name, word, payload)
        assert found == {first: 8, "caller[8]": in_order}


def test_the_text_of_a_format() -> None:
    lines = _event("kernel_stack", 8).format_text().splitlines()
    assert lines[:2] == ["name: kernel_stack", "ID: 4"]
    assert lines[8:10] == [
        "\tfield:int size;\toffset:8;\tsize:4;\tsigned:1;",
        "\tfield:unsigned long caller[8];\toffset:16;\tsize:64;\tsigned:0;",
    ]
    assert lines[11].startswith(r'print fmt: "\t=> %ps\n\t=> %ps\n\t=> %ps\n" "\t=> %ps')
    assert lines[11].endswith("(void *)REC->caller[6], (void *)REC->caller[7]")


def test_no_two_share_an_id() -> None:
    ids = [event.id for event in ftrace_entry_events(8, LINUX_6_1)]
    assert len(set(ids)) == len(ids) == 17
