"""A task's shadow stacks hang on two of the kernel's own fields, or on none."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.linux_context import _shadow_stacks
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.guests.linux.probing import workload
from tests.image.linux import made
from tests.oracle.inside import read, write


def shadow_stacks(**fields: int) -> dict[str, int]:
    btf = made.Btf()
    word = btf.add(1, "long", 8, bytes(4))
    btf.structure("task_struct", 4096, *((name, word, at) for name, at in fields.items()))
    return _shadow_stacks(cast(Any, SimpleNamespace(btf=Btf(btf.data()))))


@pytest.mark.parametrize("places", [(64, 72), (72, 64)])
def test_fields_side_by_side(places: tuple[int, int]) -> None:
    rethooks, instances = places
    found = shadow_stacks(rethooks=rethooks, kretprobe_instances=instances)
    assert found == {"task_struct.rethooks": rethooks, "task_struct.ret_stack": instances}


@pytest.mark.parametrize(
    "fields",
    [
        {"rethooks": 64, "kretprobe_instances": 80},
        {"rethooks": 2048, "kretprobe_instances": 64},
        {"rethooks": 64, "kretprobe_instances": 64},
        {"rethooks": 64},
        {"kretprobe_instances": 64},
    ],
)
def test_fields_that_are_apart_or_missing(fields: dict[str, int]) -> None:
    assert shadow_stacks(**fields) == {}


def test_return_probes_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a kernel with randomized structures: all calls are kept in Python."""
    tasks, kernel = debian_kernel.with_kernel()
    offset = kernel.btf.offset
    moved = {"task_struct.kretprobe_instances": 64}
    monkeypatch.setattr(kernel.btf, "offset", lambda path: offset(path) + moved.get(path, 0))
    engine = LinuxEngine(tasks, kernel)
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    assert not write(mount, "/kprobe_events", "r:out do_sys_openat2 $retval", os.O_APPEND)
    assert not write(mount, "/tracing/events/kprobes/enable", "1")
    with engine.lock:
        workload(engine)
    name, hits, misses = read(mount, "/kprobe_profile").split()
    assert (name, misses) == ("out", "0")
    assert int(hits) > 0
    mount.close()
