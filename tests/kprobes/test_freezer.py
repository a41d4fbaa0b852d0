"""The freezer: tasks that were really preempted, threads that don't freeze, and the commit."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator

import pytest

from emulated_kernel.arch.analysis.region import Region
from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.host.executive.executive import NSEC_PER_JIFFY
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.guest_info import TaskInfo
from tests.ledger import ledger_mismatches

PF_NOFREEZE, PF_FROZEN = 0x8000, 0x10000
ARCHITECTURES = ("x86_64", "i386")
FOR_EVER = 1 << 28
MAX_PREEMPTIONS = 500
CLIENTS = range(5000, 5003)


class Freezing:
    """A preemptible kernel of djprobe's with a thread that spins through crc32_le()."""

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
        """Run a kernel thread."""
        address = self.kernel.image.kallsyms.by_name(function)[0].address
        self.kernel.call("kthread_run", address, argument, name.encode())
        return self.task(name)

    def regions(self) -> list[tuple[int, int]]:
        """Offset and length of the regions of the loop in crc32_le() that have an inner boundary."""
        verdict, entry = (
            self.kernel.kprobes.verdict,
            self.kernel.image.kallsyms.by_name("crc32_le")[0].address,
        )
        found = []
        for offset in range(0x10, 0x40):
            region = verdict.detoured(entry + offset)
            if isinstance(region, Region):
                found.append((offset, region.length))
        return found

    def time(self, offset: int = 0) -> Kprobe:
        """A probe by which time passes while the thread runs; the guest's own time stands still then."""
        advance = self.kernel.machine.clock.advance
        return Kprobe(
            symbol_name="crc32_le",
            offset=offset,
            pre_handler=lambda _kprobe, _regs: advance(NSEC_PER_JIFFY),
        )

    def preempt_in_region(self) -> tuple[int, int]:
        """Let ticks preempt the thread until one met it within a region; the region's offset and length."""
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
        """One at an inner boundary of which a task stands."""
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
        """What a commit says that ends in EBUSY; nothing is written then."""
        before = dict(self.kernel.machine.text.ledger)
        with pytest.raises(KernelError) as caught:
            self.kernel.commit_kprobes()
        assert caught.value.errno == errno.EBUSY
        assert self.kernel.machine.text.ledger == before
        return caught.value.strerror or ""


@pytest.fixture(params=ARCHITECTURES)
def freezing(request: pytest.FixtureRequest) -> Iterator[Freezing]:
    config = MachineConfig(arch=request.param, quantum=20, run_budget=5, profile="djprobe-2007-preempt")
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
    """Those in user mode; each answers its next system call."""
    kernel = freezing.kernel
    guest = kernel.guest
    with kernel.lock:
        tasks = [guest.mirror.resident(pid, "client") for pid in CLIENTS]
        with guest.frozen() as all_frozen:
            assert all_frozen
            states = {task.comm: task.state for task in guest.kernel.tasks()}
            assert (states["client"], states["init"], states["kthreadd"]) == ("D", "D", "I")
        for task in tasks:
            assert guest.syscalls.call(task, "getpid") == task.pid


def test_a_call_of_the_freezer_leaves_nobody_frozen(freezing: Freezing) -> None:
    """As whoever writes to machine/call may wish for."""
    kernel = freezing.kernel
    with kernel.lock:
        client = kernel.guest.mirror.resident(CLIENTS[0], "client")
    assert kernel.call("freeze_processes") == 0
    with kernel.lock:
        assert kernel.guest.syscalls.call(client, "getpid") == client.pid
    kernel.call("msleep", 1100)
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())


@pytest.mark.parametrize("function", ["freeze_tasks", "thaw_processes"])
def test_a_freezer_that_is_killed_leaves_nobody_frozen(freezing: Freezing, function: str) -> None:
    """By what a probe's handler does on its way; the jumps are written unless it is killed before that."""
    kernel = freezing.kernel
    guest = kernel.guest
    with kernel.lock:
        client = guest.mirror.resident(CLIENTS[0], "client")
    kprobe = freezing.register(freezing.places[0])
    passed = 0

    def crash(_kprobe: Kprobe, _regs: object) -> int:
        nonlocal passed
        passed += 1
        if function == "freeze_tasks" and passed == 1:
            return 0
        kernel.machine.regs.ip = 0
        return 1

    fatal = Kprobe(symbol_name=function, pre_handler=crash)
    kernel.register_kprobe(fatal)
    if function == "thaw_processes":
        kernel.commit_kprobes()
    else:
        with pytest.raises(KernelError) as caught:
            kernel.commit_kprobes()
        assert caught.value.errno == errno.EFAULT
    kernel.unregister_kprobe(fatal)
    assert kernel.kprobes.mode(kprobe) == ("optimized" if function == "thaw_processes" else "int3")
    kernel.call("msleep", 1100)
    assert not any(freezing.flags(task) & PF_FROZEN for task in guest.kernel.tasks())
    with kernel.lock:
        assert guest.syscalls.call(client, "getpid") == client.pid
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"


def test_a_thread_that_does_not_freeze_and_was_preempted_in_the_region(freezing: Freezing) -> None:
    """EBUSY, where it stands there when all others are frozen; then it runs on."""
    kernel = freezing.kernel
    spin = freezing.start("load_memory", FOR_EVER, "spin")
    flags = freezing.flags(spin)
    freezing.set_flags(spin, flags | PF_NOFREEZE)
    # In the loop, behind the regions that are looked at, so that a turn of the thread's is short.
    *freezing.places, (last, _) = freezing.places
    freezing.places = [(offset, length) for offset, length in freezing.places if offset + length <= last]
    kernel.register_kprobe(time := freezing.time(last))
    with kernel.lock:
        for _ in range(MAX_PREEMPTIONS):
            with kernel.guest.frozen() as all_frozen:
                assert all_frozen
                place = freezing.region_with_a_task()
                if place is not None:
                    # Who is frozen already stays, so that the commit finds the thread at this place.
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
    """A zombie's parent, frozen, can't reap it."""
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
    """Clients are wherever they ran last, and the threads of each CPU freeze or don't have to."""
    with Kernel(MachineConfig(arch=arch, cpus=4, profile="djprobe-2007-preempt")) as kernel:
        freezing, guest = Freezing(kernel), kernel.guest
        with kernel.lock:
            tasks = [guest.mirror.task_of(pid, 0, 0) for pid in CLIENTS]
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
