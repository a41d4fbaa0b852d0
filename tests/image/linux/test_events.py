"""Trace events and system calls are read from structures whose layout is known only from BTF."""

from __future__ import annotations

import io
import struct

import pytest

from emulated_kernel.image.linux import kernel_events
from emulated_kernel.image.linux.kernel_events import with_values
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.vmlinux import Vmlinux
from emulated_kernel.image.trace_events import FieldDefinition
from emulated_kernel.util.errors import KernelError
from tests.image.linux import made

TRACEPOINT = 16


def types(*, tells_length: bool = True) -> bytes:
    """Return BTF of structures whose members have an order that no kernel has.

    `tells_length`: the structure of a field has a member for the length of an array, as since Linux 5.16.
    """
    btf = made.Btf()
    number = btf.add(1, "int", 4, struct.pack("<I", 32))
    pointer = btf.add(2)
    btf.enum("flags", TRACE_EVENT_FL_TRACEPOINT=TRACEPOINT)
    either = btf.structure("", 8, ("name", pointer, 0), ("tp", pointer, 0), union=True)
    btf.structure(
        "trace_event_call",
        40,
        ("flags", number, 0),
        ("class", pointer, 8),
        ("", either, 16),
        ("print_fmt", pointer, 24),
    )
    btf.structure("trace_event_class", 24, ("fields_array", pointer, 8), ("system", pointer, 16))
    details = btf.structure(
        "",
        32,
        ("size", number, 8),
        ("name", pointer, 0),
        ("align", number, 12),
        ("is_signed", number, 16),
        *((("len", number, 20),) if tells_length else ()),
    )
    inside = btf.structure("", 32, ("", details, 0), ("define_fields", pointer, 0), union=True)
    btf.structure("trace_event_fields", 40, ("", inside, 0), ("type", pointer, 32))
    btf.structure("tracepoint", 16, ("key", number, 0), ("name", pointer, 8))
    btf.structure(
        "trace_eval_map", 24, ("eval_value", pointer, 0), ("eval_string", pointer, 8), ("system", pointer, 16)
    )
    btf.structure(
        "syscall_metadata",
        32,
        ("nb_args", number, 0),
        ("name", pointer, 8),
        ("types", pointer, 16),
        ("args", pointer, 24),
    )
    return btf.data()


def kernel(*, tells_length: bool = True) -> LinuxKernel:
    built = made.Kernel()
    built.table("BTF", types(tells_length=tells_length))
    text = built.area.string
    names = {
        name: text(name)
        for name in ("sched", "waking", "int", "pid", "char[16]", "comm", "read", "sys_read", "fd")
    }
    fmt, state, other = text('"STATE %d", REC->pid + STATE'), text("STATE"), text("plain")
    area = built.area

    def field(kind: int, name: int, *words: int) -> bytes:
        return struct.pack("<Q4I8xQ", name, *words, kind)

    fields = area.add(
        field(names["int"], names["pid"], 4, 4, 1, 0)
        + field(names["char[16]"], names["comm"], 16, 1, 0, 16 if tells_length else 99)
        + bytes(40)
    )
    code_defined = area.add(field(0xFFFF, names["pid"], 0, 0, 0, 0) + bytes(40))
    classes = [area.add(struct.pack("<QQQ", 0, array, names["sched"])) for array in (fields, code_defined, 0)]
    tracepoint = area.add(struct.pack("<QQ", 0, names["waking"]))
    calls = [
        area.add(struct.pack("<QQQQ", TRACEPOINT, classes[0], tracepoint, fmt)),
        area.add(struct.pack("<QQQQ", 0, classes[1], other, 0)),
        area.add(struct.pack("<QQQQ", 0, classes[2], other, 0)),
    ]
    explained = area.add(struct.pack("<QQQ", (1 << 64) - 3, state, names["sched"]))
    built.table("ftrace_events", struct.pack("<3Q", *calls))
    built.table("ftrace_eval_maps", struct.pack("<Q", explained))
    arrays = [area.add(struct.pack("<Q", names[each])) for each in ("int", "fd")]
    call = area.add(struct.pack("<QQQQ", 1, names["sys_read"], *arrays))
    without = area.add(struct.pack("<QQQQ", 0, text("sys_gone"), 0, 0))
    built.table("syscalls_metadata", struct.pack("<QQ", call, without))
    entries = [built.function(f"__x64_sys_{name}", b"\xc3") for name in ("write", "read")]
    built.define("sys_call_table", struct.pack("<3Q", *entries, 0))
    return LinuxKernel(Vmlinux(io.BytesIO(built.elf())))


@pytest.mark.parametrize("tells_length", [True, False])
def test_events_have_names_fields_and_formats_with_values(*, tells_length: bool) -> None:
    waking, by_code, none = kernel(tells_length=tells_length).events
    assert (waking.system, waking.name) == ("sched", "waking")
    assert waking.print_fmt == '"STATE %d", REC->pid + -3'
    assert waking.fields == (
        FieldDefinition("int", "pid", 4, 4, True, 0),
        FieldDefinition("char[16]", "comm", 16, 1, False, 16),
    )
    assert (by_code.name, by_code.print_fmt, by_code.fields) == ("plain", "", ())
    assert none.fields == ()


def test_texts_that_are_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total length of texts is limited, because all events and fields of a damaged kernel may use one
    long text.
    """
    monkeypatch.setattr(kernel_events, "_MAX_TEXT", 40)
    with pytest.raises(KernelError, match="texts without end"):
        _ = kernel().events
    assert len(kernel().syscalls) == 2
    monkeypatch.setattr(kernel_events, "_MAX_TEXT", 3)
    with pytest.raises(KernelError, match="texts without end"):
        _ = kernel().syscalls


def test_system_calls_have_numbers_and_parameters() -> None:
    read, gone = kernel().syscalls
    assert (read.nr, read.name, read.types, read.args) == (1, "sys_read", ("int",), ("fd",))
    assert (gone.nr, gone.args) == (-1, ())


def test_constants_in_strings_and_in_longer_names_stay() -> None:
    values = {"A": 7}
    assert with_values('"A %d \\" A", A + AA + REC->A_, A', values) == '"A %d \\" A", 7 + AA + REC->A_, 7'
    assert with_values("sizeof(x_t) * sizeof(y_t)", {"sizeof(x_t)": 8}) == "8 * sizeof(y_t)"
