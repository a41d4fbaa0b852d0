"""Commands that answer, from a kernel's file alone, what its kprobes would do."""
