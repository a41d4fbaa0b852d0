/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of x86's exceptions; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM exceptions

TRACE_EVENT(page_fault_kernel,
	PROTO(unsigned long address, struct pt_regs *regs, unsigned long error_code),
	ARGS(address, regs, error_code),
	FIELDS(
		__field(unsigned long, address)
		__field(unsigned long, ip)
		__field(unsigned long, error_code)),
	ASSIGN(
		__entry->address = address;
		__entry->ip = instruction_pointer(regs);
		__entry->error_code = error_code;),
	PRINT("address=%ps ip=%ps error_code=0x%lx",
	      (void *)__entry->address, (void *)__entry->ip, __entry->error_code))
