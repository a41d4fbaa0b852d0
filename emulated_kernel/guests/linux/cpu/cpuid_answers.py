"""CpuidAnswers: results of the instructions cpuid and rdmsr in a guest that runs on a ProductionCpu."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from emulated_kernel.guests.linux.cpu.cpuid_bits import AX, BITS, BX, CLAIMED, KEPT_OUT
from emulated_kernel.guests.linux.cpu.production_cpu import INTEL, ProductionCpu

Leaf = tuple[int, int, int, int]
"""Result of cpuid: the values of eax, ebx, ecx and edx."""
MICROCODE = 0x8B
FEATURE_CONTROL = 0x3A
ARCH_CAPABILITIES = 0x10A
MISC_ENABLE = 0x1A0
_VMX_ON = 5
"""Value of IA32_FEAT_CTL: the firmware has allowed VMX outside of SMX, and locked the register."""
_FAST_STRINGS = 1
"""Value of IA32_MISC_ENABLE: `rep movs` and `rep stos` are fast.

Without this bit, Linux clears `rep_good` and `erms` of an Intel CPU, but not `fsrm`. With `fsrm` alone,
memmove() of 5.10 and 6.1 writes beyond the end of short copies.

Mirrors: arch/x86/kernel/cpu/intel.c:early_init_intel (v6.1).
"""
_VENDOR = 0
_BASIC = 1
_TOPOLOGY = 0xB
_EXTENDED = 0x80000000
_EXTENDED_FEATURES = 0x80000001
_BRAND = range(0x80000002, 0x80000005)
_AMD_TOPOLOGY = 0x8000001E
_LAST_BASIC = 0x16
_LAST_EXTENDED = 0x80000021
_THREADS_SHIFT = 16
_SMT_LEVEL = 1 << 8
_CORE_LEVEL = 2 << 8 | 1
_FEATURES = frozenset((bit.leaf, bit.subleaf, bit.register) for bit in BITS.values())
"""Registers of cpuid that contain feature bits: (leaf, subleaf, index of the register in Leaf)."""
_WITH_SUBLEAVES = (7, 0xD)


class CpuidAnswers:
    """Results of the instructions cpuid and rdmsr on one production CPU."""

    def __init__(self, cpu: ProductionCpu) -> None:
        self._cpu = cpu
        self._wanted = _masks(cpu.features)
        for leaf, subleaf, *recorded in cpu.cpuid:
            for register, value in enumerate(recorded):
                if (leaf, subleaf, register) in _FEATURES:
                    self._wanted[leaf, subleaf, register] = value
        self._claimed = _masks(CLAIMED)
        self._kept_out = _masks(KEPT_OUT)
        brand = cpu.model_name.encode("ascii", "replace")[:47].ljust(48, b"\0")
        self._brand = struct.unpack("<12I", brand)

    def cpuid(self, leaf: int, subleaf: int, base: Leaf) -> Leaf:
        """Return the registers that the guest sees after cpuid with eax = `leaf` and ecx = `subleaf`.

        `base`: the registers that the emulated CPU would return. A feature bit of the production CPU is left
        out if the emulated CPU lacks the feature (except those in CLAIMED), or if the feature is in KEPT_OUT.
        """
        cpu = self._cpu
        registers = list(base)
        for register in range(4):
            key = (leaf, subleaf if leaf in _WITH_SUBLEAVES else 0, register)
            if key in _FEATURES:
                can = base[register] & ~self._kept_out.get(key, 0) | self._claimed.get(key, 0)
                registers[register] = self._wanted.get(key, 0) & can
        if leaf in (_VENDOR, _EXTENDED):
            bx, dx, cx = struct.unpack("<3I", cpu.vendor.encode("ascii", "replace")[:12].ljust(12, b"\0"))
            registers = [_LAST_BASIC if leaf == _VENDOR else _LAST_EXTENDED, bx, cx, dx]
        elif leaf == _BASIC:
            registers[AX] = cpu.signature
            registers[BX] = base[BX] & 0xFF00FFFF | cpu.threads << _THREADS_SHIFT
        elif leaf == _EXTENDED_FEATURES:
            registers[AX] = 0 if cpu.vendor == INTEL else cpu.signature
        elif leaf in _BRAND:
            at = 4 * (leaf - _BRAND.start)
            registers = list(self._brand[at : at + 4])
        elif leaf == _TOPOLOGY:
            registers = self._topology(subleaf)
        elif leaf == _AMD_TOPOLOGY:
            registers = [0, cpu.threads - 1 << 8, 0, 0]
        ax, bx, cx, dx = registers
        return ax, bx, cx, dx

    def _topology(self, subleaf: int) -> list[int]:
        threads = self._cpu.threads
        shift = (threads - 1).bit_length()
        if subleaf == 0:
            return [shift, threads, _SMT_LEVEL, 0]
        if subleaf == 1:
            return [shift, threads, _CORE_LEVEL, 0]
        return [0, 0, subleaf, 0]

    @property
    def registers(self) -> Mapping[int, int]:
        """Number of a model-specific register -> value that the guest's rdmsr returns.

        The value replaces the one that the emulator would return.
        """
        cpu = self._cpu
        found = {MICROCODE: cpu.microcode << 32 if cpu.vendor == INTEL else cpu.microcode}
        if "arch_capabilities" in cpu.flags:
            found[ARCH_CAPABILITIES] = cpu.capabilities
        if cpu.vendor == INTEL and "rep_good" in cpu.flags:
            found[MISC_ENABLE] = _FAST_STRINGS
        if "vmx" in cpu.flags:
            found[FEATURE_CONTROL] = _VMX_ON
        return found


def _masks(features: frozenset[str]) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    for name in features:
        if name in BITS:
            leaf, subleaf, register, bit = BITS[name]
            found[leaf, subleaf, register] = found.get((leaf, subleaf, register), 0) | 1 << bit
    return found
