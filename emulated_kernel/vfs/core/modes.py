"""Permission bits of files and directories in tracefs.

Mirrors: kernel/trace/trace.h:TRACE_MODE_READ, TRACE_MODE_WRITE (v6.1).
"""

from __future__ import annotations

ROOT = 0o700
DIRECTORY = 0o750
READ_WRITE = 0o640
READ_ONLY = 0o440
WRITE_ONLY = 0o220
OWNER_WRITE_ONLY = 0o200
