"""Comparison of kprobefs's answers with those of a distribution's kernel that runs in the emulator.

python -m tests.oracle.inside IMAGE [--profile NAME] [--count N] [--seed N] [--only WHAT]
Definitions, most of which are wrong, are written to kprobe_events of both kernels. Places in the kernel's
text are probed in the kernel, and checked by kprobefs's probe checker. The records of a workload are compared
between the kernel's own kprobes and kprobefs's. The exit status is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from emulated_kernel.arch.analysis.probe_rules import probe_rules_named
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.probing.detect_interface import detect_interface, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, KERNEL_INTERFACE, profile_named
from emulated_kernel.trace.interface import LINUX_6_1, InterfaceRule, interface_named
from tests.oracle.inside.buffers import compare_buffers
from tests.oracle.inside.definitions import compare_definitions
from tests.oracle.inside.filters import compare_filters
from tests.oracle.inside.histograms import compare_histograms
from tests.oracle.inside.places import compare_modules, compare_places, kernel_places
from tests.oracle.inside.records import compare_records, recorded_definitions
from tests.oracle.inside.tally import Tally

MODULES = ("dm_mod", "kvm")
"""Modules that together have tables of all kinds."""


def main() -> int:
    """Run the comparison that the command line selects; return the exit status."""
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.guests.linux.boot_cache import started_with_kernel
    from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.vfs.core.node import Owner

    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle.inside", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("image", help="a vmlinuz, a vmlinux, a Debian package, or host")
    parser.add_argument("--count", type=int, default=500, metavar="N", help="questions of each kind")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--profile", default=DEFAULT, metavar="NAME", help="the profile of our engine, or kernel"
    )
    parser.add_argument("--only", metavar="WHAT", help="compare only what begins with this")
    options = parser.parse_args()
    tasks, kernel = started_with_kernel(options.image, options.seed)
    if options.profile == KERNEL_INTERFACE:
        profile = profile_of(kernel)
        interface = detect_interface(kernel)
    else:
        profile = profile_named(options.profile)
        interface = interface_named(profile.interface)
    rules = probe_rules_named(profile.probe_rules)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    engine = LinuxEngine(*started_with_kernel(options.image, options.seed), profile)
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    is_perfect = True
    count = options.count
    seed = options.seed
    compared: dict[str, Callable[[], Tally]] = {
        "places": lambda: compare_places(linux, kernel, kernel_places(kernel, count, seed), rules),
        "places in modules": lambda: compare_modules(options.image, MODULES, count, seed, rules),
        "definitions": lambda: compare_definitions(
            linux, Kernel(profile=profile).mount(), count, seed, LINUX_6_1
        ),
        "definitions over it": lambda: compare_definitions(linux, ours, count, seed + 1, interface),
        "filters over it": lambda: compare_filters(linux, ours, count, seed),
        "histograms over it": lambda: compare_histograms(linux, ours, count, seed),
        "buffers over it": lambda: compare_buffers(linux, ours, count, seed),
        "records over it": lambda: compare_records(linux, ours, recorded_definitions(engine, interface)),
    }
    if options.profile == KERNEL_INTERFACE:
        # Only a named profile has an interface without a distribution's kernel.
        del compared["definitions"]
    if InterfaceRule.SUBBUF_SIZE not in interface:
        del compared["buffers over it"]
    for what, compare in compared.items():
        if not what.startswith(options.only or ""):
            continue
        tally = compare()
        print(f"{what}: {tally.compared} answers, {tally.refused} refusals, {len(tally.differences)} differ")
        print("".join(f"{difference}\n" for difference in tally.differences[:20]), end="")
        is_perfect = is_perfect and not tally.differences
    return not is_perfect


if __name__ == "__main__":
    sys.exit(main())
