"""`save` writes the settings of files and options that came after Linux 6.1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from kprobefs.definitions.saver import saved_in_steps
from kprobefs.definitions.tracefs_files import TreeFiles


def saved(kernel: Kernel) -> list[str]:
    with kernel.lock:
        files = TreeFiles(kernel.filesystem(), Client(pid=0, uid=0, gid=0))
        lines = saved_in_steps(files, lambda: kernel.kretprobes.default_maxactive)
        return [line.rstrip("\n") for line in lines if line.strip()]


def test_settings_of_7_2_are_saved_and_give_the_same_again() -> None:
    settings = {
        "buffer_subbuf_size_kb": "16",
        "buffer_size_kb": "1422",
        "syscall_user_buf_size": "9",
        "trace_options": "fields nocopy_trace_marker",
        "set_event": "xfs:mod:nfs",
    }
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        assert saved(kernel) == []
        kernel.write_file("tracing/dynamic_events", "t:my/x sched_switch a=prev->pid")
        for name, text in settings.items():
            for word in text.split():
                kernel.write_file(f"tracing/{name}", word)
        lines = saved(kernel)
        assert lines == [
            "t:my/x sched_switch a=prev->pid",
            *(f"{name} = {text}" for name, text in settings.items()),
        ]
        kernel.trace_arrays.make("one")
        kernel.write_file("tracing/instances/one/options/trace_printk_dest", "1")
        text = "\n".join(saved(kernel))
        assert "\ntrace_options = fields nocopy_trace_marker\n" in text
        assert " trace_printk_dest " in text


@pytest.mark.parametrize(
    ("cpus", "preemption", "default"), [(1, True, 10), (6, True, 12), (1, False, 1), (3, False, 3)]
)
def test_a_default_maxactive_is_not_saved(cpus: int, preemption: bool, default: int) -> None:
    profile = replace(profile_named("linux-6.1"), preemption=preemption)
    with Kernel(MachineConfig(cpus=cpus), profile=profile) as kernel:
        for line in ("r:a gcd", f"r{default}:b gcd", f"r{default + 1}:c gcd", "r100:d gcd", "p:e gcd"):
            kernel.write_file("tracing/kprobe_events", line)
        assert f"\nr{default}:kprobes/b gcd\n" in kernel.read_file("tracing/dynamic_events")
        assert saved(kernel) == [
            "r:kprobes/a gcd",
            "r:kprobes/b gcd",
            f"r{default + 1}:kprobes/c gcd",
            "r100:kprobes/d gcd",
            "p:kprobes/e gcd",
        ]
