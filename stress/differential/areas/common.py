"""Events that several areas use, and what brings a kernel back to how an area found it."""

from __future__ import annotations

from stress.differential.steps import Case, Step, append, truncate, write

BASE = "events/k/base"
OTHER = "events/k/other"
_BASE_ARGS = "n=%dx:u32 s=%dx:s64 x=%dx:x16 l=%dx:u8 c=$comm:string t=+0(%si):ustring u=+0(%si):ustring"
EVENTS: Case = (
    append("kprobe_events", f"p:k/base vfs_write {_BASE_ARGS}"),
    append("kprobe_events", "r:k/other vfs_write n=$retval:s32 s=$retval:u8 c=$comm:string"),
    append("synthetic_events", "syn u64 n; pid_t p; char[16] c"),
)
"""Fields of most types; what they hold is the same in both kernels."""
NO_EVENTS: Case = (truncate("set_event"), truncate("dynamic_events"), truncate("error_log"))
QUIET: Case = (truncate("trace"), truncate("error_log"), write("tracing_on", "1"))
PROBED: Case = (append("kprobe_events", "p:keep/probed vfs_mkdir"), write("events/keep/enable", "1"))
"""While nothing is probed our guest isn't asked to make a client's calls."""
SLEPT: Case = (write("snapshot", "1"), write("snapshot", "0"))
"""Behind a record of its own a task that slept is known: Linux learns its name and tgid when it goes."""
KNOWN: Case = (*PROBED, Step("mkdir", "/scratch/known"), Step("rmdir", "/scratch/known"), *SLEPT)
"""Ours learns a task's name with the record."""
