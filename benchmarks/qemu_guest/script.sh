#!/bin/busybox sh
# shellcheck shell=dash
# The script of benchmarks/qemu.py, the same on all sides. It prints lines `ROW VALUE UNIT NAME`, and `FAILED REASON`.
#
# KPROBEFS: a mount, or a directory with the same names on a real kernel. MODULE: the file of the module.
# DEFINITIONS: a file with definitions of probes. COUNTS: numbers of definitions to register. CALLS: thousands of
# calls in a measurement. TURNS: measurements of a row. WORK: a directory for files.
# shellcheck disable=SC3028 # EPOCHREALTIME is in busybox
events=tracing/events/kb

# taken COMMAND...: leave the microseconds of the command in $taken.
taken() {
    start=${EPOCHREALTIME%.*}${EPOCHREALTIME#*.}
    "$@"
    end=${EPOCHREALTIME%.*}${EPOCHREALTIME#*.}
    taken=$((end - start))
}

calls() {
    echo "$1 $2" >dev/kb
}

profiled() {
    awk -v event="$1" '$1 == event { print $2 }' tracing/kprobe_profile
}

# Wait until the probe of a function is a jump, for at most 20 s.
jump() {
    for _ in $(seq 200); do
        grep -q "$1.*OPTIMIZED" kprobes/list && return
        sleep 0.1
    done
    echo "FAILED $1: no jump"
}

# hits EVENT FUNCTION NAME: measure the nanoseconds that an event adds to a call of the function.
hits() {
    for _ in $(seq "$TURNS"); do
        # An optimizer that is still at work would disturb the measurement.
        sleep 0.3
        calls "$2" 1000
        taken calls "$2" "${CALLS}000"
        bare=$taken
        before=$(profiled "$1")
        echo 1 >"$events/$1/enable"
        [ "$2" = optimized ] && jump kb_optimized
        calls "$2" 1000
        taken calls "$2" "${CALLS}000"
        echo 0 >"$events/$1/enable"
        echo "ROW $(((taken - bare) / CALLS)) ns $3"
        counted=$(($(profiled "$1") - before))
        [ "$counted" = $((CALLS * 1000 + 1000)) ] || echo "FAILED $3: $counted hits in ${CALLS}000 and 1000 calls"
    done
}

each_line() {
    while read -r line; do
        echo "$line" >>tracing/kprobe_events
    done
}

define() {
    each_line <"$WORK/definitions"
}

show() {
    cat "$1" >/dev/null
}

remove_all() {
    echo >tracing/kprobe_events
}

many() {
    head -n "$1" "$DEFINITIONS" >"$WORK/definitions"
    taken define
    echo "ROW $taken us register $1 events"
    defined=$(grep -c :many/ tracing/kprobe_events)
    [ "$defined" = "$1" ] || echo "FAILED register $1 events: $defined are defined"
    for file in kprobes/list tracing/kprobe_profile; do
        taken show $file
        echo "ROW $taken us read $(basename $file), $1 events"
    done
    taken remove_all
    echo "ROW $taken us clear $1 events"
}

echo READY
cd "$KPROBEFS" || exit
# shellcheck disable=SC2016 # the definition's own variable
echo 'p:kb/reads vfs_read count=$arg3' >tracing/kprobe_events
echo 1 >$events/reads/enable
echo hello >scratch/greeting
show scratch/greeting
grep -m 1 'reads: ' tracing/trace
echo 0 >$events/reads/enable
remove_all

if [ -e machine/modules ]; then
    echo "load $MODULE" >machine/modules
else
    insmod "$MODULE"
fi
for kind in stepped emulated optimized; do
    echo "p:kb/$kind kb_$kind+5 value=%di" >>tracing/kprobe_events
done
echo 'p:kb/ftrace kb_ftrace value=%di' >>tracing/kprobe_events
echo 'r:kb/return kb_ftrace' >>tracing/kprobe_events
echo 0 >tracing/tracing_on
hits stepped stepped 'a hit, stepped'
hits emulated emulated 'a hit, emulated'
hits optimized optimized 'a hit, optimized'
hits ftrace ftrace 'a hit, by ftrace'
hits return ftrace 'a return'
echo 1 >tracing/tracing_on
hits stepped stepped 'a record, stepped'
hits optimized optimized 'a record, optimized'
hits ftrace ftrace 'a record, by ftrace'
hits return ftrace 'a record of a return'
remove_all
for count in $COUNTS; do
    many "$count"
done
echo DONE
