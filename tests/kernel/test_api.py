"""The public API: names, signatures, docstrings, types, and what a closed kernel answers."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import emulated_kernel
from emulated_kernel import (
    Fprobe,
    Jprobe,
    Kernel,
    KernelError,
    Kprobe,
    Kretprobe,
    KretprobeInstance,
    MachineConfig,
    MemoryFault,
    X86Regs,
)
from emulated_kernel.util.errors import WouldBlock
from emulated_kernel.vfs.core.open_file import File, OpenFile

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [name for name in vars(Kernel) if not name.startswith("_")]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted:
        yield booted


# Names


def run(script: str) -> str:
    """Run a script in a new Python process, and return its output."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_package_imports_nothing_else() -> None:
    script = (
        "import sys; before = set(sys.modules); import emulated_kernel; print(*set(sys.modules) - before)"
    )
    assert run(script) == "emulated_kernel"


def test_a_name_imports_only_what_it_needs() -> None:
    script = (
        "import sys; from emulated_kernel import KernelError; print('emulated_kernel.kernel' in sys.modules)"
    )
    assert run(script) == "False"


def test_every_public_name_is_there() -> None:
    for name in emulated_kernel.__all__:
        assert getattr(emulated_kernel, name) is not None
    assert set(emulated_kernel.__all__) <= set(dir(emulated_kernel))


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="kprobe"):
        exec("from emulated_kernel import kprobe")


# Signatures and docstrings


def test_help_shows_the_signature_and_the_docstring() -> None:
    text = pydoc.plain(pydoc.render_doc(Kernel.register_kprobe))
    assert "register_kprobe(self, kprobe:" in text
    assert "Register a kprobe" in text
    assert "Raises: KernelError EINVAL" in text
    assert "Mirrors: kernel/kprobes.c:register_kprobe" in text


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_method_has_a_docstring_and_annotations(name: str) -> None:
    member = inspect.getattr_static(Kernel, name)
    method = member.fget if isinstance(member, property) else member
    assert inspect.getdoc(member)
    signature = inspect.signature(method)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in list(signature.parameters.values())[1:]:
        assert parameter.annotation is not inspect.Parameter.empty


# Types

SNIPPET = """
from emulated_kernel import (
    Fprobe, Kernel, Kprobe, Kretprobe, KretprobeInstance, MachineConfig, RiscvRegs, X86Regs
)

seen: list[int] = []

def enter(kprobe: Kprobe, regs: X86Regs) -> None:
    seen.append(regs.di + regs.a0)  # "X86Regs" has no attribute "a0"

def leave(instance: KretprobeInstance, regs: X86Regs) -> None:
    seen.append(regs.rax)  # "X86Regs" has no attribute "rax"

def riscv(kprobe: Kprobe[RiscvRegs], regs: RiscvRegs) -> None:
    seen.append(regs.a0)

def after(kprobe: Kprobe, regs: X86Regs, flags: int) -> None:
    regs.ip += flags

with Kernel(MachineConfig(cpus=2)) as kernel:
    kernel.register_kprobe(Kprobe("gcd", pre_handler=enter, post_handler=after))
    kernel.register_kprobe(Kprobe("gcd", pre_handler=lambda _, regs: seen.append(regs.di)))
    kernel.register_kprobe(Kprobe("gcd", pre_handler=lambda _, regs: seen.append(regs.rdi)))  # no attribute
    kernel.register_kprobe(Kprobe("gcd", pre_handler=riscv))
    kernel.register_kprobe(Kprobe[RiscvRegs]("gcd", pre_handler=lambda _, regs: seen.append(regs.a7)))
    kernel.register_kretprobe(Kretprobe("gcd", handler=leave))
    kernel.register_fprobe(Fprobe("vfs_*", exit_handler=lambda fp, at, regs, data: seen.append(regs.ax)))
    kernel.register_kprob(Kprobe("gcd"))  # "Kernel" has no attribute "register_kprob"
    kernel.call("gcd", 12, 18.0)  # incompatible type "float"
    kernel.config.cpus = 3  # read-only

import emulated_kernel
emulated_kernel.Kprobes  # Module has no attribute "Kprobes"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_type_checker_knows_the_registers_of_handlers(tmp_path: Path) -> None:
    """mypy reports an error with the comment's text for each line of SNIPPET with a comment, and no error for
    other lines.
    """
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    found = subprocess.run([*command, snippet], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = {}
    for line in found.stdout.splitlines():
        place, _, message = line.partition(": error: ")
        errors[int(place.rpartition(":")[2])] = message
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(SNIPPET.splitlines(), 1)
        if "  # " in line
    }
    assert errors.keys() == expected.keys(), found.stdout + found.stderr
    for number, text in expected.items():
        assert text in errors[number]


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_handlers_get_the_registers_of_the_types(arch: str) -> None:
    """A handler can read every register of the types at a breakpoint, a call and an optimized probe.

    At a breakpoint the registers are live. At a call or an optimized probe, the registers are saved.
    """
    types = {"x86_64": "X86Regs", "i386": "I386Regs", "riscv64": "RiscvRegs"}
    names = list(inspect.get_annotations(getattr(emulated_kernel, types[arch])))
    seen: list[list[int]] = []

    def handler(_kprobe: Kprobe[object], regs: object) -> None:
        seen.append([getattr(regs, name) for name in names])

    with Kernel(MachineConfig(arch=arch, profile="linux-6.1")) as kernel:
        assert set(names) == set(kernel.arch.pt_regs)
        entry = kernel.kallsyms_lookup_name("int_sqrt")
        inside = boundaries(kernel, entry)[1:]
        optimized = [Kprobe(addr=at, pre_handler=handler) for at in inside if optimizable(kernel, at)][:1]
        traps = Kprobe("gcd", pre_handler=handler, post_handler=lambda _kprobe, _regs: None)
        probes = [Kprobe(addr=entry, pre_handler=handler), *optimized, traps]
        kernel.register_kprobes(probes)
        kernel.wait_for_kprobe_optimizer()
        modes = {kernel.probe_mode(probe) for probe in probes}
        kernel.call("int_sqrt", 144)
        kernel.call("gcd", 12, 18)
    assert {"optimized", "ftrace"} <= modes or arch == "riscv64"
    assert len(seen) >= 2


# Values


@pytest.mark.parametrize("name", ["arch", "cpus", "unknown"])
def test_a_configuration_is_frozen(name: str) -> None:
    config = MachineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)
    assert config == MachineConfig()


def test_reprs_show_addresses_in_hexadecimal(kernel: Kernel) -> None:
    address = kernel.kallsyms_lookup_name("gcd")
    instances: list[str] = []

    def returned(instance: KretprobeInstance, _regs: X86Regs) -> None:
        instances.append(repr(instance))

    kprobe = Kprobe(addr=address)
    rp = Kretprobe(addr=address, handler=returned)
    fp = Fprobe("gcd", entry_handler=lambda *_: None)
    kernel.register_kprobe(kprobe)
    kernel.register_kretprobe(rp)
    kernel.register_fprobe(fp)
    kernel.call("gcd", 12, 18)
    shown = [kprobe, rp, fp, Jprobe(entry=address, addr=address), kernel.image.kallsyms.lookup(address)]
    for text in [*map(repr, shown), *instances]:
        assert str(address) not in text
        assert "0xffffffff" in text
    assert f"addr={address:#x}" in repr(kprobe)
    assert f"functions=({address:#x},)" in repr(fp)


# Methods that replace reaching into the components


def test_modes_and_reasons_of_a_probe(kernel: Kernel) -> None:
    address = kernel.kallsyms_lookup_name("int_sqrt")
    inside = next(at for at in boundaries(kernel, address) if at > address and optimizable(kernel, at))
    probe = Kprobe(addr=inside)
    kernel.register_kprobe(probe)
    assert kernel.probe_mode(probe) in ("int3", "boosted")
    kernel.wait_for_kprobe_optimizer()
    assert kernel.probe_mode(probe) == "optimized"
    assert kernel.probe_reason(probe) == ""
    region = kernel.optimized_region(inside)
    assert kernel.patched_addresses()[0] == region.start == inside
    assert "jmp" in kernel.disassemble(inside, 5)
    assert kernel.read_text(inside, 5) != kernel.read_original_text(inside, 5)
    assert "jmp" in kernel.read_detour(probe)
    kernel.set_optimized(probe, False)
    assert kernel.probe_mode(probe) in ("int3", "boosted")
    kernel.allow_optimization(False)
    assert "optimization is off" in kernel.probe_reason(probe)
    kernel.disarm_all_kprobes()
    assert kernel.probe_mode(probe) == "disarmed"
    kernel.arm_all_kprobes()
    kernel.unregister_kprobe(probe)
    assert kernel.patched_addresses() == []
    for ask in (kernel.probe_mode, kernel.probe_reason, kernel.read_detour):
        with pytest.raises(KernelError, match="isn't registered") as raised:
            ask(probe)
        assert raised.value.errno == errno.EINVAL


def boundaries(kernel: Kernel, address: int) -> list[int]:
    lines = kernel.disassemble(address, 64).splitlines()
    return [int(line.partition(":")[0], 16) for line in lines]


def optimizable(kernel: Kernel, address: int) -> bool:
    try:
        return len(kernel.optimized_region(address)) > 0
    except KernelError:
        return False


def test_why_a_region_cannot_be_optimized(kernel: Kernel) -> None:
    with pytest.raises(KernelError, match="fentry") as raised:
        kernel.optimized_region(kernel.kallsyms_lookup_name("gcd"))
    assert raised.value.errno == errno.EOPNOTSUPP
    with pytest.raises(KernelError):
        kernel.optimized_region(0x1000)


def test_symbols(kernel: Kernel) -> None:
    address = kernel.kallsyms_lookup_name("gcd")
    assert kernel.sprint_symbol(address + 1).startswith("gcd+0x1/0x")
    kernel.load_module("ktgt")
    assert [module.name for module in kernel.loaded_modules()] == ["ktgt"]
    assert kernel.sprint_symbol(kernel.kallsyms_lookup_name("ktgt_add")).endswith(" [ktgt]")
    with pytest.raises(KernelError, match="no symbol named gcdd") as raised:
        kernel.kallsyms_lookup_name("gcdd")
    assert raised.value.errno == errno.ENOENT


def test_the_log_of_the_guest(kernel: Kernel) -> None:
    kernel.printk("hello from outside")
    assert kernel.messages()[-1].text == "hello from outside"
    assert not kernel.is_dead


def test_control_files_without_a_mount(kernel: Kernel) -> None:
    kernel.write_file("tracing/kprobe_events", "p:numbers int_sqrt number=%di\n")
    kernel.write_file("tracing/kprobe_events", "p:lengths strlen\n")
    assert kernel.read_file("kprobe_events").count("\n") == 2
    kernel.write_file("tracing/events/kprobes/numbers/enable", "1")
    with pytest.raises(KernelError) as raised:
        kernel.read_file("tracing/trace_pipe")
    assert raised.value.errno == errno.EAGAIN
    kernel.call("int_sqrt", 144)
    assert "numbers: (int_sqrt+0x0/" in kernel.read_file("tracing/trace")
    assert "number=0x90" in kernel.read_file("tracing/trace_pipe")
    with pytest.raises(KernelError) as raised:
        kernel.write_file("tracing/kprobe_events", "p:wrong no_such_function\n")
    assert raised.value.errno == errno.ENOENT
    assert "no_such_function" in kernel.read_file("tracing/error_log")
    with pytest.raises(KernelError) as raised:
        kernel.read_file("tracing/events")
    assert raised.value.errno == errno.EISDIR


def test_modules_are_loaded_by_their_file(kernel: Kernel) -> None:
    kernel.write_file("machine/modules", "load ktgt\n")
    assert [module.name for module in kernel.loaded_modules()] == ["ktgt"]
    kernel.write_file("machine/modules", "unload ktgt\n")
    assert kernel.loaded_modules() == []
    for text, name in (("reload ktgt\n", "EINVAL"), ("load nothing\n", "ENOENT")):
        with pytest.raises(KernelError) as raised:
            kernel.write_file("machine/modules", text)
        assert raised.value.name == name


class Full(OpenFile):
    """An open file that takes three bytes of the first write and nothing of later writes."""

    def _write(self, data: bytes) -> int:
        return len(data) if len(data) < 4 else 3 if data.startswith(b"some") else 0


class Busy(OpenFile):
    """An open file whose writes raise WouldBlock."""

    def _write(self, data: bytes) -> int:
        del data
        raise WouldBlock("no room")


@pytest.mark.parametrize(("kind", "name"), [(Full, "ENOSPC"), (Busy, "EAGAIN")])
def test_text_that_a_file_does_not_take_is_an_error(
    kernel: Kernel, kind: type[OpenFile], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Special(File):
        opened_as = kind

    tree = kernel.filesystem(further={"special": Special(0o600)})
    monkeypatch.setattr(kernel, "filesystem", lambda: tree)
    with pytest.raises(KernelError, match="machine/special: ") as raised:
        kernel.write_file("machine/special", "some text")
    assert raised.value.name == name


def test_a_ring_that_is_too_large_is_an_error(kernel: Kernel) -> None:
    with pytest.raises(KernelError, match="capacity") as raised:
        kernel.hit_ring("di", capacity=1 << 40)
    assert raised.value.name == "ENOMEM"


def test_a_handler_may_read_and_write_but_not_sleep(kernel: Kernel) -> None:
    seen: list[object] = []
    buffer = kernel.machine.user_buffers.alloc(8)

    def handler(kprobe: Kprobe, regs: X86Regs) -> None:
        seen.append(kernel.read_cstring(regs.di))
        seen.append(kernel.read_memory(regs.di, 2))
        kernel.write_memory(buffer, b"written")
        seen.append(kernel.sprint_symbol(kprobe.address).partition("+")[0])
        seen.append(kernel.ktime_get_ns() > 0)
        seen.append(kernel.probe_mode(kprobe))
        try:
            kernel.wait_for_kprobe_optimizer()
        except KernelError as error:
            seen.append(error.name)

    kernel.register_kprobe(Kprobe("strlen", pre_handler=handler))
    assert kernel.call("strlen", "probes") == 6
    assert seen == [b"probes", b"pr", "strlen", True, "ftrace", "EDEADLK"]
    assert kernel.read_memory(buffer, 7) == b"written"
    with pytest.raises(MemoryFault):
        kernel.read_memory(0, 1)


# The end

ARGUMENTS: dict[str, tuple[object, ...]] = {
    "mount": (),
    "mounted": (None,),
    "replace_kernel": (None, None),
    "adopt_mount": (None, None),
    "regs_return_value": (None,),
    "call": ("gcd", 12, 18),
    "printk": ("x",),
    "read_file": ("kprobe_events",),
    "write_file": ("kprobe_events", ""),
    "load_module": ("ktgt",),
    "unload_module": ("ktgt",),
    "kallsyms_lookup_name": ("gcd",),
    "write_memory": (0, b""),
    "allow_optimization": (True,),
}


def arguments(name: str) -> tuple[object, ...]:
    """Return arguments for the method `name` of Kernel, chosen by the method's name or by the names of its
    parameters.
    """
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    values = {
        "kprobe": Kprobe("gcd"),
        "rp": Kretprobe("gcd"),
        "jprobe": Jprobe(symbol_name="gcd"),
        "fp": Fprobe("gcd"),
        "kprobes": [Kprobe("gcd")],
        "rps": [Kretprobe("gcd")],
        "jprobes": [Jprobe(symbol_name="gcd")],
        "addr": 0,
        "size": 1,
        "wanted": True,
    }
    parameters = inspect.signature(getattr(Kernel, name)).parameters.values()
    return tuple(values[p.name] for p in parameters if p.name in values)


@pytest.fixture(scope="module")
def closed() -> Kernel:
    kernel = Kernel(MachineConfig(profile="kprobes-2010"))
    kernel.close()
    return kernel


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "close"])
def test_a_closed_kernel_says_so(closed: Kernel, name: str) -> None:
    def use() -> None:
        member = getattr(closed, name)
        if callable(member):
            member(*arguments(name))

    with pytest.raises(KernelError, match="the kernel is closed") as raised:
        use()
    assert raised.value.errno == errno.ENODEV


def test_closing_twice_is_closing_once() -> None:
    with Kernel() as kernel:
        kernel.close()
    kernel.close()


def test_close_in_a_handler_is_refused() -> None:
    """close() in a handler is refused with EDEADLK, because the machine that runs the handler would
    be freed.
    """
    found: list[int | None] = []

    def close(_probe: object, _regs: object) -> None:
        with pytest.raises(KernelError) as refused:
            booted.close()
        found.append(refused.value.errno)

    with Kernel() as booted:
        booted.register_kprobe(Kprobe("int_sqrt", pre_handler=close))
        assert booted.call("int_sqrt", 49) == 7
    assert found == [errno.EDEADLK]
