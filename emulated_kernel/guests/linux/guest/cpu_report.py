"""CpuReport: a booted guest's report about the vulnerabilities and features of its CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated_kernel.arch.x86.insn import decode_all
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.guest_abi import X86_64
from emulated_kernel.guests.linux.initramfs import PROC
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.image.linux.cpu_features import capability_words
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

_DIRECTORY = f"{PROC}/devices/system/cpu/vulnerabilities"
_RDMSR = b"\x0f\x32"
_LONGEST = 1 << 16
"""Maximum size in bytes of a function that is searched for rdmsr."""
_SMT_PRESENT = "sched_smt_present"
_BEFORE_INIT = "free_initmem"
"""Function that the kernel calls once, in process context, before it starts init.

At this call, show_threads() makes the kernel act as if a second thread had come online.
"""


@dataclass(frozen=True)
class CpuReport:
    """The CPU that a guest was booted with, and the guest's report about it."""

    cpu: ProductionCpu
    release: str
    """Release of the guest's kernel."""
    vulnerabilities: Mapping[str, str]
    """File of /sys/devices/system/cpu/vulnerabilities -> its text in the guest."""

    @property
    def differences(self) -> Mapping[str, tuple[str, str]]:
        """Vulnerability's file -> (text in production, text in the guest), for files whose texts differ.

        Files that exist in only one of the two kernels are left out.
        """
        return {
            file: (text, self.vulnerabilities[file])
            for file, text in self.cpu.vulnerabilities.items()
            if text != self.vulnerabilities.get(file, text)
        }

    @property
    def is_as_on_production(self) -> bool:
        """Whether the guest has production's kernel release, and `differences` is empty.

        False if production's files of vulnerabilities were not recorded.
        """
        is_recorded = bool(self.cpu.vulnerabilities)
        return is_recorded and not self.differences and self.cpu.release == self.release

    @property
    def cpu_description(self) -> str:
        """Description of the CPU for which the kernel has patched its text, for the output of commands."""
        cpu = self.cpu
        if not cpu.vulnerabilities:
            return cpu.title
        name = f"{cpu.model_name or cpu.vendor} of {cpu.title}"
        return f"{name}, as on production" if self.is_as_on_production else name

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for the output of commands: the differences from production, and the notes of `cpu`."""
        cpu = self.cpu
        found = []
        if cpu.release and cpu.release != self.release:
            found.append(f"{cpu.title} is of kernel {cpu.release}, not of {self.release}")
        elif cpu.vulnerabilities and not cpu.release:
            found.append(f"{cpu.title} does not say which kernel it is of")
        for file, (production, guest) in self.differences.items():
            found.append(f'not as on production: {file} is "{production}" there, "{guest}" here')
        for there, here, whose in (
            (self.vulnerabilities, cpu.vulnerabilities, cpu.title),
            (cpu.vulnerabilities, self.vulnerabilities, "this kernel"),
        ):
            unknown = sorted(there.keys() - here.keys())
            if cpu.vulnerabilities and unknown:
                found.append(f"{whose} says nothing about {', '.join(unknown)}")
        return (*found, *cpu.notes)


def cpu_text(tasks: LinuxTasks) -> str:
    """Return the text of the file machine/cpu: the guest's CPU, remarks, and reported vulnerabilities."""
    shown = tasks.shown_cpu
    if shown is None:
        return f"the emulator's CPU{', which --cpu replaces' if tasks.machine.abi is X86_64 else ''}\n"
    report = CpuReport(shown.cpu, tasks.release, shown.vulnerabilities)
    lines = [report.cpu_description, *report.remarks]
    lines += [f"{file}: {text}" for file, text in sorted(shown.vulnerabilities.items())]
    return "".join(f"{line}\n" for line in lines)


def rdmsr_sites(kernel: LinuxKernel) -> Sequence[int]:
    """Return the addresses of the kernel's rdmsr instructions, including those in code that boot frees."""
    found = []
    seen = set()
    start = kernel.text.start
    for symbol in kernel.kallsyms.symbols:
        if symbol.address < start or symbol.address in seen or not 0 < symbol.size <= _LONGEST:
            continue
        seen.add(symbol.address)
        if symbol.type not in "tTwW" or not kernel.vmlinux.has(symbol.address):
            continue
        code = kernel.read(symbol.address, symbol.size)
        if _RDMSR in code:
            insns = decode_all(code, symbol.address)
            found += [at for at, size, _ in insns if code[at - symbol.address :][:size] == _RDMSR]
    return found


def show_threads(machine: PcMachine, kernel: LinuxKernel, cpu: ProductionCpu) -> None:
    """Make the kernel find as many threads per core as in production, although the guest's core has one.

    Since v6.6 a kernel counts threads by the CPUs that the firmware has listed. If more than one thread of a
    core is online in production, make the kernel act as if a second thread had come online. This happens
    before init starts. The scheduler's code and some mitigations depend on the presence of sibling threads.
    Mirrors: kernel/cpu.c:cpu_smt_set_num_threads, _cpu_up (v6.12), kernel/sched/core.c:sched_cpu_activate.
    """
    lookup = kernel.kallsyms.lookup_name
    counted = lookup("cpu_smt_set_num_threads")

    def count() -> None:
        machine.regs.di = machine.regs.si = cpu.threads

    if counted is not None:
        machine.call_at(counted, count)
    if not cpu.has_siblings:
        return
    key, enable, update, last = (
        lookup(name) for name in (_SMT_PRESENT, "static_key_slow_inc", "arch_smt_update", _BEFORE_INIT)
    )
    if key and enable and update and last:
        machine.call_first(last, [(enable, key), (update, 0)])


def guest_vulnerabilities(syscalls: LinuxSyscalls) -> Mapping[str, str]:
    """Return the guest's files of vulnerabilities: name -> text; {} if the guest has none.

    The files are read from a sysfs that is mounted for a moment on PROC, so nothing may be mounted there yet.

    Raises: KernelError (with the errno of a system call), GuestFault (the guest has died).
    """
    syscalls.mount("sysfs", PROC)
    try:
        try:
            files = [entry.name for entry in syscalls.listdir(_DIRECTORY) if not entry.name.startswith(".")]
        except KernelError:
            return {}
        return {
            name: syscalls.read_all(f"{_DIRECTORY}/{name}").decode("utf-8", "replace").strip()
            for name in sorted(files)
        }
    finally:
        syscalls.unmount(PROC)


def guest_features(machine: PcMachine, kernel: LinuxKernel) -> tuple[int, ...]:
    """Return the numbers (X86_FEATURE_*) of the CPU features that the kernel has found.

    Raises: KernelError (a symbol or member is missing), MemoryFault (the list of features is not mapped).
    """
    at = kernel.required("boot_cpu_data") + kernel.btf.offset("cpuinfo_x86.x86_capability")
    size = 4 * capability_words(kernel)
    words = int.from_bytes(machine.memory.read(machine.cpu.root, at, size), "little")
    return tuple(number for number in range(8 * size) if words >> number & 1)
