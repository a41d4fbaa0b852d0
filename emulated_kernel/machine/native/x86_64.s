# Dispatch of a guest's traps and its rdtsc on an x86-64 host (System V calling convention).
# Names in braces are offsets in TrapWords or TscWords, and constants of assemble.py. All labels belong to one routine.

# Macros. The labels `python` and `leave` are those of the routine that uses the macro.

# Search a table for the address in rax. Count the hit, and leave the target in rcx. Without a target, or if Python is to
# have all traps, go to `python`.
.macro search words, table
    mov r10, [\words + {python}]
    or r10, [\words + {callers}]
    jne python
    movabs r11, {factor}
    imul r11, rax
    mov ecx, [\table + {shift}]
    shr r11, cl
    shl r11, 4
    add r11, [\table + {entries}]
next:
    mov rcx, [r11]
    cmp rcx, rax
    je found
    add r11, 16
    test rcx, rcx
    jne next
    jmp python
found:
    mov rcx, [r11 + 8]
    test rcx, rcx
    je python                           # the empty entry, for address 0
    inc qword ptr [\words + {hits}]
.endm

# Carry out the jump that the LinkWords at rcx describe: set the return address, and leave the target in rcx.
.macro follow_link
    xor rcx, {linked}
    mov rax, [rcx + {target_register}]
    mov rax, [rax]
    add rax, [rcx + {added}]
    and rax, [rcx + {kept_bits}]
    mov r10, [rcx + {link_register}]
    mov r11, [rcx + {link}]
    mov [r10], r11
    mov rcx, rax
.endm

# Advance the model clock, and go on.
.macro charge words, ns, next
    mov r8, [\words + {time}]
    mov r9, [\words + \ns]
    add [r8], r9
    jmp qword ptr [\words + \next]
.endm

# Test SUM of mstatus, whose address is left in rax. If the instruction is patched, or does not name SUM, go to `leave`.
.macro test_sum
    mov rax, [rcx + {site}]
    mov eax, [rax]
    cmp eax, [rcx + {insn}]
    jne leave                           # the text is patched
    mov rax, [rcx + {operand}]
    test dword ptr [rax], {sum}
    je leave
    mov rax, [rcx + {mstatus}]
    test dword ptr [rax], {sum}
.endm

# Make the entry at r8 of the cached translations empty, unless all its addresses are in the upper half.
.macro drop_unless_kernel kept
    mov rax, [r8]
    and rax, [r8 + 8]
    and rax, [r8 + 16]
    js \kept                            # no address in the lower half
    mov [r8], r11
    mov [r8 + 8], r11
    mov [r8 + 16], r11
.endm

# Find the range of memory that contains the rdx bytes from an address on; without one, go to `leave`.
.macro find_range again, address, end
    mov rax, [rcx + {map}]
    sub rax, {range_size}
\again:
    add rax, {range_size}
    cmp qword ptr [rax + {past}], 0
    je leave
    cmp \address, [rax + {first}]
    jb \again
    cmp \address, [rax + {past}]
    jae \again
    lea \end, [\address + rdx]
    cmp \end, [rax + {past}]
    ja leave
.endm

@routine x86
# void (uc rdi, vector esi, words rdx), as Unicorn's UC_HOOK_INTR.
    mov r8, [rdx + {ip}]                # address of the guest's instruction pointer
    mov rax, [r8]
    lea r9, [rdx + {debug_traps}]
    cmp esi, {debug_vector}
    je look
    cmp esi, {breakpoint_vector}
    jne python
    dec rax                             # int3 is one byte long
    lea r9, [rdx + {breakpoints}]
look:
    search rdx, r9
    cmp esi, {debug_vector}
    je stepped
    mov [r8], rcx
    ret
stepped:
    cmp rcx, rax
    je round                            # a round of a repeated string instruction: the trap flag stays
    mov [r8], rcx
    mov r9, [rdx + {flags}]
    and dword ptr [r9], {not_trap_flag}
round:
    ret
python:
    mov r9, [rdx + {stub}]              # where the guest delivers a breakpoint itself; 0 for none
    test r9, r9
    je callback
    cmp esi, {breakpoint_vector}
    jne callback
    mov r10, [rdx + {privilege}]
    test dword ptr [r10], 3
    jne callback                        # from user mode the stack is switched
    mov r10, [rdx + {flags}]
    test dword ptr [r10], {delivered_flags}
    jne callback                        # the delivery clears them
    mov r10, [rdx + {idt}]
    mov r11, [rdx + {idt_base}]
    cmp [r10], r11
    jne callback
    mov r10, [rdx + {gate}]
    mov r11, [r10]
    cmp r11, [rdx + {gate_low}]
    jne callback
    mov r11, [r10 + 8]
    cmp r11, [rdx + {gate_high}]
    jne callback                        # the guest has changed its table
    mov r10, [rdx + {cells}]            # stack segment, stack pointer, code segment, instruction pointer
    mov r11, [rdx + {stack_segment}]
    mov r11d, [r11]
    mov [r10], r11
    mov r11, [rdx + {code_segment}]
    mov r11d, [r11]
    mov [r10 + 16], r11
    mov r11, [r8]
    mov [r10 + 24], r11
    mov [r8], r9
    mov r8, [rdx + {sp}]
    mov r11, [r8]
    mov [r10 + 8], r11
    and r11, -16
    mov [r8], r11
    inc qword ptr [rdx + {hits}]
    ret
callback:
    jmp qword ptr [rdx + {callback}]

@routine riscv
# bool (uc rdi, words rsi), as Unicorn's UC_HOOK_INSN_INVALID; an ebreak is reported by it.
    mov r9, [rsi + {error}]             # address of the error that Unicorn has set already
    test r9, r9
    je python
    mov r8, [rsi + {ip}]
    mov rax, [r8]
    search rsi, rsi+{breakpoints}
    test cl, {linked}
    jne linked
leave:
    mov [r8], rcx
    mov dword ptr [r9], 0
    mov eax, 1
    ret
linked:
    follow_link
    jmp leave
python:
    jmp qword ptr [rsi + {callback}]

@routine arm64
# void (uc rdi, exception esi, words rdx), as Unicorn's UC_HOOK_INTR.
    cmp esi, {brk_exception}
    jne python
    mov r8, [rdx + {ip}]
    mov rax, [r8]
    search rdx, rdx+{breakpoints}
    test cl, {linked}
    jne linked
leave:
    mov [r8], rcx
    ret
linked:
    follow_link
    jmp leave
python:
    jmp qword ptr [rdx + {callback}]

@routine arrive
# void (uc rdi, vector esi, words rdx), as Unicorn's UC_HOOK_INTR: ends the run where a process waits for the host.
    cmp esi, [rdx + {arrival_vector}]
    jne beyond
    mov r8, [rdx + {ip}]
    mov rax, [r8]
    cmp rax, [rdx + {arrival}]
    jne beyond
    mov rax, [rdx + {arrival_ip}]
    mov [r8], rax
    inc qword ptr [rdx + {arrivals}]
    mov r8, [rdx + {in_flight}]
    test r8, r8
    je stop
    mov dword ptr [r8], -1              # the exception is not delivered
stop:
    jmp qword ptr [rdx + {emu_stop}]
beyond:
    jmp qword ptr [rdx + {beyond}]

@routine enter
# void (uc rdi, vector esi, words rdx), as Unicorn's UC_HOOK_INTR: enters the kernel at a system call, by a table of moves.
    cmp esi, [rdx + {entry_vector}]
    jne refuse
    mov r8, [rdx + {checks}]
check:
    mov rax, [r8]
    test rax, rax
    je enter
    mov rax, [rax]
    and rax, [r8 + {check_mask}]
    cmp rax, [r8 + {check_value}]
    jne refuse
    add r8, {check_size}
    jmp check
enter:
    mov r8, [rdx + {moves}]
move:
    mov r9, [r8]
    test r9, r9
    je entered
    mov rax, [r8 + {move_source}]
    mov rax, [rax]
    and rax, [r8 + {move_mask}]
    imul rax, [r8 + {move_factor}]
    add rax, [r8 + {move_added}]
    mov r10, [r9]
    and r10, [r8 + {move_kept}]
    or rax, r10
    mov [r9], rax
    add r8, {move_size}
    jmp move
entered:
    ret
refuse:
    jmp qword ptr [rdx + {refused}]

@routine enter_insn
# void (uc rdi, words rsi), as Unicorn's UC_HOOK_INSN for syscall, which is no exception.
    mov rdx, rsi
    xor esi, esi
    jmp qword ptr [rdx + {routine}]

@routine rdtsc
# int (uc rdi, words rsi), as Unicorn's UC_HOOK_INSN for rdtsc; 1 if the instruction is done.
    cmp qword ptr [rsi + {followed}], 0
    jne python
    movabs rax, {step_factor}
    imul rax, [rsi + {steps}]
    movabs r8, {step_addend}
    add rax, r8
    mov [rsi + {steps}], rax
    shr rax, {step_shift}
    add rax, {shortest_step}
    add rax, [rsi + {tsc}]
    mov [rsi + {tsc}], rax
    mov ecx, eax
    shr rax, 32
    mov r8, [rsi + {low}]
    mov [r8], rcx
    mov r8, [rsi + {high}]
    mov [r8], rax
    mov eax, 1
    ret
python:
    jmp qword ptr [rsi + {read_in_python}]

@routine copy
# void (uc rdi, address rsi, size edx, words rcx), as Unicorn's UC_HOOK_CODE before a repeated copy.
    cmp qword ptr [rcx + {copies_itself}], 0
    jne leave
    mov rax, [rcx + {text}]
    mov eax, [rax]
    and eax, [rcx + {code_mask}]
    cmp eax, [rcx + {code}]
    jne leave                           # the text is patched
    mov rax, [rcx + {stored_flags}]
    test dword ptr [rax], {trap_flag}
    jne leave
    mov rax, [rcx + {direction}]
    cmp dword ptr [rax], 1
    jne leave
    mov r8, [rcx + {register_mask}]
    mov rax, [rcx + {count}]
    mov rdx, [rax]
    and rdx, r8
    je leave
    cmp rdx, {longest_copy}
    ja leave
    imul rdx, [rcx + {unit}]            # number of bytes
    mov rax, [rcx + {source}]
    mov rsi, [rax]
    and rsi, r8
    mov rax, [rcx + {destination}]
    mov rdi, [rax]
    and rdi, r8
    find_range source, rsi, r9
    mov r10, [rax + {displacement}]
    add r10, rsi                        # the source in this process
    find_range target, rdi, r11
    cmp qword ptr [rax + {is_writable}], 0
    je leave
    add rdi, [rax + {displacement}]     # the destination in this process
    mov r8, rdi
    sub r8, r10
    cmp r8, rdx
    jb leave                            # a word of the source would be written before it is read
    mov rax, [rcx + {source}]
    mov [rax], r9
    mov rax, [rcx + {destination}]
    mov [rax], r11
    mov rax, [rcx + {count}]
    mov qword ptr [rax], 0
    inc qword ptr [rcx + {copies}]
    mov rsi, r10
    mov rcx, rdx
    rep movsb
leave:
    ret

@routine set_sum
# void (uc rdi, address rsi, size edx, words rcx), as Unicorn's UC_HOOK_CODE before a csrs of sstatus.
    test_sum
    jne leave
    or dword ptr [rax], {sum}           # no page that only SUM allows is cached, so none is wrong
    inc qword ptr [rcx + {spared}]
leave:
    ret

@routine clear_sum
# Before a csrc of sstatus: clears SUM, and drops the cached translations of user pages only.
    test_sum
    je leave
    and dword ptr [rax], {not_sum}
    inc qword ptr [rcx + {spared}]
    mov rdx, [rcx + {tlb}]
    mov r8, [rdx + 8]
    mov r9, [rdx]
    add r9, r8                          # the last entry
    mov r10, [rcx + {used}]
    mov r11, -1
entry:
    drop_unless_kernel kept
    dec qword ptr [r10]
kept:
    add r8, {entry_size}
    cmp r8, r9
    jbe entry
    mov r8, [rcx + {victims}]
    lea r9, [r8 + {victims_size}]
victim:
    drop_unless_kernel past
past:
    add r8, {entry_size}
    cmp r8, r9
    jb victim
leave:
    ret

@routine count
# void (uc rdi, address rsi, size edx, time rcx), as Unicorn's UC_HOOK_CODE; `time` is the address of a u64.
    inc qword ptr [rcx]
    ret

@routine end_quantum
# void (uc rdi, address rsi, size edx, words rcx), as Unicorn's UC_HOOK_CODE.
    mov rax, [rcx + {is_bounded}]
    or rax, [rcx + {overdue}]
    jne python
    cmp rsi, [rcx + {end}]
    je python
    cmp qword ptr [rcx + {left}], 1
    jb leave                            # no run is to end
    je python
    dec qword ptr [rcx + {left}]
leave:
    ret
python:
    jmp qword ptr [rcx + {count_in_python}]

@routine charge_intr
# A trap takes time; then the routine for traps, as Unicorn's UC_HOOK_INTR.
    charge rdx, {trap_ns}, {routine}

@routine charge_invalid
# A trap takes time; then the routine for traps, as Unicorn's UC_HOOK_INSN_INVALID.
    charge rsi, {trap_ns}, {routine}

@routine handler_intr
# The Python callback takes more time.
    charge rdx, {handler_ns}, {handler}

@routine handler_invalid
# The Python callback takes more time.
    charge rsi, {handler_ns}, {handler}
