"""store(): fetch an event's arguments at a hit, and return them as the bytes of a trace entry."""

from __future__ import annotations

from collections.abc import Sequence

from emulated_kernel.trace.fetch.fetch_types import StringArea
from emulated_kernel.trace.fetch.memory import FetchEnvironment
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE


def store(args: Sequence[ProbeArg], header: bytes, environment: FetchEnvironment) -> bytes:
    """Return the payload of an entry: `header`, the fetched arguments, and their strings.

    `header`: the fields for addresses, such as __probe_ip.
    Deviates: an unreadable string has length 0; Linux leaves the former contents of the buffer.
    Mirrors: kernel/trace/trace_probe_tmpl.h:store_trace_args (v6.1).
    """
    room = 0
    end = COMMON_SIZE + len(header)
    fetched = []
    for arg in args:
        kind = arg.type
        elements = kind.fetch(arg.stages, environment)
        if kind.is_dynamic:
            room += sum(len(text) for text in elements if text is not None)
        end += kind.size * len(elements)
        fetched.append((kind, elements))
    area = StringArea(end, room)
    return b"".join([header, *[kind.fixed_part(elements, area) for kind, elements in fetched], area.data])
