"""The freezer: tasks that were preempted, threads that do not freeze, and the commit of djprobes."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.guests.builtin.runner.guest_runner import NSEC_PER_JIFFY
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.machine.guest_info import TaskInfo
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.ledger import ledger_mismatches

PF_NOFREEZE, PF_FROZEN = 0x8000, 0x10000
ARCHITECTURES = ("x86_64", "i386")
FOR_EVER = 1 << 28
MAX_PREEMPTIONS = 500
CLIENTS = range(5000, 5003)
FIRST_ARGUMENT = {"x86_64": "di", "i386": "ax"}
BUDGET, SHORT = 5, 0.03
"""Run budgets in seconds: that of most tests, and one for runs that must exceed it."""


class Freezing:
    """A preemptible kernel with djprobes, and operations on its kernel threads, which run crc32_le()."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.places = self.regions()

    def task(self, comm: str) -> TaskInfo:
        return next(task for task in self.kernel.guest.kernel.tasks() if task.comm == comm)

    def flags(self, task: TaskInfo) -> int:
        return self.kernel.machine.memory.read_u32(task.addr + self.kernel.image.abi["task_struct.flags"])

    def set_flags(self, task: TaskInfo, flags: int) -> None:
        self.kernel.machine.memory.write_u32(task.addr + self.kernel.image.abi["task_struct.flags"], flags)

    def start(self, function: str, argument: int, name: str) -> TaskInfo:
        """Start a kernel thread that runs `function(argument)`; return its task."""
        address = self.kernel.image.kallsyms.by_name(function)[0].address
        self.kernel.call("kthread_run", address, argument, name.encode())
        return self.task(name)

    def regions(self) -> list[tuple[int, int]]:
        """Return offset and length of the regions in the loop of crc32_le()."""
        verdict, entry = (
            self.kernel.kprobes.probe_checker,
            self.kernel.image.kallsyms.by_name("crc32_le")[0].address,
        )
        found = []
        for offset in range(0x10, 0x40):
            region = verdict.optimized_region(entry + offset)
            if isinstance(region, Region):
                found.append((offset, region.length))
        return found

    def time(self, offset: int = 0) -> Kprobe:
        """Return a probe, at `offset` in crc32_le(), whose hits advance the guest's clock by a jiffy each.

        The clock would not advance otherwise while the thread runs.
        """
        advance = self.kernel.machine.clock.advance
        return Kprobe(
            symbol_name="crc32_le",
            offset=offset,
            pre_handler=lambda _kprobe, _regs: advance(NSEC_PER_JIFFY),
        )

    def preempt_in_region(self) -> tuple[int, int]:
        """Let timer ticks preempt the thread until a preemption is within a region.

        Return the region's offset and length.
        """
        kernel = self.kernel
        for _ in range(MAX_PREEMPTIONS):
            kernel.register_kprobe(time := self.time())
            kernel.call("msleep", 4)
            kernel.unregister_kprobe(time)
            with kernel.lock:
                place = self.region_with_a_task()
            if place is not None:
                return place
        pytest.fail("never preempted within a region")

    def region_with_a_task(self) -> tuple[int, int] | None:
        """Return offset and length of a region in which a task is after the first instruction, or None."""
        entry, kernel = self.kernel.image.kallsyms.by_name("crc32_le")[0].address, self.kernel.guest.kernel
        for offset, length in self.places:
            if not kernel.is_quiescent([(entry + offset + 1, entry + offset + length)]):
                return offset, length
        return None

    def register(self, place: tuple[int, int]) -> Kprobe:
        offset, length = place
        kprobe = Kprobe(
            symbol_name="crc32_le", offset=offset, length=length, pre_handler=lambda _kprobe, _regs: None
        )
        self.kernel.register_kprobe(kprobe)
        return kprobe

    def refused(self) -> str:
        """Check that a commit fails with EBUSY and writes nothing; return its message."""
        before = dict(self.kernel.machine.text.ledger)
        with pytest.raises(KernelError) as caught:
            self.kernel.commit_kprobes()
        assert caught.value.errno == errno.EBUSY
        assert self.kernel.machine.text.ledger == before
        return caught.value.strerror or ""


@pytest.fixture(params=ARCHITECTURES)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[Freezing]:
    """Yield a preemptible kernel whose runs are not cut into pieces, so that an endless run exceeds its
    budget.
    """
    config = MachineConfig(arch=request.param, run_budget=BUDGET, profile="djprobe-2007-preempt")
    with Kernel(config) as kernel:
        yield Freezing(kernel)
        assert ledger_mismatches(kernel.machine.text) == []


@pytest.fixture(params=ARCHITECTURES)
def freezing(request: pytest.FixtureRequest) -> Iterator[Freezing]:
    config = MachineConfig(arch=request.param, quantum=20, run_budget=BUDGET, profile="djprobe-2007-preempt")
    with Kernel(config) as kernel:
        yield Freezing(kernel)
        assert ledger_mismatches(kernel.machine.text) == []


def test_a_task_that_was_preempted_in_the_region_runs_on_to_the_refrigerator(freezing: Freezing) -> None:
    kernel = freezing.kernel
    freezing.start("load_memory", FOR_EVER, "spin")
    kprobe = freezing.register(freezing.preempt_in_region())
    frozen: list[int] = []
    seen = Kprobe(
        symbol_name="thaw_processes",
        pre_handler=lambda _kprobe, _regs: frozen.append(freezing.flags(freezing.task("spin")) & PF_FROZEN),
    )
    kernel.register_kprobe(freezing.time())
    kernel.register_kprobe(seen)
    kernel.commit_kprobes()
    kernel.unregister_kprobe(seen)
    assert frozen == [PF_FROZEN]
    assert kernel.kprobes.mode(kprobe) == "optimized"
    assert kernel.machine.text.current(kprobe.address, 1) == b"\xe9"
    assert not freezing.flags(freezing.task("spin")) & PF_FROZEN


def test_who_never_comes_to_a_safe_point(freezing: Freezing) -> None:
    kernel = freezing.kernel
    sleeper = freezing.start("schedule_timeout_uninterruptible", FOR_EVER, "sleeper")
    kprobe = freezing.register(freezing.places[0])
    assert "not all tasks freeze" in freezing.refused()
    told = "\n".join(message.text for message in kernel.guest.messages())
    assert "Freezing of tasks failed after 1.000 seconds (1 tasks refusing to freeze):" in told
    assert f"task:sleeper pid:{sleeper.pid}" in told
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())
    kernel.call("wake_up_process", sleeper.addr)
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"


def test_clients_go_on_behind_the_commit(freezing: Freezing) -> None:
    """Clients in user mode are frozen too. After the commit, their system calls work."""
    kernel = freezing.kernel
    guest = kernel.guest
    with kernel.lock:
        tasks = [guest.processes.resident(pid, "client") for pid in CLIENTS]
        with guest.frozen() as all_frozen:
            assert all_frozen
            states = {task.comm: task.state for task in guest.kernel.tasks()}
            assert (states["client"], states["init"], states["kthreadd"]) == ("D", "D", "I")
        for task in tasks:
            assert guest.syscalls.call(task, "getpid") == task.pid


def test_a_call_of_the_freezer_leaves_nobody_frozen(freezing: Freezing) -> None:
    """After a call of freeze_processes(), as by a write to machine/call, system calls of clients work, and no
    task stays frozen.
    """
    kernel = freezing.kernel
    with kernel.lock:
        client = kernel.guest.processes.resident(CLIENTS[0], "client")
    assert kernel.call("freeze_processes") == 0
    with kernel.lock:
        assert kernel.guest.syscalls.call(client, "getpid") == client.pid
    kernel.call("msleep", 1100)
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())


def crash(kernel: Kernel, regs: Regs) -> None:
    """Let the current task oops."""
    del kernel
    regs.ip = 0


def hang(kernel: Kernel, regs: Regs) -> None:
    """Let the current task wait for a lock that is never free, with interrupts off, until its run budget is
    used up.
    """
    lookup = kernel.image.kallsyms.lookup_name
    regs.ip = lookup("_raw_spin_lock_irqsave")
    # A word that is never 0.
    setattr(regs, FIRST_ARGUMENT[kernel.config.arch], lookup("nr_cpu_ids"))


@pytest.mark.parametrize("stop", [crash, hang])
@pytest.mark.parametrize("function", ["freeze_tasks", "thaw_processes"])
def test_a_freezer_that_is_stopped_leaves_nobody_frozen(
    undisturbed: Freezing, function: str, stop: Callable[[Kernel, Regs], None]
) -> None:
    """A probe's handler makes the freezer oops or hang.

    No task stays frozen, and the jumps are written only if the tasks were frozen before.
    """
    freezing, kernel = undisturbed, undisturbed.kernel
    guest = kernel.guest
    with kernel.lock:
        client = guest.processes.resident(CLIENTS[0], "client")
    kprobe = freezing.register(freezing.places[0])
    passed = 0

    def on_the_way(_kprobe: Kprobe, regs: Regs) -> int:
        nonlocal passed
        passed += 1
        if function == "freeze_tasks" and passed == 1:
            return 0
        stop(kernel, regs)
        return 1

    fatal = Kprobe(symbol_name=function, pre_handler=on_the_way)
    kernel.register_kprobe(fatal)
    kernel.machine.run_budget = SHORT
    if function == "thaw_processes":
        kernel.commit_kprobes()
    else:
        with pytest.raises(KernelError) as caught:
            kernel.commit_kprobes()
        assert caught.value.errno == errno.EFAULT
    assert passed == (2 if function == "freeze_tasks" else 1)
    told = "\n".join(message.text for message in guest.messages())
    assert ("BUG: soft lockup" if stop is hang else "Oops") in told
    kernel.machine.run_budget = BUDGET
    kernel.unregister_kprobe(fatal)
    assert kernel.kprobes.mode(kprobe) == ("optimized" if function == "thaw_processes" else "int3")
    kernel.call("msleep", 1100)
    assert not any(freezing.flags(task) & PF_FROZEN for task in guest.kernel.tasks())
    with kernel.lock:
        assert guest.syscalls.call(client, "getpid") == client.pid
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"


def test_a_task_that_hangs_on_its_way_to_the_refrigerator(undisturbed: Freezing) -> None:
    """A task that hangs before it is frozen is killed when its run budget is used up.

    Then all other tasks are frozen and the commit succeeds.
    """
    freezing, kernel = undisturbed, undisturbed.kernel
    hanging = freezing.start("load_memory", FOR_EVER, "hanging")
    kprobe = freezing.register(freezing.places[0])

    def on_the_way(_kprobe: Kprobe, regs: Regs) -> int:
        if kernel.guest.kernel.current_task() != hanging.addr:
            return 0
        hang(kernel, regs)
        return 1

    kernel.register_kprobe(freezing.time())
    fatal = Kprobe(symbol_name="refrigerator", pre_handler=on_the_way)
    kernel.register_kprobe(fatal)
    kernel.machine.run_budget = SHORT
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"
    told = "\n".join(message.text for message in kernel.guest.messages())
    assert "BUG: soft lockup" in told
    assert not any(task.pid == hanging.pid for task in kernel.guest.kernel.tasks())
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())


def rebooted(old: Kernel) -> Kernel:
    """Replace the kernel `old` by a new one with the same configuration, and return the new one."""
    with old.lock:
        new = Kernel(old.config, lock=old.lock)
        list(new.replace_kernel(old, lambda: ()))
        return new


def committed_anew(kernel: Kernel) -> None:
    """Check that no task is frozen, that a commit writes a jump, and that a client's system call works."""
    freezing = Freezing(kernel)
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())
    kprobe = freezing.register(freezing.places[0])
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"
    with kernel.lock:
        client = kernel.guest.processes.resident(CLIENTS[0], "client")
        assert kernel.guest.syscalls.call(client, "getpid") == client.pid


def test_a_reboot_that_is_asked_for_while_all_are_frozen(undisturbed: Freezing) -> None:
    """A reboot that is requested while all tasks are frozen waits for the end of the commit."""
    freezing, kernel = undisturbed, undisturbed.kernel
    done: list[str] = []
    new: list[Kernel] = []

    def reboot() -> None:
        new.append(rebooted(kernel))
        done.append("reboot")

    thread = threading.Thread(target=reboot)
    seen = Kprobe(symbol_name="thaw_processes", pre_handler=lambda _kprobe, _regs: thread.start())
    kernel.register_kprobe(seen)
    kprobe = freezing.register(freezing.places[0])
    with kernel.lock:
        kernel.commit_kprobes()
        done.append(kernel.kprobes.mode(kprobe))
    thread.join(30)
    assert done == ["optimized", "reboot"]
    committed_anew(new[0])
    new[0].close()


def test_a_reboot_of_a_kernel_that_panicked_while_all_were_frozen(undisturbed: Freezing) -> None:
    freezing, kernel = undisturbed, undisturbed.kernel

    def panic(_kprobe: Kprobe, regs: Regs) -> int:
        lookup = kernel.image.kallsyms.lookup_name
        regs.ip, banner = lookup("panic"), lookup("linux_banner")
        if kernel.config.arch == "i386":
            # The argument of panic() is after the return address, because panic() takes variable arguments.
            kernel.machine.memory.write_u32(regs.sp + 4, banner)
        else:
            regs.di = banner
        return 1

    kernel.register_kprobe(Kprobe(symbol_name="thaw_processes", pre_handler=panic))
    kprobe = freezing.register(freezing.places[0])
    # The jumps are already written when the kernel panics.
    kernel.commit_kprobes()
    assert kernel.guest.is_dead
    assert kernel.kprobes.mode(kprobe) == "optimized"
    new = rebooted(kernel)
    committed_anew(new)
    new.close()


def test_a_thread_that_does_not_freeze_and_was_preempted_in_the_region(freezing: Freezing) -> None:
    """A commit fails with EBUSY if a thread that does not freeze is in the region.

    When the thread can be frozen, a commit succeeds.
    """
    kernel = freezing.kernel
    spin = freezing.start("load_memory", FOR_EVER, "spin")
    flags = freezing.flags(spin)
    freezing.set_flags(spin, flags | PF_NOFREEZE)
    # This probe is in the loop, after the regions in `places`, so that a turn of the thread is short.
    *freezing.places, (last, _) = freezing.places
    freezing.places = [(offset, length) for offset, length in freezing.places if offset + length <= last]
    kernel.register_kprobe(time := freezing.time(last))
    with kernel.lock:
        for _ in range(MAX_PREEMPTIONS):
            with kernel.guest.frozen() as all_frozen:
                assert all_frozen
                place = freezing.region_with_a_task()
                if place is not None:
                    # The other tasks stay frozen, so that the commit finds the thread at this place.
                    kprobe = freezing.register(place)
                    told = freezing.refused()
                    break
        else:
            pytest.fail("never preempted within a region")
    assert "a task stands in a detoured region" in told
    assert kernel.kprobes.mode(kprobe) == "int3"
    freezing.set_flags(spin, flags)
    kernel.unregister_kprobe(time)
    kernel.register_kprobe(freezing.time())
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"
    assert kernel.machine.text.current(kprobe.address, 1) == b"\xe9"


def test_the_dead_are_in_nobodys_way(freezing: Freezing) -> None:
    """A zombie does not delay a commit, although its parent is frozen and cannot reap it."""
    kernel = freezing.kernel
    function = kernel.image.kallsyms.by_name("do_exit")[0].address
    pid = kernel.call("user_mode_thread", function, 0, signal.SIGCHLD)
    kernel.call("yield")
    assert next(task for task in kernel.guest.kernel.tasks() if task.pid == pid).state == "X"
    kprobe = freezing.register(freezing.places[0])
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_several_cpus(arch: str) -> None:
    """Commits succeed on 4 CPUs, with clients that last ran on different CPUs.

    Afterwards no task is frozen.
    """
    with Kernel(MachineConfig(arch=arch, cpus=4, profile="djprobe-2007-preempt")) as kernel:
        freezing, guest = Freezing(kernel), kernel.guest
        with kernel.lock:
            tasks = [guest.processes.task_of(pid, 0, 0) for pid in CLIENTS]
        for cpu, task in enumerate(tasks):
            task.cpu = cpu
        for _ in range(3):
            with kernel.lock:
                assert [guest.syscalls.call(task, "getpid") for task in tasks] == [*CLIENTS]
            kprobe = freezing.register(freezing.places[0])
            kernel.commit_kprobes()
            assert kernel.kprobes.mode(kprobe) == "optimized"
            kernel.unregister_kprobe(kprobe)
        kernel.call("msleep", 8)
        assert not any(freezing.flags(task) & PF_FROZEN for task in guest.kernel.tasks())
