"""The program with a fake kernel behind it: `python fake_program.py mount DIR`."""

from __future__ import annotations

import os
import sys

from emulated_kernel.vfs.layout import Layout
from emulated_kernel.vfs.node import Owner
from emulated_kernel.vfs.server import FileServer
from kprobefs.cli import main
from kprobefs.options import MountOptions
from tests.vfs.fakes import FakeKernel


def build(options: MountOptions) -> FileServer:
    """A mount over the fake kernel; the seed selects a failure, for tests of those."""
    if options.machine.seed == 666:
        raise RuntimeError("this kernel can't be built")
    kernel = FakeKernel()
    if options.machine.seed == 667:
        # A store that raises what no kernel does.
        kernel.kprobes.set_optimization = lambda _allowed: sys.exit(3)
    filesystem = kernel.filesystem(Layout(options.layout), Owner(os.geteuid(), os.getegid()))
    return FileServer(filesystem)


if __name__ == "__main__":
    sys.exit(main(build=build))
