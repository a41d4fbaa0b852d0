"""ClientFacts: data that the guest needs about the process that makes a request."""

from __future__ import annotations

from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import Client


@dataclass(frozen=True)
class ClientFacts:
    """Facts about a client that were read before the request took the control lock."""

    call: ClientCall | None = None
    """System call in which the process waits for kprobefs; None if it is unknown or no probe could see it."""
    next_fd: int | None = None
    """Descriptor that the open(2) in `call` will return; None if it is unknown."""
    comm: str = ""
    """Name that the process had when `program` was read; "" if `program` was not needed."""
    program: str | None = None
    """Path of the program whose execve gave the process its name; None if it is unknown or was not needed."""


UNKNOWN = ClientFacts()


def facts_of(client: Client) -> ClientFacts:
    """Return the facts about a client, or UNKNOWN if none were read."""
    return client.facts if isinstance(client.facts, ClientFacts) else UNKNOWN
