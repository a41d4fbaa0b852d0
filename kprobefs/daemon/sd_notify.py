"""sd_notify(3): tell the service manager how far the daemon is."""

from __future__ import annotations

import os
import socket


def sd_notify(*assignments: str) -> None:
    """Send assignments such as "READY=1"; nothing where no manager listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address)
        channel.sendall("\n".join(assignments).encode())
