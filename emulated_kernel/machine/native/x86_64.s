# Dispatch of a guest's traps and its rdtsc on an x86-64 host (System V calling convention).
# Names in braces are offsets in TrapWords or TscWords, and constants of assemble.py. All labels belong to one routine.

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
    mov r10, [rdx + {python}]
    or r10, [rdx + {callers}]
    jne python
    movabs r11, {factor}
    imul r11, rax
    mov ecx, [r9 + {shift}]
    shr r11, cl
    shl r11, 4
    add r11, [r9 + {entries}]
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
    inc qword ptr [rdx + {hits}]
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
    mov r10, [rsi + {python}]
    or r10, [rsi + {callers}]
    jne python
    movabs r11, {factor}
    imul r11, rax
    mov ecx, [rsi + {breakpoints} + {shift}]
    shr r11, cl
    shl r11, 4
    add r11, [rsi + {breakpoints} + {entries}]
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
    je python
    inc qword ptr [rsi + {hits}]
    mov [r8], rcx
    mov dword ptr [r9], 0
    mov eax, 1
    ret
python:
    jmp qword ptr [rsi + {callback}]

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
