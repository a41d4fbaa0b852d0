"""Each entry of a hooked function is accounted for: as a return seen, a miss, a pending call, or a call that
never returns.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, TrampolineForm
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.return_hook.conftest import Boot, dmesg
from tests.kprobes.return_hook.test_kretprobe import accounted, recurse
from tests.kprobes.return_hook.test_tasks import sleepers

Make = Callable[[Kernel, str], Kretprobe]


def in_python(_kernel: Kernel, symbol: str) -> Kretprobe:
    return Kretprobe(symbol_name=symbol, handler=lambda *_: None)


def in_guest(kernel: Kernel, symbol: str) -> Kretprobe:
    rp = kernel.hit_ring(kernel.arch.registers.return_value).return_probe(symbol_name=symbol)
    assert rp.return_program is not None
    return rp


@pytest.fixture(params=[in_python, in_guest])
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that makes a return probe, with its handler in Python or in guest code."""
    made: Make = request.param
    return made


def assert_well(kernel: Kernel) -> None:
    assert not [line for line in dmesg(kernel) if "BUG" in line or "Oops" in line]


def test_disabled_while_calls_are_pending(kernel: Kernel, make: Make) -> None:
    """Calls that were pending when the probe was disabled are still seen.

    Calls that begin while the probe is disabled are neither seen nor missed.
    """
    mount = kernel.mount()
    rp = make(kernel, "vfs_read")
    kernel.register_kretprobe(rp)
    pipe, clients = sleepers(mount, 3)
    kernel.disable_kretprobe(rp)
    mount.give_up(clients.pop(), pipe, errno.EINTR)
    later = [Client(900, 0, 0), Client(901, 0, 0)]
    for client in later:
        with pytest.raises(WouldBlock):
            mount.read(client, pipe, 100, 0)
    assert (rp.returns, accounted(rp)) == (1, 3)
    kernel.enable_kretprobe(rp)
    for client in (*clients, *later):
        mount.give_up(client, pipe, errno.EINTR)
    assert (rp.returns, rp.nmissed, accounted(rp)) == (3, 0, 3)
    assert_well(kernel)


def test_tasks_that_end_while_other_calls_are_pending(kernel: Kernel, make: Make) -> None:
    mount, guest = kernel.mount(), kernel.guest
    probes = [make(kernel, name) for name in ("vfs_read", "do_exit")]
    kernel.register_kretprobes(probes)
    pipe, clients = sleepers(mount, 2)
    for pid in range(600, 604):
        guest.processes.task_of(pid, 0, 0)
        guest.processes.exit(pid)
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    guest.processes.task_of(604, 0, 0)
    reads, exits = probes
    assert exits.hook is not None
    assert (reads.returns, accounted(reads)) == (2, 2)
    assert (exits.returns, exits.hook.flushed, exits.hook.active) == (0, 4, 0)


@pytest.mark.parametrize("stack", ["rethook", "objpool", "instances"])
def test_a_missed_call_skips_the_entry_handler(kernel: Kernel) -> None:
    """A missed call does not run the entry handler.

    Registering the probe again resets the counts of missed and seen calls.
    """
    entries: list[int] = []
    rp = Kretprobe(
        symbol_name="bsearch",
        entry_handler=lambda instance, _regs: entries.append(instance.frame),
        handler=lambda *_: None,
        maxactive=2,
    )
    for _ in range(2):
        entries.clear()
        kernel.register_kretprobe(rp)
        assert (rp.nmissed, rp.returns) == (0, 0)
        recurse(kernel, 6)
        assert (len(entries), rp.returns, rp.nmissed) == (2, 2, 5)
        kernel.unregister_kretprobe(rp)
        assert (rp.returns, rp.nmissed) == (2, 5)


def test_a_module_that_goes(kernel: Kernel, make: Make) -> None:
    """Hits of probes in a module are seen until the module is unloaded, including the return of its exit
    function.

    After the unloading, the counts stay and no call is pending.
    """
    kernel.load_module("ktgt")
    probes = [make(kernel, f"ktgt:{name}") for name in ("ktgt_add", "ktgt_exit")]
    kernel.register_kretprobes(probes)
    for number in range(4):
        assert kernel.call("ktgt:ktgt_add", number, 1) == number + 1
    kernel.unload_module("ktgt")
    assert all(rp.is_gone for rp in probes)
    assert [(rp.returns, accounted(rp)) for rp in probes] == [(4, 4), (1, 1)]
    kernel.unregister_kretprobes(probes)
    assert not kernel.kretprobes.hooks.is_used
    kernel.load_module("ktgt")
    assert kernel.call("ktgt:ktgt_add", 1, 1) == 2
    assert_well(kernel)


# What stack traces and records show


@pytest.mark.parametrize("form", TrampolineForm)
@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_a_stack_trace_shows_the_caller(arch: str, form: TrampolineForm, stack: str, make: Make) -> None:
    """The stack trace of an oops in a hooked call names the same functions as without the hook."""
    profile = Profile("any", trampoline=form)
    with Kernel(MachineConfig(arch=arch, return_hook=stack), profile=profile) as kernel:
        traces = []
        for rp in (None, make(kernel, "crc32_le")):
            if rp is not None:
                kernel.register_kretprobe(rp)
            for _ in range(3):
                kernel.call("crc32_le", 0, "four", 4)
            with pytest.raises(KernelError):
                kernel.call("crc32_le", 0, 0x5000, 4)
            log = "\n".join(dmesg(kernel))
            # Below the first function are return addresses that earlier calls have left on the stack.
            traces.append(re.findall(r"(?m)^ \? (\w+)\+0x", log[log.rindex("Call Trace") :]))
            kernel.guest.processes.worker()
        assert traces[0][0] == traces[1][0]
        assert set(traces[0]) == set(traces[1])


def test_a_record_of_the_inner_of_two_names_no_caller(boot: Boot) -> None:
    """If two return events are on one function, only the records of the event `one` show an unknown caller.

    Its instance was pushed last, so the trampoline is its return address.
    """
    kernel = boot()
    events = kernel.tracing.kprobe_events
    events.write(b"r:one int_sqrt\nr:two int_sqrt\n")
    for event in events.events():
        event.enable(kernel.trace)
    kernel.trace.expand()
    for number in range(4):
        assert kernel.call("int_sqrt", number * number) == number
    text = kernel.trace.trace_text()
    callers = re.findall(r"(one|two): \((\S+) <- int_sqrt\)", text)
    assert callers.count(("one", "[unknown/kretprobe'd]")) == 4, text
    assert not [caller for name, caller in callers if name == "two" and "unknown" in caller]
    assert len(callers) == 8
