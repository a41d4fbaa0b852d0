"""Recorded hist and trigger files, made again from hits with the recorded values."""

from __future__ import annotations

from tests.trace.events.kernel import Function, Hit
from tests.trace.events.recorded import sample
from tests.trace.trigger.control import Control, TriggerKernel

_TRAMPOLINE, _VFS_MKDIR = 0xFFFFFFFF8106BA10, 0xFFFFFFFF8135D4F0
_FUNCTIONS = (
    Function("vfs_mkdir", _VFS_MKDIR, size=0x140),
    Function("arch_rethook_trampoline", _TRAMPOLINE, size=0x60, fentry=False),
)
_CHAIN = (
    Function("aggr_pre_handler", 0xFFFFFFFF81100000, size=0x80),
    Function("kprobe_ftrace_handler", 0xFFFFFFFF81101000, size=0x1B0),
    Function("do_mkdirat", 0xFFFFFFFF81102000, size=0x170),
    Function("__x64_sys_mkdir", 0xFFFFFFFF81103000, size=0x60),
    Function("do_syscall_64", 0xFFFFFFFF81104000, size=0x90),
    Function("entry_SYSCALL_64_after_hwframe", 0xFFFFFFFF81105000, size=0xD8),
)
_OFFSETS = (0x40, 0x10B, 0x142, 0x45, 0x5D, 0x6E)
_SYMBOLS = "p:a vfs_mkdir ip=%ip:symbol st0=$stack0:symbol\n"


def _kernel(*functions: Function, chain: tuple[int, ...] = ()) -> TriggerKernel:
    return TriggerKernel(Control(chain=chain), (*_FUNCTIONS, *functions))


def _hit(kernel: TriggerKernel, times: int = 3, **regs: int) -> None:
    for _ in range(times):
        hit = Hit(memory={0xFFFFC90000393CE0: _TRAMPOLINE.to_bytes(8, "little")})
        kernel.hit(hit, sp=0xFFFFC90000393CE0, ip=_VFS_MKDIR + 1, **regs)


def _chain() -> tuple[int, ...]:
    places = [function.address + offset for function, offset in zip(_CHAIN, _OFFSETS, strict=True)]
    return (*places[:2], 0xFFFFFFFFC02190C8, _VFS_MKDIR + 5, *places[2:])


def test_symbols() -> None:
    kernel = _kernel()
    kernel.define(_SYMBOLS)
    kernel.write("hist:keys=ip.sym,st0.sym-offset")
    kernel.write("hist:keys=__probe_ip.sym")
    _hit(kernel)
    assert kernel.hist() == sample("hist_psym.txt")
    assert kernel.show() == sample("trigger_psym.txt")


def test_names_and_stacks() -> None:
    kernel = _kernel(*_CHAIN, chain=_chain())
    kernel.define("p:a vfs_mkdir a8=%di:u8\n")
    kernel.write("hist:keys=a8,common_pid.execname")
    kernel.write("hist:keys=stacktrace")
    kernel.write("stacktrace")
    _hit(kernel, di=224)
    assert kernel.hist().replace("[        42]", "[       117]") == sample("hist_pint.txt")
    assert kernel.show() == sample("trigger_pint.txt")


def test_values() -> None:
    kernel = _kernel()
    kernel.define("p:a vfs_mkdir ret=%ax:s32 rx=%ax:x64\n")
    kernel.write("hist:keys=ret:values=rx:sort=ret")
    _hit(kernel)
    assert kernel.hist() == sample("hist_rret.txt")
    assert kernel.show() == sample("trigger_rret.txt")


def test_strings() -> None:
    recorded = sample("hist_pstr.txt")
    name = recorded.partition("{ fn: ")[2].partition(" }")[0]
    kernel = _kernel()
    kernel.define("p:a vfs_mkdir fn=+0(%di):string\n")
    kernel.write("hist:keys=fn")
    text = name.rstrip(" ").encode("utf-8", "surrogateescape")
    for _ in range(9):
        kernel.hit(Hit(memory={0x1000: text + b"\0"}), di=0x1000)
    assert kernel.hist() == recorded
