"""ProductionCpu: the description of a CPU, from which a kernel decides how to patch itself at boot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from emulated_kernel.util.fast_dataclass import asdict, dataclass, field

INTEL = "GenuineIntel"
AMD = "AuthenticAMD"
HYGON = "HygonGenuine"
HYPERVISOR = "hypervisor"
"""Name of the feature flag that only CPUs in virtual machines have."""


@dataclass(frozen=True)
class ProductionCpu:
    """A CPU, the report of a production kernel about the CPU, and the kernel's boot parameters.

    `flags` are the names of the features that /proc/cpuinfo shows. `hidden` are the names of features that
    /proc/cpuinfo does not show.
    """

    title: str
    """Name of the CPU in the output of commands."""
    vendor: str
    """Vendor string of CPUID, which /proc/cpuinfo shows as vendor_id."""
    family: int
    model: int
    stepping: int
    model_name: str = ""
    microcode: int = 0
    """Revision of the microcode; 0 if it is not known."""
    threads: int = 1
    """Number of hardware threads of each core."""
    has_siblings: bool = False
    """Whether more than one thread of a core is online; if False, each core has one online thread."""
    flags: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    capabilities: int = 0
    """Value of the register IA32_ARCH_CAPABILITIES; 0 if the CPU has none."""
    parameters: tuple[str, ...] = ()
    """Parameters of the kernel's command line that concern the CPU."""
    cpuid: tuple[tuple[int, int, int, int, int, int], ...] = ()
    """Recorded results of CPUID, each (leaf, subleaf, eax, ebx, ecx, edx); empty if none were recorded."""
    release: str = ""
    """Release of the kernel that runs on the CPU; "" if it is not known."""
    vulnerabilities: Mapping[str, str] = field(default_factory=dict)
    """File of /sys/devices/system/cpu/vulnerabilities -> its text in the kernel that runs on the CPU."""
    notes: tuple[str, ...] = ()
    """Sentences about facts that were derived or are not known, for the output of commands."""

    @property
    def is_virtual(self) -> bool:
        """Whether the CPU belongs to a virtual machine."""
        return HYPERVISOR in self.flags

    @property
    def features(self) -> frozenset[str]:
        """Names of all features of the CPU."""
        return frozenset((*self.flags, *self.hidden))

    @property
    def signature(self) -> int:
        """Value of eax after CPUID leaf 1: the CPU's family, model and stepping.

        Mirrors: arch/x86/lib/cpu.c:x86_family, x86_model (v6.1).
        """
        family = min(self.family, 15)
        high = self.model >> 4 if family in (6, 15) else 0
        return (
            self.stepping | (self.model & 15) << 4 | family << 8 | high << 16 | (self.family - family) << 20
        )

    def as_text(self) -> str:
        """Return the CPU as JSON, from which from_text() restores it. Equal CPUs have equal texts."""
        return json.dumps({**asdict(self), "vulnerabilities": dict(sorted(self.vulnerabilities.items()))})


def from_text(text: str) -> ProductionCpu:
    """Return the CPU that as_text() wrote. Raises: ValueError, TypeError, KeyError (`text` is invalid)."""
    fields: dict[str, Any] = json.loads(text)
    for name in ("flags", "hidden", "parameters", "notes"):
        fields[name] = tuple(fields[name])
    leaves = []
    for leaf, subleaf, ax, bx, cx, dx in fields["cpuid"]:
        leaves.append((leaf, subleaf, ax, bx, cx, dx))
    fields["cpuid"] = tuple(leaves)
    return ProductionCpu(**fields)
