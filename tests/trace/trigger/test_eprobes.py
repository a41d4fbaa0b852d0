"""Event probes: definitions, errors, and the records that an event probe makes from records of
another event.
"""

from __future__ import annotations

import pytest

from emulated_kernel.trace.events.event_filters import EventFilters
from tests.trace.events.kernel import Hit, errno_of
from tests.trace.trigger.control import TriggerKernel

_NAME = 0xFFFF888000001000


@pytest.fixture
def kernel() -> TriggerKernel:
    """Return a kernel with a synthetic event `src` and a kprobe event `k`. An event probe can be attached
    only to `src`.
    """
    made = TriggerKernel()
    made.synthetic.write(b"src u64 ptr; pid_t pid; char name[]\n")
    made.define("p:k vfs_read\n")
    return made


def _write(kernel: TriggerKernel, text: str) -> None:
    kernel.kernel.dynamic_events.write(f"{text}\n".encode())


def _fire(kernel: TriggerKernel, pid: int = 1, name: bytes = b"cat", ptr: int = _NAME) -> None:
    event = kernel.synthetic.find("src")
    assert event is not None
    event.trace([ptr, pid, name], Hit(memory={_NAME: b"pointed\0"}))


def _lines(kernel: TriggerKernel) -> list[str]:
    return [*kernel.kernel.dynamic_events.records()][1:-1]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("e:ep synthetic.src", "e:eprobes/ep synthetic.src"),
        ("e:g/ep synthetic/src x=$pid", "e:g/ep synthetic.src x=$pid"),
        ("e synthetic.src $pid:u8", "e:eprobes/src synthetic.src arg1=$pid:u8"),
        ("e:g/ synthetic.src c=$comm:string", "e:g/src synthetic.src c=$comm:string"),
        ("e:ep synthetic.src p=+0($ptr):string if pid == 1", "e:eprobes/ep synthetic.src p=+0($ptr):string"),
    ],
)
def test_shown(kernel: TriggerKernel, written: str, shown: str) -> None:
    _write(kernel, written)
    assert [*kernel.kernel.dynamic_events.records()][-1] == f"{shown}\n"


@pytest.mark.parametrize(
    ("written", "name", "messages", "column"),
    [
        ("e:ep", "EINVAL", [], 0),
        ("e:ep src", "EINVAL", ["This requires both group and event name to attach"], 5),
        ("e:ep synthetic.none", "ENODEV", ["Attached event does not exist"], 5),
        ("e:ep kprobes.k", "ENODEV", ["Attached event does not exist"], 5),
        ("e:ep synthetic.src x=$none", "ENOENT", ["Attached event does not have this field"], 19),
        ("e:ep synthetic.src x=%di", "EINVAL", ["Invalid $-variable", "Invalid fetch argument"], 21),
        ("e:ep synthetic.src x=@none", "ENOENT", [], 0),
        ("e:ep synthetic.src if", "EINVAL", ["No filter rule after 'if'"], 22),
        ("e:ep synthetic.src if nothing == 1", "EINVAL", ["Field not found"], 8),
        ("e:1ep synthetic.src", "EINVAL", ["Event name must follow the same rules as C identifiers"], 2),
        ("e:/ep synthetic.src", "EINVAL", ["Group name is not specified"], 2),
    ],
)
def test_errors(kernel: TriggerKernel, written: str, name: str, messages: list[str], column: int) -> None:
    assert errno_of(lambda: _write(kernel, written)) == name
    records = kernel.errors().split("^\n")[:-1]
    assert len(records) == len(messages)
    for record, message in zip(records, messages, strict=True):
        assert f"error: {message}" in record
        assert len(record.splitlines()[-1]) == column + len("  Command: ")


def test_a_name_in_use(kernel: TriggerKernel) -> None:
    _write(kernel, "e:kprobes/k2 synthetic.src")
    assert errno_of(lambda: _write(kernel, "e:kprobes/k synthetic.src")) == "EEXIST"
    assert "Given group/event name is already used by another event" in kernel.errors()


def test_entries(kernel: TriggerKernel) -> None:
    _write(kernel, "e:ep synthetic.src p=$pid:s32 n=$name:string s=+0($ptr):string c=$comm:string if pid < 5")
    event = kernel.kernel.events.registry.find("eprobes", "ep")
    source = kernel.synthetic.find("src")
    assert event is not None
    assert source is not None
    file = event.file(kernel.kernel.recorder)
    file.enable()
    assert kernel.enabled("src") == "0*"
    assert "".join(kernel.triggers.records(source)).startswith("# Available triggers:")
    _fire(kernel)
    _fire(kernel, pid=7)
    ((recorded, payload),) = kernel.kernel.recorder.entries
    assert recorded is event
    text = event.print_record(payload, kernel.kernel.symbols)
    assert text == '(synthetic.src) p=1 n="cat" s="pointed" c="python3"'
    kernel.write("stacktrace", "src")
    assert kernel.show("src") == "stacktrace:unlimited\n"
    kernel.write("!stacktrace", "src")
    file.disable()
    assert kernel.enabled("src") == "0"


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("$name:string", '"cat and mouse"'),
        ("+0($name):string", '"cat and mouse"'),
        ("+4($name):string", '"and mouse"'),
        ("+0($name):u8", "99"),
        ("+1($name):x16", "0x7461"),
        ("+0($name):u8[3]", "{99,97,116}"),
        ("+0($name):b4@4/8", "6"),
        ("$name:ustring", "(fault)"),
        ("+0($name):ustring", "(fault)"),
        ("+13($name):u8", "0"),
        ("$comm:u8", "0"),
    ],
)
@pytest.mark.parametrize("type_", ["char name[]", "char name[16]"])
def test_strings_of_its_event_are_memory(
    kernel: TriggerKernel, type_: str, argument: str, shown: str
) -> None:
    """The value of a string field of the attached event is the string's address in the event's record."""
    kernel.synthetic.write(f"text u64 ptr; pid_t pid; {type_}\n".encode())
    _write(kernel, f"e:ep synthetic.text x={argument}")
    event, source = kernel.kernel.events.registry.find("eprobes", "ep"), kernel.synthetic.find("text")
    assert event is not None
    assert source is not None
    event.file(kernel.kernel.recorder).enable()
    source.trace([1, 2, b"cat and mouse"], Hit())
    ((_, payload),) = kernel.kernel.recorder.entries
    assert event.print_record(payload, kernel.kernel.symbols) == f"(synthetic.text) x={shown}"


@pytest.mark.parametrize(
    ("filtered", "within", "order"),
    [(False, False, "text ep"), (True, False, "ep text"), (True, True, "text ep")],
)
def test_where_its_entries_stand(kernel: TriggerKernel, filtered: bool, within: bool, order: str) -> None:
    """The record of an event probe follows the record of its event. If the event has a filter, the order is
    reversed.

    The event's record then waits in a spare page until the filter has decided. If this only spare page is in
    use, the order is as without a filter.
    """
    kernel.synthetic.write(b"text u64 ptr\n")
    _write(kernel, "e:ep synthetic.text x=$ptr")
    recorder, events = kernel.kernel.recorder, kernel.kernel.events
    probe, source = events.registry.find("eprobes", "ep"), kernel.synthetic.find("text")
    assert probe is not None
    assert source is not None
    for event in (probe, source):
        event.file(recorder).enable()
    if filtered:
        EventFilters(recorder, events.error_log).write(source, b"ptr > 0")
    source.trace([1], Hit(entry_waits=within))
    assert " ".join(event.name for event, _ in recorder.entries) == order
    recorder.entries.clear()
    source.file(recorder).disable()
    source.trace([1], Hit())
    assert [event.name for event, _ in recorder.entries] == ["ep"]


def test_format(kernel: TriggerKernel) -> None:
    _write(kernel, "e:ep synthetic.src p=$pid:s32 n=$name:string")
    event = kernel.kernel.events.registry.find("eprobes", "ep")
    assert event is not None
    assert event.format_text().partition("\n\n")[2] == (
        "\tfield:s32 p;\toffset:8;\tsize:4;\tsigned:1;\n"
        "\tfield:__data_loc char[] n;\toffset:12;\tsize:4;\tsigned:1;\n"
        "\n"
        'print fmt: " p=%d n=\\"%s\\"", REC->p, __get_str(n)\n'
    )


def test_removal(kernel: TriggerKernel) -> None:
    _write(kernel, "e:one synthetic.src p=$pid")
    _write(kernel, "e:two synthetic.src p=$pid")
    event = kernel.kernel.events.registry.find("eprobes", "one")
    assert event is not None
    event.file(kernel.kernel.recorder).enable()
    assert errno_of(lambda: _write(kernel, "-:one")) == "EBUSY"
    event.file(kernel.kernel.recorder).disable()
    assert errno_of(lambda: _write(kernel, "-:one synthetic/none")) == "ENOENT"
    assert errno_of(lambda: _write(kernel, "-:one synthetic.src q=$pid")) == "ENOENT"
    assert errno_of(lambda: kernel.synthetic.write(b"!src\n")) == "EBUSY"
    _write(kernel, "-:one synthetic.src p=$pid")
    _write(kernel, "-:eprobes/")
    assert event.is_removed
    kernel.synthetic.write(b"!src\n")
