"""Steps that several areas use: definitions of events, and steps that restore the initial state."""

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
"""Steps that define events with fields of most types; both kernels record the same values in the fields."""
NO_EVENTS: Case = (truncate("set_event"), truncate("dynamic_events"), truncate("error_log"))
QUIET: Case = (truncate("trace"), truncate("error_log"), write("tracing_on", "1"))
PROBED: Case = (append("kprobe_events", "p:keep/probed vfs_mkdir"), write("events/keep/enable", "1"))
"""Steps that arm a probe. If no probe is armed, the built-in guest executes no system calls of the client."""
SLEPT: Case = (write("snapshot", "1"), write("snapshot", "0"))
"""Steps that make Linux save a task's name and tgid after a record: it saves them at a task switch."""
KNOWN: Case = (*PROBED, Step("mkdir", "/scratch/known"), Step("rmdir", "/scratch/known"), *SLEPT)
"""Steps that make both kernels save the client's name; the built-in kernel saves it with a record."""
