"""Guest memory: RAM with page tables, and allocators of parts of it.

`memory.Memory` gives access to bytes, words, strings and live views at virtual addresses. Memory refuses to
write text. `record_memory` is the memory to which compiled handlers write.
"""
