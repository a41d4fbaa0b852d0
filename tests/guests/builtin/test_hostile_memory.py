"""kprobefs's own kernel with damaged data: every reader of the host ends, intact data is shown, and other
requests work.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import struct
from collections.abc import Iterator
from itertools import product

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import RETURN_HOOKS
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from stress.hostile import builtin
from stress.hostile.corruption import NOT_CANONICAL, Watched, attack
from tests.guests.builtin.conftest import ScriptedWatch
from tests.sample import WHOLE

VICTIM, OTHER = (Client(pid, 0, 0) for pid in (700, 701))
WILD = 0x4141_4141_4141_4141


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_each_damaged_word(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    """If one pointer or length that the host reads is wrong, every reader of the host still ends within
    bounds.
    """
    caplog.set_level(logging.CRITICAL)
    with builtin.victim(arch) as kernel:
        readers = builtin.readers(kernel)
        before = [read() for name, read in readers.items() if name != "exits"]
        cases = list(attack(Watched(kernel.machine.memory), readers, random.Random(1), None if WHOLE else 30))
        assert {name for name, _, _ in cases} >= readers.keys() - {"exits"}
        assert len(cases) > 200
        assert [read() for name, read in readers.items() if name != "exits"] == before


def read(mount: Mount, path: str, client: Client = OTHER) -> bytes:
    handle = mount.open(client, path, os.O_RDONLY)
    try:
        return mount.read(client, handle, 1 << 20, 0)
    finally:
        mount.release(handle)


def write(mount: Mount, path: str, text: str, client: Client = OTHER) -> None:
    handle = mount.open(client, path, os.O_WRONLY | os.O_APPEND)
    try:
        mount.write(client, handle, text.encode(), 0)
    finally:
        mount.release(handle)


@pytest.fixture
def mount(kernel: Kernel) -> Mount:
    return kernel.mount()


@pytest.fixture
def memory(kernel: Kernel) -> GuestMemory:
    return kernel.machine.memory


def symbol(kernel: Kernel, name: str) -> int:
    found = kernel.image.kallsyms.lookup_name(name)
    assert found is not None
    return found


def test_a_circle_of_tasks(
    kernel: Kernel, mount: Mount, memory: GuestMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """If the task list becomes circular, the tasks before the circle are listed, and the damage is reported
    once.
    """
    whole = read(mount, "/machine/tasks").splitlines()
    node = symbol(kernel, "init_task") + kernel.image.abi["task_struct.tasks"]
    for _ in range(2):
        node = memory.read_word(node)
    memory.write_word(node, node)
    assert read(mount, "/machine/tasks").splitlines() == whole[:4]
    assert read(mount, "/machine/tasks").splitlines() == whole[:4]
    reports = [record.getMessage() for record in caplog.records]
    assert [("task list" in text, "without end" in text) for text in reports] == [(True, True)]
    assert read(mount, "/machine/dmesg").count(b"the task list is damaged") == 1


def test_a_task_without_credentials_is_left_out(kernel: Kernel, mount: Mount, memory: GuestMemory) -> None:
    whole = read(mount, "/machine/tasks").splitlines()
    task = kernel.guest.kernel.tasks()[2]
    memory.write_word(task.addr + kernel.image.abi["task_struct.cred"], NOT_CANONICAL)
    assert read(mount, "/machine/tasks").splitlines() == [*whole[:3], *whole[4:]]


def test_circles_of_modules_and_their_users(kernel: Kernel, mount: Mount, memory: GuestMemory) -> None:
    kernel.load_module("counter_user")
    abi = kernel.image.abi
    newest, oldest = read(mount, "/machine/modules").splitlines()
    node = memory.read_word(symbol(kernel, "modules"))
    second = memory.read_word(node)
    module = second - abi["module.list"]
    memory.write_word(second, second)
    users = memory.read_word(module + abi["module.source_list"])
    memory.write_word(users, users)
    # The list of the module's users has no end, so the line of the module is left out.
    assert read(mount, "/machine/modules").splitlines() == [newest]
    assert b"counter" in oldest
    assert b"the module list is damaged" in read(mount, "/machine/dmesg")


def test_log_records_that_overlap(kernel: Kernel, mount: Mount, memory: GuestMemory) -> None:
    """If log records overlap, machine/dmesg shows fewer bytes than the log has.

    A wrong index of the first record is reported.
    """
    record = struct.Struct("<QQHHB3x")
    size = kernel.image.abi["log_buf.size"]
    count = size // record.size - 1
    buffer = symbol(kernel, "__log_buf")
    for number in range(count):
        data = record.pack(number, 0, record.size, 0xFFFF, 6)
        memory.write(buffer + number * record.size, data)
    memory.write_u32(symbol(kernel, "log_first_idx"), 0)
    memory.write(symbol(kernel, "log_first_seq"), bytes(8))
    memory.write(symbol(kernel, "log_next_seq"), count.to_bytes(8, "little"))
    assert len(read(mount, "/machine/dmesg")) < size
    memory.write_u32(symbol(kernel, "log_first_idx"), 0xFFFF_0000)
    assert b"the log is damaged" in read(mount, "/machine/dmesg")


def test_directory_entries(kernel: Kernel, mount: Mount, memory: GuestMemory) -> None:
    """If a word near a file's name in guest memory is wrong, a listing of the directory ends with few entries
    or an errno.
    """
    kernel.machine.run_budget = 0.05
    name = b"NAMEOFUS"
    names = [f"/scratch/{text}" for text in ("before", name.decode(), "behind")]
    for path in names:
        mount.release(mount.create(OTHER, path, 0o644, os.O_WRONLY))
    assert len(mount.readdir("/scratch")) == len(names) + 2
    ram = memory.ram
    at = ram.find(name)
    places = []
    while at >= 0:
        places += range(at - 128 & ~7, at + 32, 8)
        at = ram.find(name, at + 1)
    own = kernel.machine.model.layout.direct_map
    cases = [(place, value) for place in places for value in (own + place, 0, 1 << 32, NOT_CANONICAL)]
    for place, value in cases if WHOLE else random.Random(2).sample(cases, 40):
        saved = ram[place : place + 8]
        ram[place : place + 8] = value.to_bytes(8, "little")
        try:
            assert len(mount.readdir("/scratch")) < 400
        except KernelError as error:
            assert error.errno in (errno.EIO, errno.ENOENT, errno.ENOTDIR)  # noqa: PT017 - it may also succeed
        ram[place : place + 8] = saved
        if kernel.guest.is_dead:
            break
    assert read(mount, "/kprobes/list") == b""


@pytest.mark.parametrize("hook", RETURN_HOOKS)
@pytest.mark.parametrize("field", ["rethooks", "ret_stack"])
def test_a_wild_word_where_a_tasks_returns_are(hook: str, field: str, watch: ScriptedWatch) -> None:
    """A wild pointer to the pending returns of a task breaks no request of any task.

    When the task ends, its exit is still replayed in the guest.
    """
    with Kernel(MachineConfig(run_budget=0.2, return_hook=hook), watch) as kernel:
        watch.comms = {VICTIM.pid: "victim", OTHER.pid: "other"}
        returns: list[int] = []
        rp = Kretprobe(symbol_name="vfs_open", handler=lambda _instance, _regs: returns.append(1))
        kernel.register_kretprobe(rp)
        mount = kernel.mount()
        for client in (VICTIM, OTHER):
            read(mount, "/machine/version", client)
        hits = len(returns)
        assert hits
        task = kernel.guest.kernel.find_task(VICTIM.pid)
        memory = kernel.machine.memory
        memory.write_word(task + kernel.image.abi[f"task_struct.{field}"], WILD)
        for client in (OTHER, VICTIM, OTHER):
            assert read(mount, "/machine/version", client)
        watch.pending_exits = [VICTIM.pid]
        assert read(mount, "/kprobes/list")
        assert len(returns) > hits
        kernel.unregister_kretprobe(rp)


@pytest.fixture
def smp() -> Iterator[Kernel]:
    with Kernel(MachineConfig(cpus=2, run_budget=0.2)) as kernel:
        yield kernel


@pytest.mark.parametrize("number", [0, 1, 2, 3, 0x7FFF_FFFF, (1 << 64) - 1])
def test_a_cpu_that_cannot_be_started(smp: Kernel, number: int) -> None:
    result = smp.call("host_hypercall", 7, number, symbol(smp, "vfs_read"), 0, 0)
    assert result == (1 << 64) - errno.EINVAL
    assert smp.call("strlen", "four") == 4


@pytest.mark.parametrize("size", [0, 1 << 40, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096])
def test_module_memory_that_nobody_has(kernel: Kernel, size: int) -> None:
    with kernel.lock, pytest.raises(KernelError) as refused:
        kernel.modules._serve(0, size, 1)
    assert refused.value.errno in (errno.ENOMEM, errno.EINVAL)


FIRST = (0, 1, 0xFFFF_FFFF_8100_0000, 0xFFFF_8880_0000_0000, NOT_CANONICAL)
SECOND = (0, 0xFFFF_FFFF_8100_0000, 0xFFFF_8880_0000_1001, NOT_CANONICAL)


@pytest.mark.parametrize("operation", range(4))
def test_services_for_modules(kernel: Kernel, operation: int) -> None:
    """The host's services for modules answer any arguments with a result or an errno, and the guest
    goes on.
    """
    for first, second in product(FIRST, SECOND):
        given = f"{first:#x} {second:#x}"
        with kernel.lock:
            try:
                kernel.modules._serve(operation, first, second)
            except KernelError as error:
                allowed = errno.EINVAL, errno.EFAULT, errno.ENOMEM
                assert error.errno in allowed, given  # noqa: PT017 - it may succeed
        assert kernel.call("strlen", "four") == 4, given
