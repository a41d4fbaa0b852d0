"""`kprobefs apply` and `kprobefs check` give the same advice about a definition without a place to probe."""

from __future__ import annotations

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Client
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.syntax import Line, advice
from kprobefs.definitions.tracefs_files import TreeFiles
from kprobefs.plan.answer import UNCHECKED
from kprobefs.plan.check import check_lines
from kprobefs.plan.planned_kernel import planned_kernel

NO_PLACE = "a definition needs a place; write "
SOURCE_LINE = "a source line is no place; `kprobefs explain net/ipv4/tcp.c:1483` gives the offset"
CASES = {
    "p:vfs_read": f"{NO_PLACE}p:NAME vfs_read",
    "p": f"{NO_PLACE}p:NAME PLACE",
    "r4:mine/vfs_read": f"{NO_PLACE}r4:NAME vfs_read",
    "p:vfs_read count=$arg3": f"{NO_PLACE}p:NAME vfs_read count=$arg3",
    "p:vfs_read $arg3 %di": f"{NO_PLACE}p:NAME vfs_read $arg3 %di",
    "p:vfs_read +0($arg1)": f"{NO_PLACE}p:NAME vfs_read +0($arg1)",
    "p:tcpline net/ipv4/tcp.c:1483": SOURCE_LINE,
    "p net/ipv4/tcp.c:1483 size=$arg3": SOURCE_LINE,
    "hello": "neither a definition nor 'FILE = VALUE'",
}
"""Line -> text that the message of `apply` ends with, and that the message of `check` contains."""


@pytest.fixture(scope="module")
def files() -> TreeFiles:
    return TreeFiles(Kernel().filesystem(), Client(1, 0, 0))


@pytest.mark.parametrize("text", CASES)
def test_apply_and_check_give_the_same_advice(files: TreeFiles, text: str) -> None:
    (failed,) = Loader(files).apply([Line("x", 1, text)])
    assert failed.splitlines()[0].endswith(CASES[text])
    (answer,) = check_lines(planned_kernel("x86_64", None, None, None), [Line("x", 1, text)])
    (finding,) = answer.findings
    assert CASES[text] in finding.message
    assert answer.is_error is (CASES[text] != SOURCE_LINE)


@pytest.mark.parametrize(
    "text",
    [
        "p:e vfs_read",
        "r int_sqrt%return r=$retval",
        "p 0xffffffff81000000 a=%di",
        "p:e /a=b:0x10",
        "p ./x:1",
        "f:e vfs_read a=$arg1",
        "s:e u64 lat; pid_t pid",
        "-:e",
    ],
)
def test_a_definition_with_a_place_gets_no_advice(text: str) -> None:
    assert advice(text) == ""


@pytest.mark.parametrize("place", ["/bin/sh:0x10", "bin/sh:16", "./x:1(0x20)"])
def test_the_place_of_a_uprobe_is_not_checked(place: str) -> None:
    (answer,) = check_lines(planned_kernel("x86_64", None, None, None), [Line("x", 1, f"p:e {place}")])
    assert (answer.outcome, answer.findings) == (UNCHECKED, [])


def test_a_path_without_an_offset_is_a_wrong_symbol() -> None:
    """A definition with a path without an offset is refused as a wrong symbol, because the kernel expects a
    kprobe.
    """
    (answer,) = check_lines(planned_kernel("x86_64", None, None, None), [Line("x", 1, "p:e /bin/sh")])
    assert [finding.rule for finding in answer.findings] == ["BAD_PROBE_ADDR"]
