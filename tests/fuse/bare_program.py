"""The program kprobefs without a process tracker: `python bare_program.py mount DIR`.

Certain values of `--seed` make the kernel fail, wait or seem dead, for tests of failures.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kprobefs.cli import main as cli
from kprobefs.daemon import mount_namespace
from kprobefs.mount_options import MountOptions

if TYPE_CHECKING:
    from emulated_kernel.vfs.mount import Mount


T = TypeVar("T")


def build(options: MountOptions) -> Mount:
    """Return a mount of the kernel's control files.

    Certain values of `--seed` make the kernel fail, wait or seem dead.
    """
    from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.vfs.core.node import Owner

    if options.machine.seed == 666:
        raise RuntimeError("this kernel can't be built")
    kernel = Kernel(options.machine)
    if options.machine.seed == 667:
        # The write to the file raises an exception that no kernel raises.
        kernel.kprobes.set_optimization = lambda _allowed: sys.exit(3)  # type: ignore[method-assign]
    if options.machine.seed == 668:
        time.sleep(60)
    if options.machine.seed == 673:
        held(bool)(True)
    if options.machine.seed == 669:
        kernel.kprobes.set_optimization = held(kernel.kprobes.set_optimization)  # type: ignore[method-assign]
    if options.machine.seed == 672:
        kernel.kprobes.enable_kprobe = held(kernel.kprobes.enable_kprobe)  # type: ignore[method-assign]
        kernel.kprobes.disable_kprobe = held(kernel.kprobes.disable_kprobe)  # type: ignore[method-assign]
    if options.machine.seed == 671:
        kernel.kprobes.set_optimization = lambda _allowed: time.sleep(40)  # type: ignore[method-assign]
    owner = Owner(os.geteuid(), os.getegid())
    server = kernel.mount(RootLayout(options.layout), owner)
    if options.machine.seed == 670:
        server.is_dead = lambda: True  # type: ignore[method-assign]
    return server


def held(function: Callable[[T], object]) -> Callable[[T], None]:
    """Return a function that waits until the file $KPROBEFS_TEST_HOLDING is removed, and then calls
    `function`. During the wait, the file contains "held".
    """
    holding = Path(os.environ["KPROBEFS_TEST_HOLDING"])

    def wait(argument: T) -> None:
        while holding.exists():
            with suppress(FileNotFoundError), holding.open("r+") as file:
                file.write("held")
            time.sleep(0.01)
        function(argument)

    return wait


def main() -> int:
    """Run the program with the arguments of the command line."""
    mount_namespace.INTERVAL = float(os.environ.get("KPROBEFS_TEST_INTERVAL", mount_namespace.INTERVAL))
    return cli.main(build=build)


if __name__ == "__main__":
    sys.exit(main())
