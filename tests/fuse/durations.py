"""A shell script that measures the duration of vfs_read by a synthetic event with a histogram."""

from __future__ import annotations

MEASURED = """\
cd "$KPROBEFS/tracing"
mkdir instances/i
echo 'p:in vfs_read' > kprobe_events
echo 'r:out vfs_read' >> kprobe_events
echo 'lat u64 ns' > synthetic_events
echo 'hist:keys=common_pid:t=common_timestamp' > events/kprobes/in/trigger
echo 'hist:keys=common_pid:d=VALUE:onmatch(kprobes.in).lat($d)' > events/kprobes/out/trigger
echo 'hist:keys=ns.log2' > events/synthetic/lat/trigger
"""
"""Definitions and triggers; VALUE is the expression of the duration."""
REMOVED = """\
echo '!hist:keys=ns.log2' > events/synthetic/lat/trigger
echo '!hist:keys=common_pid:d=VALUE:onmatch(kprobes.in).lat($d)' > events/kprobes/out/trigger
echo '!hist:keys=common_pid:t=common_timestamp' > events/kprobes/in/trigger
"""
"""Commands that remove the triggers."""
READ = "head -c 8 ../dev/zero > /dev/null"
"""Command with one hit."""


def in_instance(script: str) -> str:
    """Return `script` with its triggers in the instance `i`, which MEASURED makes."""
    return script.replace("events/", "instances/i/events/")
