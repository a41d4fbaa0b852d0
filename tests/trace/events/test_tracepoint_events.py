"""Tracepoint events, the `t` lines of Linux 6.12 and 7.2, on kprobefs's own kernel.

The texts and columns are those of Debian's 6.12.117; tests/guests/linux compares with that kernel itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from tests.trace.events.kernel import errno_of
from tests.trace.events.test_btf_args import define

CLIENT = Client(4001, 0, 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        yield kernel


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    yield shared
    with shared.lock:
        shared.tracing.dynamic_events.clear()


def switch(kernel: Kernel, *events: str, on: bool = True) -> None:
    find = kernel.tracing.kprobe_events.registry.find
    with kernel.lock:
        for event in events:
            found = find(*event.split("/"))
            assert found is not None
            (found.enable if on else found.disable)(kernel.trace)


def read_a_file(kernel: Kernel) -> None:
    mount = kernel.mount()
    handle = mount.create(CLIENT, "/scratch/named", 0o600, os.O_RDWR)
    mount.write(CLIENT, handle, b"text", 0)
    mount.release(handle)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("t sched_switch prev->pid", "t:tracepoints/sched_switch sched_switch arg1=prev->pid"),
        (
            "t:my/x kfree $arg2 $arg1",
            "t:my/x kfree ptr=ptr call_site=call_site",
        ),
        (
            "t sched_wakeup p->se.group_node.next->prev",
            "t:tracepoints/sched_wakeup sched_wakeup arg1=p->se.group_node.next->prev",
        ),
        ("t:x kfree $arg*", "t:tracepoints/x kfree call_site=call_site ptr=ptr"),
        ("t no_such_tracepoint a=$arg1", "t:tracepoints/no_such_tracepoint no_such_tracepoint a=$arg1"),
        ("t 9lives", "t:tracepoints/_9lives 9lives"),
    ],
)
def test_shown(kernel: Kernel, command: str, shown: str) -> None:
    assert define(kernel, command) == f"{shown}\n"


@pytest.mark.parametrize(
    ("command", "name", "text", "column"),
    [
        ("t kmem/kfree", "EINVAL", "Invalid character in tracepoint name", 6),
        ("t kfree%return", "EINVAL", "Invalid probed address suffix", 7),
        ("t kfree a=$retval", "EINVAL", "$retval is not available on probe", 10),
        ("t5 kfree", "EINVAL", "Invalid maxactive number", 1),
        ("t kfree $arg9", "ENOENT", "This variable is not found at this probe point", 8),
        ("t kfree nothing", "ENOENT", "This variable is not found at this probe point", 8),
        ("t no_such_tracepoint nothing", "ENOENT", "No BTF entry for this probe point", 21),
        ("t kfree %di", "EINVAL", "Invalid fetch argument", 8),
    ],
)
def test_refused(kernel: Kernel, command: str, name: str, text: str, column: int) -> None:
    with pytest.raises(KernelError) as refused:
        define(kernel, command)
    assert refused.value.name == name
    log = kernel.tracing.kprobe_events.error_log.records()[-1].splitlines()
    assert log[0].partition("error: ")[2] == text
    assert log[2].index("^") - len("  Command: ") == column


def test_an_event_has_probes_of_one_kind(kernel: Kernel) -> None:
    define(kernel, "t:g/e kfree a=$arg1")
    with pytest.raises(KernelError, match="Probe type is different"):
        define(kernel, "f:g/e vfs_read a=$arg1")
    with pytest.raises(KernelError, match="exact same probe"):
        define(kernel, "t:g/e kfree a=$arg1")
    assert define(kernel, "t:g/e kmem_cache_free a=$arg1").count("t:g/e") == 2


def test_records_have_the_arguments_of_the_static_event(kernel: Kernel) -> None:
    """Each call of kmem_cache_alloc() gives a record of the `t` event and one of kmem:kmem_cache_alloc.

    Both records have the same CPU, call site and pointer.
    """
    define(kernel, "t:my/made kmem_cache_alloc call_site:x64 ptr")
    kernel.trace.clear_trace()
    for _ in range(2):
        switch(kernel, "my/made", "kmem/kmem_cache_alloc")
        read_a_file(kernel)
        switch(kernel, "my/made", "kmem/kmem_cache_alloc", on=False)
        read_a_file(kernel)
    lines = [line for line in kernel.trace.trace_text().splitlines() if line[:1] != "#"]
    ours = [line.split(": made: ") for line in lines if ": made: " in line]
    static = [line.split(": kmem_cache_alloc: ") for line in lines if ": kmem_cache_alloc: " in line]
    assert len(ours) == len(static) > 2
    symbol = kernel.kallsyms_lookup_name
    for (head, record), (other, values) in zip(ours, static, strict=True):
        place, _, fields = record.partition(") ")
        assert place == "(__traceiter_kmem_cache_alloc+0x0/0x10"
        assert head.split()[1:2] == other.split()[1:2]
        got = dict(word.split("=") for word in fields.split())
        wanted = dict(word.split("=") for word in values.split())
        assert int(got["ptr"], 16) == int(wanted["ptr"].replace("(null)", "0"), 16)
        name, _, offset = wanted["call_site"].partition("+")
        assert int(got["call_site"], 16) == symbol(name) + int(offset.partition("/")[0], 16)


def test_a_tracepoint_is_on_while_an_event_uses_it(kernel: Kernel) -> None:
    define(kernel, "t:my/a kfree")
    define(kernel, "t:my/b kfree")
    before = kernel.patched_addresses()
    switch(kernel, "my/a", "my/b")
    patched = kernel.patched_addresses()
    switch(kernel, "my/a", on=False)
    assert kernel.patched_addresses() == patched != before
    switch(kernel, "my/b", on=False)
    assert kernel.patched_addresses() == before
    switch(kernel, "my/b")
    with kernel.lock:
        assert errno_of(partial(kernel.tracing.dynamic_events.write, b"-:my/b\n")) == "EBUSY"
    switch(kernel, "my/b", on=False)
    assert define(kernel, "-:my/b") == "t:my/a kfree\n"


def test_an_event_of_a_missing_tracepoint_can_be_enabled(kernel: Kernel) -> None:
    define(kernel, "t:my/later no_such_tracepoint")
    switch(kernel, "my/later")
    read_a_file(kernel)
    switch(kernel, "my/later", on=False)


def test_earlier_kernels_refuse_them() -> None:
    with Kernel(profile=profile_named("linux-6.1")) as kernel, pytest.raises(KernelError) as refused:
        define(kernel, "t kfree")
    assert refused.value.name == "EINVAL"
