"""Typecasts in event probes, `(STRUCT)FIELD->FIELD` of Linux 7.2, on kprobefs's own kernel.

The texts and columns of the errors are those of Debian's 7.2.13; tests/oracle/inside/ compares more
definitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.errors import KernelError
from tests.trace.events.test_btf_args import define

WORK = "workqueue.workqueue_execute_start"


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    with shared.lock:
        shared.tracing.dynamic_events.clear()


def test_a_field_of_an_event_is_a_pointer_to_a_structure(kernel: Kernel) -> None:
    """A typecast reads a structure to which an event's field points.

    Here `(work_struct)work->func` is the function that the record also contains.
    """
    casts = "own=(work_struct)work->func at=(work_struct)work whole=+0x10((work_struct)work):x64"
    assert define(kernel, f"e:cast {WORK} said=$function:x64 {casts}").endswith(f" {casts}\n")
    kernel.write_file("tracing/events/eprobes/cast/enable", "1")
    kernel.write_file("tracing/events/workqueue/workqueue_execute_start/enable", "1")
    kernel.call("load_workqueue", 6)
    kernel.write_file("tracing/events/eprobes/cast/enable", "0")
    kernel.write_file("tracing/events/workqueue/workqueue_execute_start/enable", "0")
    text = kernel.trace.trace_text()
    found = re.findall(r"said=(\w+) own=(\w+) at=(\w+) whole=(\w+)", text)
    works = re.findall(r"workqueue_execute_start: work struct ([0-9a-f]+)", text)
    assert len(found) == len(works) > 1
    for said, own, at, whole in found:
        assert said == own == whole
        assert f"{int(at, 16):016x}" in works or f"{int(at, 16):x}" in works


@pytest.mark.parametrize(
    ("argument", "name", "text", "column"),
    [
        ("(no_struct)work->func", "EINVAL", "This is not a pointer to union/structure.", 1),
        ("(work_struct)nothing->func", "EINVAL", "Attached event does not have this field", 13),
        ("(work_struct)work->nothing", "ENOENT", "This field is not found.", 19),
        (
            "(work_struct)work.func",
            "EOPNOTSUPP",
            "Non pointer structure/union argument is not supported.",
            18,
        ),
        ("(work_struct)work-func", "EINVAL", "Failed to parse single hyphen. Forgot '>'?", 17),
        ("(work_struct", "EINVAL", "Dereference brace is not closed", 12),
        ("(work_struct)$work->func", "EINVAL", "Attached event does not have this field", 13),
    ],
)
def test_refusals(kernel: Kernel, argument: str, name: str, text: str, column: int) -> None:
    with pytest.raises(KernelError) as failure:
        define(kernel, f"e:x {WORK} {argument}")
    assert failure.value.name == name
    log = kernel.read_file("tracing/error_log").splitlines()
    assert log[-3].endswith(f"event_probe: error: {text}")
    assert log[-1].index("^") == len(f"  Command: e:x {WORK} ") + column


def test_typecasts_are_for_events_alone_and_since_7_2(kernel: Kernel) -> None:
    for line in ("p:x vfs_read (file)$arg1->f_flags", "f:x vfs_read (file)file->f_flags"):
        with pytest.raises(KernelError):
            define(kernel, line)
        assert "Typecasts are only for eprobe fields" in kernel.read_file("tracing/error_log")
    with Kernel(profile=profile_named("linux-6.12")) as old, pytest.raises(KernelError) as failure:
        define(old, f"e:x {WORK} (work_struct)work->func")
    assert failure.value.name == "EINVAL"
