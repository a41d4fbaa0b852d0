"""The one or two fields of task_struct that hold a task's shadow stacks, or none if the kernel lacks the
fields.
"""

from __future__ import annotations

import os

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.linux_context import _shadow_stacks
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.kprobes.return_hook.rethook_list import BEFORE, FRAME, HOOK, LLIST, RET_ADDR
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.guests.linux.probing import workload
from tests.image.linux import made
from tests.oracle.inside.mount_files import read, write


def shadow_stacks(*, may_have_traced: bool = False, **fields: int) -> dict[str, int]:
    btf = made.Btf()
    word = btf.add(1, "long", 8, bytes(4))
    btf.structure("task_struct", 4096, *((name, word, at) for name, at in fields.items()))
    found = _shadow_stacks(Btf(btf.data()), may_have_traced=may_have_traced)
    return {name.removeprefix("task_struct."): offset for name, offset in found.items()}


@pytest.mark.parametrize("instances", [72, 56, 2048])
def test_fields_of_a_kernel_with_rethooks(instances: int) -> None:
    """If a kernel has rethooks, shadow stacks use the fields rethooks and kretprobe_instances, whatever their
    offsets.
    """
    expected = {"rethooks": 64, "ret_stack": instances}
    assert shadow_stacks(rethooks=64, kretprobe_instances=instances, ret_stack=8) == expected


def test_fields_of_a_kernel_without_rethooks() -> None:
    """If a kernel has no rethooks, shadow stacks use only ret_stack, because kretprobes then use
    kretprobe_instances.
    """
    assert shadow_stacks(kretprobe_instances=64, ret_stack=8) == {"ret_stack": 8}
    assert shadow_stacks(kretprobe_instances=64) == {}
    assert shadow_stacks(rethooks=64) == {"rethooks": 64}


def test_no_array_of_the_kernel_s_own_graph() -> None:
    """In a dump, ret_stack is not used, because tasks may have arrays of the kernel's own function graph."""
    assert shadow_stacks(kretprobe_instances=64, ret_stack=8, may_have_traced=True) == {}


def test_the_layout_of_calls_is_the_kernels() -> None:
    """Debuggers follow the list of a task with the kernel's own types."""
    _, kernel = debian_kernel.with_kernel()
    members = {"llist": LLIST, "rethook": HOOK, "ret_addr": RET_ADDR, "frame": FRAME}
    offsets = {name: kernel.btf.offset(f"rethook_node.{name}") for name in members}
    assert offsets == {name: (BEFORE + word) * 8 for name, word in members.items()}


def test_return_probes_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return probes work in a kernel that has no field for shadow stacks: Python keeps the pending calls."""
    tasks, kernel = debian_kernel.with_kernel()
    has = kernel.btf.has
    missing = {f"task_struct.{name}" for name in ("rethooks", "kretprobe_instances", "ret_stack")}
    monkeypatch.setattr(kernel.btf, "has", lambda path: path not in missing and has(path))
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
