"""Guest memory: RAM behind page tables, and the pools that pieces of it are handed out of.

`memory.Memory` is what everything above takes: bytes, words, strings and live views at virtual addresses.
It refuses to write text. `record_memory` is what handlers in guest code write to.
"""
