"""The stack tracer reports the deepest stack and its functions. While the tracer is off, it measures
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.tracers.stack_tracer import StackTracer
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError

LINE = re.compile(r" *(\d+)\) +(\d+) +(\d+)   (\w[\w.]*)\+0x([0-9a-f]+)/0x[0-9a-f]+")


@pytest.fixture(params=["x86_64", "i386"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="virtual")) as booted:
        yield booted


@pytest.fixture
def tracer(kernel: Kernel) -> StackTracer:
    return kernel.tracing.stack_tracer


def _open(kernel: Kernel) -> None:
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    syscalls.call(init, "close", syscalls.open(init, "/scratch", 0))


def _found(tracer: StackTracer) -> list[tuple[int, int, int, str, int]]:
    title, rule, *lines = "".join(tracer.records()).splitlines()
    assert title == f"        Depth    Size   Location    ({len(lines)} entries)"
    assert rule == "        -----    ----   --------"
    matches = [LINE.fullmatch(line) for line in lines]
    return [(int(m[1]), int(m[2]), int(m[3]), m[4], int(m[5], 16)) for m in matches if m]


def test_the_deepest_stack_and_what_each_call_took_of_it(kernel: Kernel, tracer: StackTracer) -> None:
    tracer.enable(1)
    _open(kernel)
    frames = _found(tracer)
    assert [number for number, *_ in frames] == list(range(len(frames)))
    depths = [depth for _, depth, *_ in frames]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == tracer.max_size
    assert [size for _, _, size, *_ in frames] == [
        depth - below for depth, below in zip(depths, [*depths[1:], 0], strict=True)
    ]
    names = [name for *_, name, _ in frames]
    assert names.index("path_openat") < names.index("do_filp_open") < names.index("do_sys_openat2")
    # The first frame is the call of the tracer from the function's first instruction.
    assert frames[0][4] == kernel.arch.jump_size
    assert frames[0][2] == kernel.arch.word_size


def test_each_slot_holds_the_return_address(kernel: Kernel, tracer: StackTracer) -> None:
    """The stack holds the reported return addresses at the reported depths. A probe on the deepest function
    reads these words.
    """
    tracer.filter.write(b"vfs_open")
    tracer.enable(1)
    _open(kernel)
    shown = [(depth, name, offset) for _, depth, _, name, offset in _found(tracer)]
    assert shown[0][1] == "vfs_open"
    tracer.enable(0)
    seen: list[tuple[int, str, int]] = []
    _note_stack(kernel, "vfs_open", shown, seen)
    _open(kernel)
    assert seen[: len(shown) - 1] == shown[1:]


def _note_stack(
    kernel: Kernel, name: str, shown: list[tuple[int, str, int]], seen: list[tuple[int, str, int]]
) -> None:
    memory, abi, word = kernel.machine.memory, kernel.image.abi, kernel.arch.word_size

    def pre_handler(_kprobe: Kprobe, _regs: object) -> None:
        stack = memory.read_word(kernel.guest.kernel.current_task() + abi["task_struct.stack"])
        top = stack + abi["thread.size"]
        for depth, _, _ in shown[1:]:
            address = int.from_bytes(memory.read(top - depth, word), "little")
            where = kernel.tracing.symbols.lookup(address)
            assert where is not None
            seen.append((depth, where.name, where.offset))

    kernel.register_kprobe(Kprobe(symbol_name=name, pre_handler=pre_handler))


def test_only_a_deeper_stack_is_noted(kernel: Kernel, tracer: StackTracer) -> None:
    tracer.enable(1)
    _open(kernel)
    before, deepest = list(tracer.records()), tracer.max_size
    tracer.set_max_size(deepest + 1)
    _open(kernel)
    assert (list(tracer.records()), tracer.max_size) == (before, deepest + 1)
    tracer.set_max_size(0)
    kernel.guest.syscalls.call(kernel.guest.processes.init, "getpid")
    assert 0 < tracer.max_size < deepest


def test_off_there_is_no_trace_of_it(kernel: Kernel, tracer: StackTracer) -> None:
    assert "Stack tracer disabled" in "".join(tracer.records())
    _open(kernel)
    assert tracer.max_size == 0
    tracer.enable(-1)
    assert kernel.machine.text.ledger
    assert "disabled" not in "".join(tracer.records())
    tracer.enable(0)
    assert kernel.machine.text.ledger == {}


def test_the_filter(kernel: Kernel, tracer: StackTracer) -> None:
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]
    tracer.enable(1)
    tracer.filter.write(b"vfs_*")
    assert all(line.startswith("vfs_") for line in tracer.filter.records())
    _open(kernel)
    assert _found(tracer)[0][3].startswith("vfs_")
    for data, error in (
        (b"none_such", "EINVAL"),
        (b"vfs_open:traceoff", "ENODEV"),
        (b"vfs_open:x", "EINVAL"),
    ):
        with pytest.raises(KernelError) as caught:
            tracer.filter.write(data)
        assert caught.value.name == error
    tracer.filter.clear()
    assert list(tracer.filter.records()) == ["#### all functions enabled ####\n"]


def test_beside_the_function_tracer(kernel: Kernel, tracer: StackTracer) -> None:
    """The function tracer and the stack tracer trace only the functions of their own filters."""
    filters = kernel.trace_arrays.top.functions.filter
    filters.write(b"vfs_open")
    tracer.filter.write(b"path_openat")
    kernel.trace.set_tracer("function")
    tracer.enable(1)
    _open(kernel)
    assert _found(tracer)[0][3] == "path_openat"
    lines = kernel.trace.trace_text().splitlines()
    assert {line.split(": ")[1].split()[0] for line in lines if " <-" in line} == {"vfs_open"}


def test_max_size_is_a_long(tracer: StackTracer) -> None:
    tracer.set_max_size((1 << 64) - 1)
    assert tracer.max_size == -1
