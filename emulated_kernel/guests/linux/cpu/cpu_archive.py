"""Archives that describe the CPU of a production machine.

An archive is a text file that `tail -n +1` makes of files in /proc and /sys. Each part begins with a line
`==> NAME <==`. A part is found by the last components of NAME, the path of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from errno import EINVAL
from pathlib import Path

from emulated_kernel.guests.linux.cpu.cpu_models import capabilities_of, model_named
from emulated_kernel.guests.linux.cpu.derived_bits import decided_bits, derived_bits
from emulated_kernel.guests.linux.cpu.production_cpu import HYPERVISOR, INTEL, ProductionCpu
from emulated_kernel.util.config import HOST
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import read_named

_LIMIT = 16 << 20
"""Maximum size of an archive in bytes: /proc/cpuinfo of a thousand CPUs has a few MiB."""
_HEADING = re.compile(r"==> (.{1,4096}) <==")
_VULNERABILITIES = "vulnerabilities/"
_SYSTEM = Path("/sys/devices/system/cpu")
_LEAF = re.compile(
    r"\s*0x([0-9a-f]{8}) 0x([0-9a-f]{2,8}): eax=0x([0-9a-f]{8}) ebx=0x([0-9a-f]{8}) "
    r"ecx=0x([0-9a-f]{8}) edx=0x([0-9a-f]{8})"
)
_CAPABILITIES = "msr 0x10a"
_PARAMETERS = frozenset(
    [
        "mitigations",
        "nospectre_v1",
        "nospectre_v2",
        "spectre_v2",
        "spectre_v2_user",
        "spectre_bhi",
        "retbleed",
        "spec_store_bypass_disable",
        "nospec_store_bypass_disable",
        "l1tf",
        "mds",
        "tsx_async_abort",
        "mmio_stale_data",
        "srbds",
        "gather_data_sampling",
        "reg_file_data_sampling",
        "spec_rstack_overflow",
        "indirect_target_selection",
        "tsa",
        "vmscape",
        "pti",
        "nopti",
        "tsx",
        "nosmt",
        "nosmap",
        "nosmep",
        "nopcid",
        "noinvpcid",
        "nofsgsbase",
        "noxsave",
        "noxsaveopt",
        "noxsaves",
        "clearcpuid",
        "kvm.nx_huge_pages",
    ]
)
"""Parameters of the kernel's command line that decide how the kernel uses its CPU."""
_COMMAND = (
    "tail -n +1 /proc/cpuinfo /proc/cmdline /proc/sys/kernel/osrelease "
    "/sys/devices/system/cpu/vulnerabilities/* /sys/devices/system/cpu/smt/*"
)
"""Command whose output is an archive of the machine's CPU."""
_REMEDY = f"make it on the machine with `{_COMMAND} > FILE`"
_SOURCE = "/proc/cpuinfo and the files of vulnerabilities"


def production_cpu(name: str) -> ProductionCpu:
    """Return the CPU that option --cpu names: a model (a key of MODELS), `host`, or the path of an archive.

    Raises: KernelError EINVAL (the archive is incomplete, or the host is no x86), OSError (no such file).
    """
    if name == HOST:
        return cpu_of_archive("the host's CPU", _host_parts())
    model = model_named(name)
    if model is not None:
        return model
    data = read_named(Path(name), _LIMIT)
    if len(data) >= _LIMIT:
        raise KernelError(EINVAL, f"more than {_LIMIT >> 20} MiB: not the archive of a CPU")
    return cpu_of_archive(os.path.basename(name), parts_of(data.decode("utf-8", "replace")))


def parts_of(text: str) -> Mapping[str, str]:
    """Return the parts of an archive: path of a file -> its text, without blanks at the start and end."""
    found: dict[str, list[str]] = {}
    part: list[str] = []
    for line in text.splitlines():
        heading = _HEADING.fullmatch(line)
        if heading is None:
            part.append(line)
        else:
            # Each CPU has a part of its own, if a pattern was used; the first one counts.
            part = found.setdefault(heading[1], []) if heading[1] not in found else []
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def _host_parts() -> Mapping[str, str]:
    found = {}
    places = ["/proc/cpuinfo", "/proc/cmdline", "/proc/sys/kernel/osrelease"]
    for directory in ("vulnerabilities", "smt"):
        try:
            places += [f"{_SYSTEM}/{directory}/{name}" for name in os.listdir(_SYSTEM / directory)]
        except OSError:
            continue
    for place in places:
        found[place] = Path(place).read_text(encoding="utf-8", errors="replace").strip()
    return found


def cpu_of_archive(title: str, parts: Mapping[str, str]) -> ProductionCpu:
    """Return the CPU that the parts of an archive describe. `title`: name of the CPU for users.

    `parts`: see parts_of().

    Raises: KernelError EINVAL (a part is missing or invalid).
    """
    info = _first_cpu(_part(parts, "cpuinfo"))
    said = dict(_vulnerabilities(parts))
    if not said:
        raise KernelError(EINVAL, f"no files of vulnerabilities in the archive; {_REMEDY}")
    vendor = info.get("vendor_id", "")
    family, model, stepping = (_number(info, key) for key in ("cpu family", "model", "stepping"))
    flags = tuple(info.get("flags", "").split())
    if not vendor or not flags:
        raise KernelError(EINVAL, "/proc/cpuinfo of no x86 CPU: it has no vendor_id or no flags")
    notes = []
    derived = derived_bits(vendor, family, model, flags, said)
    capabilities = derived.capabilities
    recorded = _part(parts, _CAPABILITIES, needed=False)
    leaves = tuple(_leaves(_part(parts, "cpuid", needed=False)))
    if recorded:
        capabilities = _hexadecimal(recorded)
    elif "arch_capabilities" in flags and vendor == INTEL:
        if HYPERVISOR not in flags:
            capabilities |= capabilities_of(family, model, stepping) & ~decided_bits(said)
        notes.append(f"IA32_ARCH_CAPABILITIES = {capabilities:#x} was derived from {_SOURCE}")
    if derived.hidden and not leaves:
        notes.append(f"{', '.join(derived.hidden)}: derived from {_SOURCE}")
    if "microcode" not in info and HYPERVISOR not in flags:
        notes.append("the revision of the microcode is not known")
    siblings = _part(parts, "smt/active", needed=False)
    threads = max(_number(info, "siblings", 1) // max(_number(info, "cpu cores", 1), 1), 1)
    return ProductionCpu(
        title=title,
        vendor=vendor,
        family=family,
        model=model,
        stepping=stepping,
        model_name=info.get("model name", ""),
        microcode=int(info.get("microcode", "0"), 16),
        threads=threads,
        has_siblings=siblings == "1" if siblings else threads > 1,
        flags=flags,
        hidden=() if leaves else derived.hidden,
        capabilities=capabilities,
        parameters=tuple(_parameters(_part(parts, "cmdline", needed=False))),
        cpuid=leaves,
        release=_part(parts, "osrelease", needed=False),
        vulnerabilities=said,
        notes=tuple(notes),
    )


def _part(parts: Mapping[str, str], end: str, *, needed: bool = True) -> str:
    for name, text in parts.items():
        if name == end or name.endswith(f"/{end}"):
            return text
    if needed:
        raise KernelError(EINVAL, f"no {end} in the archive; {_REMEDY}")
    return ""


def _first_cpu(text: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not colon and found:
            break
        if key.strip() == "processor" and found:
            break
        found.setdefault(key.strip(), value.strip())
    return found


def _vulnerabilities(parts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in parts.items():
        _, found, file = name.rpartition(_VULNERABILITIES)
        if found and file:
            yield file, text


def _parameters(line: str) -> Iterator[str]:
    for word in line.split():
        if word.partition("=")[0] in _PARAMETERS:
            yield word


def _leaves(text: str) -> Iterator[tuple[int, int, int, int, int, int]]:
    for line in text.splitlines():
        found = _LEAF.match(line)
        if found:
            leaf, subleaf, ax, bx, cx, dx = (int(group, 16) for group in found.groups())
            yield leaf, subleaf, ax, bx, cx, dx


def _number(info: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = info.get(key, "")
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    if default is None:
        raise KernelError(EINVAL, f"/proc/cpuinfo has no number as its {key!r}")
    return default


def _hexadecimal(text: str) -> int:
    if not re.fullmatch("(0x)?[0-9a-f]{1,16}", text):
        raise KernelError(EINVAL, f"{_CAPABILITIES}: not a hexadecimal number")
    return int(text, 16)
