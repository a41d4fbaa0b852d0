"""Detects the tracefs interface of a distribution's kernel from the kernel's own error table and README."""

from __future__ import annotations

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES, ProbeRule
from emulated_kernel.image.linux.arm64_image import ARM64
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.kprobes.profile import (
    KERNEL_INTERFACE,
    PROFILES,
    RISCV_PROFILE,
    Profile,
    arm64_profile,
)
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.linux_rule import series_of

_ERRORS = "trace_probe_err_text"
_README = "readme_msg"
_WITH_FTRACE = frozenset((InterfaceRule.FPROBE_EVENTS, InterfaceRule.TRACEPOINT_EVENTS))
_WORD = 8
_LONGEST = 256
"""Maximum size in bytes of a text in the error table, including its NUL."""


def profile_of(kernel: LinuxKernel, riscv: str = RISCV_PROFILE) -> Profile:
    """Return the profile for a kernel: the kernel's own interface, and the probe rules of its version.

    On RISC-V, jump optimization follows an out-of-tree series of patches, because no release of Linux has it.
    `riscv`: name of the profile of that series.
    """
    series = series_of(kernel.release)
    wanted = ProbeRule.of(series)
    fitting = [name for name, rules in PROBE_RULES.items() if rules <= wanted]
    rules = max(fitting, key=lambda name: len(PROBE_RULES[name]))
    if kernel.architecture == ARM64:
        return arm64_profile(series, rules)
    if kernel.architecture != "x86_64":
        return replace(PROFILES[riscv], interface=KERNEL_INTERFACE, probe_rules=rules)
    return Profile(
        f"linux-{series}",
        # Mirrors: kernel/sched/core.c:preempt_schedule, with CONFIG_PREEMPTION (v6.1).
        preemption=kernel.kallsyms.lookup_name("preempt_schedule") is not None,
        interface=KERNEL_INTERFACE,
        probe_rules=rules,
    )


def interface_with(kernel: LinuxKernel, profile: Profile) -> Interface:
    """Return the tracefs interface of a mount of `kernel` in which probes follow `profile`.

    The interface is the kernel's own. If the profile has no ftrace, the interface has no fprobe events and no
    probe events on tracepoints, because Linux builds both only with ftrace.
    Mirrors: kernel/trace/Kconfig:FPROBE_EVENTS (v6.12).
    """
    found = detect_interface(kernel)
    return found if profile.ftrace else replace(found, rules=found.rules - _WITH_FTRACE)


def detect_interface(kernel: LinuxKernel) -> Interface:
    """Return the tracefs interface of a kernel.

    The features of the interface are found by the texts of the kernel's error table and README, and by its
    functions. A feature that they do not show follows from the kernel's version.
    """
    texts = _error_table(kernel)
    series = series_of(kernel.release)
    readme = _text(kernel, _README)
    found = "\n".join([*texts, readme, *_functions(kernel)])
    return Interface(
        f"linux-{series}",
        kernel.release,
        # A dump may lack these pages.
        InterfaceRule.detected(series, found) if texts and readme else InterfaceRule.of(series),
        {error: text for error in ProbeError for text in error.texts[1:] if text in texts},
    )


def _functions(kernel: LinuxKernel) -> list[str]:
    """Return the names of those functions of a kernel that show features of its interface.

    The names end with `()`, as in `fprobe_return()`.
    """
    signs = {rule.sign for rule in InterfaceRule if rule.sign.endswith("()")}
    return [sign for sign in signs if kernel.kallsyms.lookup_name(sign.removesuffix("()")) is not None]


def _error_table(kernel: LinuxKernel) -> frozenset[str]:
    """Return the texts of the kernel's table of errors in probe definitions; empty if there is no table.

    The table ends at the first word that is no address of a text, because other data may follow it.
    """
    table = _bytes(kernel, _ERRORS)
    texts: set[str] = set()
    for at in range(0, len(table), _WORD):
        data = _read(kernel, int.from_bytes(table[at : at + _WORD], "little"), _LONGEST)
        if not data:
            break
        texts.add(_string(data))
    return frozenset(texts)


def _text(kernel: LinuxKernel, symbol: str) -> str:
    return _string(_bytes(kernel, symbol))


def _bytes(kernel: LinuxKernel, symbol: str) -> bytes:
    """Return the bytes from a symbol to the next symbol.

    Return b"" if the kernel lacks the symbol, or the kernel's file lacks the bytes.
    """
    start = kernel.kallsyms.lookup_name(symbol)
    found = None if start is None else kernel.kallsyms.lookup(start)
    return b"" if start is None or found is None else _read(kernel, start, found.symbol.size)


def _read(kernel: LinuxKernel, address: int, size: int) -> bytes:
    """Return `size` bytes of the kernel at `address`; b"" if the kernel's file does not have them."""
    try:
        return kernel.read(address, size)
    except KernelError:
        return b""


def _string(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("latin-1")
