"""Commands that read a kernel's file, and report what the kernel's kprobes would do."""
