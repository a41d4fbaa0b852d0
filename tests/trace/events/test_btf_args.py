"""Arguments of events as in Linux 6.12: names from BTF, `$arg*`, entry arguments of return events, %pd, and
refusals.

The texts and columns are those of Debian's 6.12.117; tests/oracle/inside/ compares more definitions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client

CLIENT = Client(4001, 0, 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-6.12")) as kernel:
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    with shared.lock:
        shared.tracing.dynamic_events.clear()


def define(kernel: Kernel, line: str) -> str:
    """Write a definition to dynamic_events, and return the new content of that file."""
    with kernel.lock:
        kernel.tracing.dynamic_events.write(line.encode() + b"\n")
    return "".join(kernel.tracing.dynamic_events.records())


def enable(kernel: Kernel, *names: str, on: bool = True) -> None:
    """Enable or disable the named events, which are in the groups kprobes and fprobes."""
    find = kernel.tracing.kprobe_events.registry.find
    with kernel.lock:
        for name in names:
            event = find("kprobes", name) or find("fprobes", name)
            assert event is not None
            (event.enable if on else event.disable)(kernel.trace)


def values(kernel: Kernel, *names: str) -> list[str]:
    """Return the records of the named events in the trace, as texts with the event's name and
    arguments only.
    """
    found = []
    for line in kernel.trace.trace_text().splitlines():
        head, place, rest = line.partition(": (")
        name = head.split()[-1]
        if place and name in names:
            found.append(name + rest.partition(")")[2])
    return found


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("p:x vfs_read $arg*", "p:kprobes/x vfs_read file=file buf=buf count=count pos=pos"),
        ("p:x vfs_read $arg1 $arg3:u8", "p:kprobes/x vfs_read file=file count=count:u8"),
        ("p:x vfs_read a=$arg1", "p:kprobes/x vfs_read a=$arg1"),
        ("p:x vfs_read count %di", "p:kprobes/x vfs_read count=count arg2=%di"),
        ("r:x vfs_read $retval $arg*", "arg1=$retval file=file buf=buf count=count pos=pos"),
        ("p:x vfs_read file:%pD", "p:kprobes/x vfs_read arg1=+0x0(+0x20(+0x8(file))):string"),
        ("f vfs_read count", "f:fprobes/vfs_read__entry vfs_read count=count"),
        ("f vfs_read count $retval", "f:fprobes/vfs_read__exit vfs_read%return count=count arg2=$retval"),
        ("p:x vfs_read %di:char", "p:kprobes/x vfs_read arg1=%di:char"),
    ],
)
def test_shown(kernel: Kernel, command: str, shown: str) -> None:
    assert define(kernel, command).endswith(f"{shown}\n")


@pytest.mark.parametrize(
    ("command", "name", "text", "column"),
    [
        ("p:x vfs_read nothing", "ENOENT", "This variable is not found at this probe point", 13),
        ("p:x vfs_read+3 count", "EINVAL", "BTF is not available or not supported", 15),
        (
            "p:x vfs_read file.f_flags",
            "EOPNOTSUPP",
            "Non pointer structure/union argument is not supported.",
            18,
        ),
        ("p:x vfs_read file-f_flags", "EINVAL", "Failed to parse single hyphen. Forgot '>'?", 17),
        ("p:x vfs_read file->nothing", "ENOENT", "This field is not found.", 19),
        ("p:x vfs_read file->", "ENOENT", "This field is not found.", 19),
        ("p:x vfs_read x=file->f_path.no", "ENOENT", "This field is not found.", 28),
        ("p:x vfs_read count->x", "EINVAL", "This is not a pointer to union/structure.", 20),
        ("p:x vfs_read file:string", "EINVAL", "This type does not fit for string.", 13),
        ("p:x vfs_read $arg0", "EINVAL", "Invalid argument number", 13),
        ("p:x vfs_read $arg5", "ENOENT", "This variable is not found at this probe point", 13),
        ("p:x vfs_read $arg* $arg*", "EINVAL", "$arg* can be used only once in the parameters", 19),
        ("p:x vfs_read+3 $arg*", "EINVAL", "$arg* can be used only on function entry or exit", 15),
        ("p:x vfs_read x=$arg*", "EINVAL", "Invalid $-variable specified", 15),
        ("p:x vfs_read $comm:u8", "EINVAL", "$comm and immediate-string only accepts string type", 19),
        ("p8:x vfs_read", "EINVAL", "Maxactive is only for function exit", 1),
        ("p:x no_such_function", "EINVAL", "Invalid probed address or symbol", 4),
        ("p:x vfs_read " + "+0(" * 21 + "%di" + ")" * 20, "E2BIG", "Argument expression is too long", 13),
        ("f8:x vfs_read", "EINVAL", "Maxactive is only for function exit", 1),
        ("f:x vfs_read %di", "EINVAL", "Invalid fetch argument", 13),
        ("f:x vfs_read%nothing", "EINVAL", "Invalid probed address suffix", 12),
        ("f:x no_such_function", "EINVAL", "Failed to register probe event", 4),
        ("f:x no_such_function @no_such_symbol", "ENOENT", "Invalid probed address or symbol", 4),
        ("r:x kfree $retval", "ENOENT", "This function returns 'void' type", 10),
    ],
)
def test_refused(kernel: Kernel, command: str, name: str, text: str, column: int) -> None:
    with pytest.raises(KernelError) as refused:
        define(kernel, command)
    assert refused.value.name == name
    log = kernel.tracing.kprobe_events.error_log.records()[-1].splitlines()
    assert log[0].partition("error: ")[2] == text
    assert log[2].index("^") - len("  Command: ") == column


def test_too_many_arguments_are_refused_without_an_entry(kernel: Kernel) -> None:
    log = kernel.tracing.kprobe_events.error_log
    log.clear()
    with pytest.raises(KernelError) as refused:
        define(kernel, "p:x vfs_read" + " %di" * 129)
    assert refused.value.name == "E2BIG"
    assert log.records() == []


def test_records(kernel: Kernel) -> None:
    """Arguments by name have the values of the registers, at entries and returns, in Python and in guest
    code.
    """
    lines = (
        "p:in gcd $arg* same=%di",
        "r:out gcd $retval b a",
        "f:fin gcd $arg* c=a:char",
        "f:fout gcd $retval b",
        "f:many gcd* $arg2",
    )
    for line in lines:
        define(kernel, line)
    names = ("in", "out", "fin", "fout", "many")
    enable(kernel, *names)
    for _ in range(3):
        assert kernel.call("gcd", 75, 100) == 25
    enable(kernel, *names, on=False)
    found = values(kernel, *names)
    assert sorted(found) == sorted(
        3
        * [
            "in a=75 b=100 same=0x4b",
            "out arg1=25 b=100 a=75",
            "fin a=75 b=100 c='K'",
            "fout arg1=25 b=100",
            "many arg1=0x64",
        ]
    )


def test_fields_of_structures_are_read(kernel: Kernel) -> None:
    """Arguments such as `file->f_path.dentry->d_name.name` read fields of structures, with the same results
    as explicit offsets.
    """
    types = kernel.tracing.kprobe_events._engine.types()
    assert types is not None
    dentry = types.offset("file.f_path.dentry")
    name = types.offset("dentry.d_name.name")
    define(
        kernel,
        f"p:fields vfs_write n=file->f_path.dentry->d_name.name:string o=+0(+{name}(+{dentry}(%di))):string "
        "d=file:%pD l=file->f_path.dentry->d_name.len count",
    )
    define(kernel, "r:back vfs_write $retval n=file->f_path.dentry->d_name.name:string")
    enable(kernel, "fields", "back")
    mount = kernel.mount()
    handle = mount.create(CLIENT, "/scratch/named", 0o600, os.O_RDWR)
    for size in (5, 3, 4):
        assert mount.write(CLIENT, handle, bytes(size), 0) == size
    mount.release(handle)
    enable(kernel, "fields", "back", on=False)
    assert values(kernel, "fields", "back") == [
        text
        for size in (5, 3, 4)
        for text in (
            f'fields n="named" o="named" d="named" l=5 count={size}',
            f'back arg1={size} n="named"',
        )
    ]


def test_a_return_keeps_values_and_reads_memory_late(kernel: Kernel) -> None:
    """A return event keeps the pointers that the function got at its entry, and reads the memory behind the
    pointers at the return.
    """
    define(kernel, "p:before strim text=+0($arg1):string")
    define(kernel, "r:after strim arg=$arg1 ret=$retval text=+0($arg1):string")
    enable(kernel, "before", "after")
    start = kernel.call("strim", "text  ")
    assert values(kernel, "before", "after") == [
        'before text="text  "',
        f'after arg={start:#x} ret={start:#x} text="text"',
    ]
    enable(kernel, "before", "after", on=False)


def test_an_image_without_types_has_no_arguments_by_name() -> None:
    with Kernel(MachineConfig(arch="i386"), profile=profile_named("linux-6.12")) as kernel:
        for command in ("p:x vfs_read count", "p:x vfs_read $arg*", "p:x vfs_read $arg1:%pD"):
            with pytest.raises(KernelError) as refused:
                define(kernel, command)
            assert refused.value.name == "EOPNOTSUPP"
        assert define(kernel, "p:x vfs_read $arg1").endswith(" arg1=$arg1\n")
        with kernel.lock:
            kernel.tracing.dynamic_events.clear()
