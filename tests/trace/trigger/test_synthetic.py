"""Synthetic events: their grammar, files, entries and errors."""

from __future__ import annotations

import pytest

from emulated_kernel.trace.synth.synth_event import SyntheticEvent
from tests.trace.events.kernel import Hit, errno_of
from tests.trace.trigger.control import TriggerKernel


@pytest.fixture
def kernel() -> TriggerKernel:
    return TriggerKernel()


def _find(kernel: TriggerKernel, name: str) -> SyntheticEvent:
    event = kernel.synthetic.find(name)
    assert event is not None
    return event


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("e u64 a", "e\tu64 a\n"),
        ("e  u64 a pid_t b", "e\tu64 a; pid_t b\n"),
        ("e u64 a;pid_t b;", "e\tu64 a; pid_t b\n"),
        ("e unsigned char a; bool b;; gfp_t c", "e\tunsigned char a; bool b; gfp_t c\n"),
        ("e char a[16]; char b[]", "e\tchar[16] a; char[] b\n"),
        ("e unsigned long a[]", "e\tunsigned long[] a\n"),
        ("e char a[0]", "e\tchar[0] a\n"),
        ("  e\tint a # comment", "e\tint a\n"),
    ],
)
def test_shown(kernel: TriggerKernel, written: str, shown: str) -> None:
    kernel.synthetic.write(f"{written}\n".encode())
    assert "".join(kernel.synthetic.records()) == shown
    assert "".join(kernel.kernel.dynamic_events.records()) == f"s:synthetic/{shown}"


@pytest.mark.parametrize(
    ("written", "name", "message", "column"),
    [
        ("", "", "", 0),
        ("e", "EINVAL", "Command must be of the form: <name> field[;field] ...", 0),
        ("e u64", "EINVAL", "Command must be of the form: <name> field[;field] ...", 0),
        ("e ;u64 a", "EINVAL", "Command must be of the form: <name> field[;field] ...", 0),
        ("1e u64 a", "EINVAL", "Illegal name", 0),
        ("e u64 a-b", "EINVAL", "Illegal name", 6),
        ("e u65 a", "EINVAL", "Invalid type", 2),
        ("e u64 a[4]", "EINVAL", "Invalid type", 2),
        ("e char a[257]", "EINVAL", "Invalid array specification", 7),
        ("e char a[1024]", "EINVAL", "Invalid array specification", 7),
        ("e char a[4", "EINVAL", "Invalid array specification", 7),
        ("e char a[x]", "EINVAL", "Invalid array specification", 7),
        ("e u64 a; unsigned int", "EINVAL", "Incomplete type", 9),
        ("e u64 a; u64", "EINVAL", "Invalid field", 2),
        ("e " + "; ".join(f"u8 f{n}" for n in range(65)), "EINVAL", "Too many fields", 0),
        ("!e", "ENOENT", "", 0),
        ("!e u64 a", "ENOENT", "", 0),
    ],
)
def test_errors(kernel: TriggerKernel, written: str, name: str, message: str, column: int) -> None:
    assert errno_of(lambda: kernel.synthetic.write(f"{written}\n".encode())) == name
    expected = f"synthetic_events: error: {message}\n  Command: {written}\n{' ' * (11 + column)}^\n"
    assert kernel.errors() == (expected if message else "")
    assert list(kernel.synthetic.records()) == []


@pytest.mark.parametrize(
    ("written", "name", "message"),
    [
        ("s:e u64 a", "", ""),
        ("s:synthetic/e u64 a", "", ""),
        ("s:other/e u64 a", "EINVAL", "Command must be of the form: s or -:[synthetic/]<name>"),
        ("s:e", "EINVAL", "Command must be of the form: <name>"),
        ("s: u64 a b", "EINVAL", "Command must be of the form: <name>"),
        ("s u64 a", "EINVAL", ""),
    ],
)
def test_dynamic_events(kernel: TriggerKernel, written: str, name: str, message: str) -> None:
    assert errno_of(lambda: kernel.kernel.dynamic_events.write(f"{written}\n".encode())) == name
    assert message in kernel.errors()


def test_removal(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"one u64 a\ntwo u64 a\n")
    assert errno_of(lambda: kernel.synthetic.write(b"one u64 a\n")) == "EEXIST"
    kernel.synthetic.write(b"!one\n")
    kernel.kernel.dynamic_events.write(b"-:synthetic/two\n")
    assert list(kernel.synthetic.records()) == []


def test_an_enabled_event_stays(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"one u64 a\n")
    event = _find(kernel, "one")
    event.file(kernel.kernel.recorder).enable()
    assert errno_of(kernel.synthetic.clear) == "EBUSY"
    event.file(kernel.kernel.recorder).disable()
    kernel.synthetic.clear()
    assert event.is_removed
    assert kernel.kernel.recorder.removed == [event]


def test_format(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"e u64 lat; s8 small; char name[16]; char text[]; unsigned long stack[]\n")
    text = _find(kernel, "e").format_text()
    assert text.partition("\n\n")[2] == (
        "\tfield:u64 lat;\toffset:8;\tsize:8;\tsigned:0;\n"
        "\tfield:s8 small;\toffset:16;\tsize:1;\tsigned:1;\n"
        "\tfield:char name[];\toffset:24;\tsize:16;\tsigned:1;\n"
        "\tfield:__data_loc char[] text;\toffset:280;\tsize:8;\tsigned:1;\n"
        "\tfield:__data_loc unsigned long[] stack;\toffset:288;\tsize:8;\tsigned:1;\n"
        "\n"
        'print fmt: "lat=%llu, small=%d, name=%s, text=%s, stack=%s", REC->lat, REC->small, REC->name, '
        "__get_str(text), __get_stacktrace(stack)\n"
    )


def test_entries(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"e s64 a; s8 b; pid_t c; char d[8]; char e[]; gfp_t f\n")
    event = _find(kernel, "e")
    event.file(kernel.kernel.recorder).enable()
    minus = (1 << 64) - 1
    event.trace([minus, minus, minus, b"fixed", b"dynamic", 0xCC0], Hit())
    (_, payload) = kernel.kernel.recorder.entries[0]
    text = event.print_record(payload, kernel.kernel.symbols)
    assert text == "a=-1 b=255 c=-1 d=fixed e=dynamic f=cc0 (0xcc0)"
    kernel.kernel.filters.write(event, b'd == "fixed" && e ~ "dyn*" && c == -1')
    event.trace([0, 0, minus, b"fixed", b"dynamic", 0], Hit())
    event.trace([0, 0, minus, b"fixed", b"other", 0], Hit())
    assert len(kernel.kernel.recorder.entries) == 2


def test_a_trace_array_that_goes_keeps_nothing(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"e u64 a\n")
    kernel.write("hist:keys=a", "e")
    assert errno_of(kernel.synthetic.clear) == "EBUSY"
    kernel.triggers.clear()
    kernel.synthetic.clear()
    assert list(kernel.synthetic.records()) == []
