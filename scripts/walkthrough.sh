#!/bin/sh
# Demonstrates kprobefs on the mount at $KPROBEFS. The exit status is 1 if a step fails.
#
# usage: kprobefs run -- sh scripts/walkthrough.sh [FILE]    (FILE receives the mount point)
set -eu

: "${KPROBEFS:?not set to a mount point; run kprobefs run -- sh scripts/walkthrough.sh}"
[ $# -eq 0 ] || printf '%s\n' "$KPROBEFS" >"$1"
cd "$KPROBEFS"

bold='' dim='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR-}" ]; then
    bold=$(printf '\033[1m') dim=$(printf '\033[2m') plain=$(printf '\033[0m')
fi

explain() { printf '\n%s%s%s\n' "$dim" "$*" "$plain"; }

# show COMMAND: prints the command, runs it and prints its output; if it fails, the script ends.
show() {
    printf '%s$ %s%s\n' "$bold" "$1" "$plain"
    if output=$(eval "$1" 2>&1); then status=0; else status=$?; fi
    [ -z "$output" ] || printf '%s\n' "$output" | fold -s -w 76 | sed 's/^/    /'
    [ "$status" -eq 0 ] || fail "'$1' ended with status $status"
}

fail() {
    printf 'walk-through: %s\n' "$*" >&2
    exit 1
}

# expect TEXT REASON: fails with REASON if the output of the last command lacks TEXT.
expect() {
    case $output in
    *"$1"*) ;;
    *) fail "$2" ;;
    esac
}

printf '%skprobefs is mounted at %s%s\n' "$bold" "$KPROBEFS" "$plain"
explain "These files control a small kernel that runs in an emulator:"
show 'ls'
show 'cat machine/version'
expect 'version' "machine/version doesn't name a kernel"

explain "Define a probe on vfs_read, as on any Linux. Each hit fetches three arguments."
# shellcheck disable=SC2016 # the probe's $arg3 and $comm aren't the shell's
show 'echo '\''p:reads vfs_read file=%di count=$arg3 comm=$comm'\'' > kprobe_events'
show 'cat kprobe_events'
expect 'reads vfs_read' "the probe isn't in kprobe_events"

explain "Enabling the event arms the probe: this patches the kernel's text."
show 'echo 1 > tracing/events/kprobes/reads/enable'
show 'cat kprobes/list'
expect 'vfs_read' "the probe isn't in kprobes/list"

explain "This file lives in the emulated kernel, so reading it runs vfs_read there:"
show 'echo hello > scratch/greeting'
show 'echo > tracing/trace'
show 'cat scratch/greeting'
expect 'hello' "scratch/greeting doesn't hold what was written to it"

explain "Every hit left a line with the task, the time, the address and the arguments."
show 'grep -v "^#" tracing/trace | head -n 4'
expect 'reads: (vfs_read' "the trace is empty: the probe was not hit"
expect 'comm="cat"' "the trace doesn't show the reads of cat"

explain "A probe's directory shows its counters, its mode and its bytes in the text:"
show 'cd kprobes/stats/kprobes/reads && grep . hits nmissed mode reason bytes'
expect 'hits:' "the probe's directory doesn't count its hits"

explain "One switch removes all probes from the text. Then reading hits no probe."
show 'echo 0 > kprobes/enabled'
show 'cat kprobes/stats/kprobes/reads/mode'
expect 'disarmed' "the probe is still armed after 'echo 0 > kprobes/enabled'"
show 'cat kprobes/stats/kprobes/reads/hits'
hits=$output
[ "$hits" -gt 0 ] || fail "the probe's hits are 0"
show 'cat scratch/greeting'
show 'cat kprobes/stats/kprobes/reads/hits'
[ "$output" = "$hits" ] || fail "a disarmed probe was hit"
show 'echo 1 > kprobes/enabled'

explain "A probe inside a function is a breakpoint, and a hit costs two traps:"
show 'echo 0 > kprobes/optimization'
show 'echo p:deep ksys_read+5 >> kprobe_events'
show 'echo 1 > tracing/events/kprobes/deep/enable'
show 'for i in 1 2 3 4 5 6 7 8 9; do cat scratch/greeting; done > /dev/null'
show 'cd kprobes/stats/kprobes/deep && cat mode bytes cost; tail -n 2 detour'
expect 'int3' "the probe at ksys_read+5 isn't armed by a breakpoint"

explain "The optimizer replaces the breakpoint by a jump. A hit then needs no trap:"
show 'echo 1 > kprobes/optimization; sleep 0.2'
show 'for i in 1 2 3 4 5 6 7 8 9 0; do cat scratch/greeting; done > /dev/null'
show 'for i in 1 2 3 4 5 6 7 8 9 0; do cat scratch/greeting; done > /dev/null'
show 'cd kprobes/stats/kprobes/deep && cat mode bytes cost; tail -n 3 detour'
expect 'optimized' "the probe at ksys_read+5 was not optimized"
show 'grep ksys_read kprobes/list'
expect '[OPTIMIZED]' "kprobes/list doesn't show the probe as optimized"

explain "Remove the probes:"
show 'echo 0 > tracing/events/enable'
show 'echo > kprobe_events'
show 'cat kprobe_events kprobes/list'
[ -z "$output" ] || fail "the probe is still there after it was removed"
printf '\n'
