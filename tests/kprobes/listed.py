"""What kprobes/list shows."""

from __future__ import annotations

from emulated_kernel.kprobes.registry import Kprobes


def list_lines(kprobes: Kprobes) -> list[str]:
    """Its lines, each with its end."""
    return "".join(kprobes.list_records(0)).splitlines(keepends=True)
