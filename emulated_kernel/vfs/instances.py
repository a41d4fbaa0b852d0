"""instances/: a directory for each trace array beside the top one, made by mkdir(2)."""

from __future__ import annotations

import errno

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.modes import DIRECTORY
from emulated_kernel.vfs.node import Directory, DynamicDirectory, Objects
from emulated_kernel.vfs.trace_array_files import trace_array_files
from emulated_kernel.vfs.trace_ports import InstancePort, InstancesPort


def instances_directory(instances: InstancesPort) -> Directory:
    """One with an open file can't be removed: EBUSY."""
    directory: DynamicDirectory[InstancePort]

    def remove(name: str) -> None:
        node = directory.get(name)
        if isinstance(node, Directory) and node.open_files:
            raise KernelError(errno.EBUSY, f"{name} has open files")
        instances.remove(name)

    directory = DynamicDirectory(
        DIRECTORY,
        Objects(instances.names, instances.find, _instance_directory),
        mkdir=instances.make,
        rmdir=remove,
    )
    return directory


def _instance_directory(port: InstancePort) -> Directory:
    return Directory(DIRECTORY, trace_array_files(port, instance=True))
