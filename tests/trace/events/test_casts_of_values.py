"""Typecasts of any value, `$current` and per-CPU variables, as in Linux 7.3, on kprobefs's own kernel.

The texts and columns are those of Debian's 7.3.4; tests/oracle/inside/ compares more definitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.components import tracing
from emulated_kernel.image.types_file import load_types
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from tests.trace.events.test_btf_args import define, enable, values

LATER = Interface("linux-7.3", "7.3.0", InterfaceRule.of("7.3"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "interface_named", lambda _name: LATER)
        with Kernel(profile=profile_named("linux-7.2")) as kernel:
            yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    with shared.lock:
        shared.tracing.dynamic_events.clear()
        shared.trace.clear_trace()


def fetched(kernel: Kernel, definition: str) -> dict[str, str]:
    """Define an event `x`, let a client read a file four times, and return name -> value of the arguments.

    The values must be the same at all hits. From the second hit on, guest code handles the hits, if the
    arguments allow that.
    """
    define(kernel, definition)
    mount, client = kernel.mount(), Client(4001, 0, 0)
    handle = mount.create(client, "/scratch/read", 0o640, 2)
    enable(kernel, "x")
    for _ in range(4):
        mount.read(client, handle, 10, 0)
    enable(kernel, "x", on=False)
    mount.release(handle)
    texts = values(kernel, "x")
    assert len(texts) >= 4
    assert len(set(texts)) == 1
    return dict(re.findall(r"(\w+)=(\S+)", texts[0]))


@pytest.mark.parametrize("handled", ["in guest code", "in Python"])
def test_values(kernel: Kernel, handled: str) -> None:
    """Typecasts, `$current` and per-CPU pointers have the values of the kernel's structures. Guest code can
    fetch all of these values except per-CPU pointers.
    """
    more = "" if handled == "in guest code" else " here=this_cpu_ptr(%di)"
    arguments = (
        "who=$current->pid own=$current cast=(task_struct)$current->pid plain=(file)%di->f_flags"
        " flags=file->f_flags deep=(inode)((file)%di->f_inode)->i_ino ino=file->f_inode->i_ino file=%di"
    )
    found = fetched(kernel, f"p:x vfs_read {arguments}{more}")
    assert found["who"] == found["cast"] == "4001"
    assert int(found["own"], 16) >> 40
    assert found["plain"] == found["flags"]
    assert found["deep"] == found["ino"]
    if more:
        base = kernel.machine.per_cpu_bases[0]
        assert int(found["here"], 16) == int(found["file"], 16) + base & (1 << 64) - 1


def test_a_pointer_to_a_member(kernel: Kernel) -> None:
    """A typecast `(STRUCT,MEMBER)` takes a value as the address of MEMBER within a STRUCT.

    Here the first field is read at its offset minus the offset of MEMBER.
    """
    btf = load_types(kernel.image.path)
    assert btf is not None
    distance = btf.offset("file.f_inode") - btf.offset("file.f_flags")
    found = fetched(kernel, f"p:x vfs_read cast=(file,f_flags)%di->f_inode raw=+{distance}(%di):x64")
    assert found["cast"] == found["raw"]


@pytest.mark.parametrize(
    ("argument", "name", "text", "column"),
    [
        ("(no_struct)%di->x", "EINVAL", "This is not a pointer to union/structure.", 1),
        ("(file)%di->nothing", "ENOENT", "This field is not found.", 11),
        ("(file)%di", "EINVAL", "Typecast requires a field access", 9),
        ("(file)(%di)", "EINVAL", "Typecast requires a field access", 11),
        ("(file)(%di", "EINVAL", "Dereference brace is not closed", 6),
        ("(file", "EINVAL", "Dereference brace is not closed", 5),
        ("(file)+8%di->f_flags", "EINVAL", "Dereference needs a brace", 6),
        ("(file)@vfs_read+4->f_flags", "EINVAL", "@SYM+/-OFFSET with typecast needs parentheses", 6),
        ("(file,nothing)%di->f_flags", "ENOENT", "This field is not found.", 6),
        ("(file,f_inode->i_ino)%di->f_flags", "EINVAL", "Typecast field option does not support", 13),
        ("$current->nothing", "ENOENT", "This field is not found.", 10),
        ("$current-pid", "EINVAL", "Failed to parse single hyphen", 8),
        ("$currently", "EINVAL", "Invalid $-variable specified", 0),
        ("this_cpu_read(%di", "EINVAL", "Dereference brace is not closed", 17),
        ("this_cpu_ptr($comm)", "EINVAL", "$comm can not be dereferenced", 13),
        (f"{'+0(' * 9}%di{')' * 9}", "E2BIG", "Too many nested typecasts/dereferences", 24),
        ("x" * 256, "E2BIG", "Argument expression is too long", 0),
    ],
)
def test_refusals(kernel: Kernel, argument: str, name: str, text: str, column: int) -> None:
    with pytest.raises(KernelError) as refused:
        define(kernel, f"p:x vfs_read {argument}")
    log = kernel.read_file("tracing/error_log").splitlines()
    assert refused.value.name == name
    assert log[-3].partition("error: ")[2].startswith(text)
    assert log[-1].index("^") == len("  Command: p:x vfs_read ") + column
