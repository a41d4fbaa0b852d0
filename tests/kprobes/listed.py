"""The lines of kprobes/list."""

from __future__ import annotations

from emulated_kernel.kprobes.registry import Kprobes


def list_lines(kprobes: Kprobes) -> list[str]:
    """Return the lines of kprobes/list, with their newlines."""
    return "".join(kprobes.list_records(0)).splitlines(keepends=True)
