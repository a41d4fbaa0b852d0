#!/bin/sh
# Runs Linux's own ftrace selftests, unmodified, on a mount; prints a table, fails on any FAIL.
set -eu

usage() {
    cat <<'END'
usage: tests/conformance/ftracetest.sh [--arch ARCH | --profile PROFILE | --image IMAGE [--profile PROFILE] |
                                       --kernel-kprobes IMAGE] [DIR] [TEST...]
Runs the tests of DIR (a directory with ftracetest and test.d/), or of Debian's package linux-source-VERSION,
which is fetched once into the user's cache. DIR must not be below /tmp, which the mount's scratch/ covers.
ARCH is x86_64, i386, riscv64 or riscv64i. With --profile linux-VERSION the kernel has that profile, and the
tests are those of VERSION; otherwise both are of 6.1. The lists of tests that must pass are for x86_64.
With --image the tests run over the kernel of IMAGE, in any profile that it can have; with --kernel-kprobes
its own kprobes serve them (--kprobes kernel). Such a kernel has over 1,000 events, so the resets before and
after each test look only at triggers and filters in groups of events that a test names. TEST is a file or a
directory below test.d/, such as kprobe/profile.tc or instances; without any, all are run. Each may take
KPROBEFS_TEST_SECONDS (default: 120). The status is 3 if the package cannot be fetched. With the only argument
--fetch VERSION the script prints the directory of that version's tests, and runs none.
Needs root. Nothing outside of private namespaces is changed.
END
}

here=$(dirname -- "$(readlink -f -- "$0")")
root=$(dirname -- "$(dirname -- "$here")")
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
seconds=${KPROBEFS_TEST_SECONDS:-120} # that one test may take
scheduling=/proc/sys/kernel/sched_rt_runtime_us

say() { printf 'ftracetest: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 2
}

# --- the selftests --------------------------------------------------------------------------------

# fetch: prints the directory of the selftests, out of the package of $version.
fetch() {
    name=linux-source-$version
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/kprobefs/$name
    if [ ! -d "$cache/ftrace" ]; then
        say "fetching $name into $cache"
        mkdir -p "$cache"
        new=$(mktemp -d "$cache/new.XXXXXX")
        (cd "$new" && download "$name" >&2) || {
            rm -r "$new"
            say "apt-get can't download $name"
            exit 3
        }
        dpkg-deb --fsys-tarfile "$new"/*.deb | tar -xOf - "./usr/src/$name.tar.xz" |
            tar -xJf - -C "$new" --strip-components=4 "$name/tools/testing/selftests/ftrace"
        mv "$new/ftrace" "$cache/ftrace"
        rm -r "$new"
    fi
    printf '%s\n' "$cache/ftrace"
}

# download PACKAGE: into the current directory; of another release of Debian if apt doesn't know the package here.
download() {
    ! apt-get download -q "$1" 2>/dev/null || return 0
    case $version in
    5.10) suite=bullseye ;;
    6.1) suite=bookworm ;;
    6.12) suite=trixie ;;
    *) suite=sid ;;
    esac
    archive=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2>/dev/null |
        grep -om 1 'http[^ ]*/debian/\{0,1\}$\|http[^ ]*/debian/\{0,1\} ') || return 1
    mkdir -p lists/partial
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" >sources.list
    set -- "$1" -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=/nonexistent \
        -o "Dir::State::lists=$PWD/lists" -o "Dir::Cache=$PWD"
    name=$1
    shift
    apt-get "$@" update -qq && apt-get "$@" download -q "$name"
}

# list_tests DIR TEST...: paths below test.d, a line each.
list_tests() (
    cd "$1/test.d"
    shift
    [ $# -gt 0 ] || set -- .
    for name in "$@"; do
        [ -e "$name" ] || die "there is no test $name"
    done
    find "$@" -name '*.tc' | sed 's|^\./||' | sort -u
)

# --- the mount --------------------------------------------------------------------------------------

# prepare: a mount of ours that the selftests find first, and the host's files that tell of its kernel.
prepare() {
    # The first match in /proc/mounts is what they test: all others go, in this namespace.
    for kind in tracefs debugfs; do
        grep "$kind" /proc/mounts | cut -d ' ' -f 2 | sort -r | while read -r place; do
            umount -l "$place" || :
        done
    done
    mkdir "$work/mnt" "$work/logs"
    # shellcheck disable=SC2086 # several words
    PYTHONPATH=$root "$python" -m kprobefs mount $machine --foreground --log "$work/daemon.log" "$work/mnt" &
    daemon=$!
    # A first boot takes some seconds.
    tries=0
    until mountpoint -q "$work/mnt" && [ -e "$work/mnt/tracing/README" ]; do
        tries=$((tries + 1))
        if [ $tries -ge 600 ] || ! kill -0 "$daemon" 2>/dev/null; then
            die "no mount: $(tail -n 1 "$work/daemon.log")"
        fi
        sleep 0.1
    done
    ! grep -q tracefs /proc/mounts || die "another tracefs is mounted: $(grep -m 1 tracefs /proc/mounts)"
    [ "$(grep -m 1 debugfs /proc/mounts | cut -d ' ' -f 2)" = "$work/mnt" ] || die "another debugfs is mounted"
}

# lay_over: never where the daemon runs, which would wait for itself in a file of its own below /tmp.
lay_over() {
    head -n 1 "$work/mnt/machine/version" >"$work/version"
    mount --bind "$work/version" /proc/version
    mount --bind "$work/mnt/machine/kallsyms" /proc/kallsyms
    # Where some of the tests look for them, wherever they are mounted.
    [ ! -d /sys/kernel/tracing ] || mount --bind "$work/mnt/tracing" /sys/kernel/tracing
    [ ! -d /sys/kernel/debug ] || mount --bind "$work/mnt" /sys/kernel/debug
    # Requests for these two are what some tests probe.
    mount --bind "$work/mnt/dev/null" /dev/null
    mount --bind "$work/mnt/scratch" /tmp
    lay_sysctl kernel/stack_tracer_enabled
    lay_sysctl debug/kprobes-optimization
}

# lay_sysctl NAME: the emulated kernel's switch in /proc/sys, if it has one, be it that the host's kernel has none.
lay_sysctl() {
    [ -e "$work/mnt/sysctl/$1" ] || return 0
    place=/proc/sys/${1%/*}
    made=$work/sysctl-${1%/*}
    if [ ! -e "/proc/sys/$1" ]; then
        mkdir "$made"
        mount -t tmpfs sysctl "$made"
        mkdir "$made/.host"
        : >"$made/${1##*/}"
        find "$place" -mindepth 1 -maxdepth 1 -printf '%f\n' | while read -r name; do
            ln -s ".host/$name" "$made/$name"
        done
        mount --rbind "$place" "$made/.host"
        # Nothing of the host's stays below the directory, which is going to be removed.
        mount --move "$made" "$place"
    fi
    mount --bind "$work/mnt/sysctl/$1" "/proc/sys/$1"
}

finish() {
    status=$?
    trap - EXIT
    [ -z "${tests:-}" ] || kill "$tests" 2>/dev/null || :
    if [ -n "${daemon:-}" ]; then
        kill "$daemon" 2>/dev/null || :
        wait "$daemon" || :
        umount -l "$work/mnt" 2>/dev/null || :
    fi
    # They restore it themselves, unless they are ended.
    [ -z "${scheduling_was:-}" ] || echo "$scheduling_was" 2>/dev/null >$scheduling || :
    if [ $status -ne 0 ] && [ -d "$work/logs" ]; then say "logs are in $work"; else rm -rf "$work"; fi
    exit $status
}

# neighbour: another process, which tests expect that look for events of others.
neighbour() {
    while read -r _ <"$work/mnt/machine/version"; do
        sleep 0.005
    done
}

# isa: prints what uname -m prints on the emulated kernel, which the names of its system calls tell.
isa() {
    case $(grep -om 1 '__[a-z0-9]*_sys_read$' "$work/mnt/machine/kallsyms") in
    __riscv_*) echo riscv64 ;;
    __arm64_*) echo aarch64 ;;
    *) echo x86_64 ;;
    esac
}

# make_commands ISA: a uname, a modprobe, an rmmod and an nproc that mean the emulated kernel, and a ping for a kernel
# without a network: it sleeps and wakes up as ping does, and each of its packets is a request to the mount.
make_commands() {
    mkdir "$work/bin" "$work/modules"
    cat >"$work/bin/ping" <<END
#!/bin/sh
while [ \$# -gt 0 ] && [ "\$1" != -c ]; do shift; done
count=\${2:-1}
while [ "\$count" -gt 0 ]; do
    read -r _ <"$work/mnt/machine/version"
    sleep 0.01
    count=\$((count - 1))
done
END
    printf '#!/bin/sh\nset -- "%s"/tracing/per_cpu/cpu*\necho $#\n' "$work/mnt" >"$work/bin/nproc"
    printf '#!/bin/sh\n[ "$*" = -m ] || exec %s "$@"\necho %s\n' "$(command -v uname)" "$1" >"$work/bin/uname"
    chmod +x "$work/bin/ping" "$work/bin/nproc" "$work/bin/uname"
    for name in modprobe:load rmmod:unload; do
        # shellcheck disable=SC2016 # expanded when it is run
        printf '#!/bin/sh\necho "%s $(echo "$1" | tr - _)" >"%s"\n' \
            "${name#*:}" "$work/mnt/machine/modules" >"$work/modules/${name%:*}"
        chmod +x "$work/modules/${name%:*}"
    done
}

# path_for TEST: modules only where one is probed; those that are here print nothing into the trace.
path_for() {
    case $1 in
    kprobe/* | ftrace/func_mod_trace.tc) printf '%s:%s:%s' "$work/modules" "$work/bin" "$PATH" ;;
    *) printf '%s:%s' "$work/bin" "$PATH" ;;
    esac
}

# build_poll DIR: the program of trigger-hist-poll, which the selftests' own Makefile builds.
build_poll() {
    [ -e "$1/poll.c" ] && [ ! -x "$1/poll" ] || return 0
    cc -o "$1/poll" "$1/poll.c" 2>/dev/null || say "no C compiler for poll.c: trigger-hist-poll will be UNRESOLVED"
}

# narrow DIR: prints a copy of the selftests whose resets look only at the groups of events that tests name. The
# group syscalls has hundreds of events; only the named ones are looked at.
narrow() {
    cp -a "$1" "$work/selftests"
    named=$(grep -rohE 'events/[a-z_0-9]+/' "$1/test.d" | cut -d / -f 2 | sort -u | grep -vx syscalls |
        sed 's|$|/*|')
    calls=$(grep -rohE 'sys_(enter|exit)_[a-z_0-9]+' "$1/test.d" | sort -u | sed 's|^|syscalls/|')
    cat >>"$work/selftests/test.d/functions" <<END

named_files() {
    ls -d \$(
        for place in $(echo "$named" "$calls" | tr '\n' ' '); do
            echo "events/\$place/\$1"
        done
    ) 2>/dev/null || :
}
reset_trigger() {
    reset_trigger_file \$(named_files trigger)
}
reset_events_filter() {
    for file in \$(grep -lv ^none \$(named_files filter)); do
        echo 0 >"\$file"
    done
}
END
    printf '%s\n' "$work/selftests"
}

# --- running -----------------------------------------------------------------------------------------

# run TEST: appends "TEST LEVEL RESULT" lines to the results.
run() {
    log=$work/logs/$(echo "${1%.tc}" | tr / -)
    other=
    case $1 in
    event/event-no-pid.tc)
        neighbour 2>/dev/null &
        other=$!
        ;;
    esac
    PATH=$(path_for "$1") timeout -k 5 "$seconds" "$selftests/ftracetest" -l "$log" "$selftests/test.d/$1" >"$log.out" 2>&1 </dev/null ||
        ended=$?
    [ -z "$other" ] || kill "$other" || :
    other=
    sed -n 's/^\[[0-9]*\].*[[:space:]]\[\([A-Z]*\)\]$/&/p' "$log/ftracetest.log" 2>/dev/null |
        while IFS= read -r line; do
            level=top
            case $line in "["*"] (instance) "*) level=instance ;; esac
            result=${line##*[}
            printf '%s %s %s\n' "$1" $level "${result%]}"
        done >"$work/result"
    [ "${ended:-0}" -lt 124 ] || printf '%s - FAIL\n' "$1" >>"$work/result"
    ended=0
    cat "$work/result" >>"$work/results"
    awk '{ printf "%-60s %-9s %s\n", $1, $2, $3 }' "$work/result"
}

# compare LIST: what the list says passes, has to pass.
compare() {
    while read -r name level; do
        grep -qxF "$name" "$work/tests" || continue
        result=$(awk -v n="$name" -v l="$level" '$1 == n && $2 == l { print $3 }' "$work/results")
        case $result in PASS | XFAIL) continue ;; esac
        echo "$name ($level): passed before, now ${result:-not run}"
    done <"$1" >"$work/lost"
    awk '$3 == "PASS" || $3 == "XFAIL" { print $1, $2 }' "$work/results" |
        grep -vxFf "$1" | sed "s/\$/: passes, and is not in ${1##*/}/" || :
    cat "$work/lost"
}

inside() {
    machine=$1
    shift
    scheduling_was=$(cat $scheduling 2>/dev/null || :)
    work=$(mktemp -d /var/tmp/kprobefs-conformance.XXXXXX)
    trap finish EXIT
    trap 'exit 130' INT TERM HUP
    selftests=$1
    shift
    [ -x "$selftests/ftracetest" ] || die "$selftests: no ftracetest in it"
    list_tests "$selftests" "$@" >"$work/tests"
    build_poll "$selftests"
    case $machine in *--image*) selftests=$(narrow "$selftests") ;; esac
    prepare
    case $machine in
    *"--arch i386"*) make_commands i686 ;;
    *) make_commands "$(isa)" ;;
    esac
    # Not in the foreground: a trap would wait for its end.
    unshare --mount --propagation private "$here/ftracetest.sh" --tests "$work" "$selftests" &
    tests=$!
    wait "$tests"
    tests=
    echo
    : >"$work/lost"
    case $machine in
    *--image*) list= ;;
    *--profile*) list=$here/passes-${machine##*--profile linux-}.txt ;;
    "--arch x86_64 "*) list=$here/passes.txt ;;
    *) list= ;;
    esac
    [ -z "$list" ] || compare "$list"
    echo
    for result in PASS XFAIL FAIL UNRESOLVED UNSUPPORTED UNTESTED; do
        printf '%-12s %d\n' $result "$(awk -v r=$result '$3 == r' "$work/results" | wc -l)"
    done
    [ ! -s "$work/lost" ] && ! grep -q ' FAIL$' "$work/results"
}

# run_all: in a namespace of its own, so that what is laid over goes with it.
run_all() {
    work=$1
    selftests=$2
    lay_over
    while read -r name <&3; do
        run "$name"
    done 3<"$work/tests"
}

case ${1-} in
-h | --help)
    usage
    exit
    ;;
--tests)
    shift
    run_all "$@"
    exit
    ;;
--inside)
    shift
    inside "$@"
    exit
    ;;
esac
if [ "${1-}" = --fetch ]; then
    version=${2:-6.1}
    fetch
    exit
fi
[ "$(id -u)" -eq 0 ] || die "the selftests run as root alone"
machine="--arch x86_64 --cpus 2"
version=6.1
case ${1-} in
--profile)
    case ${2-} in linux-5.10 | linux-6.1 | linux-6.12 | linux-7.2) ;; *) die "there are no tests for ${2:-no profile}" ;; esac
    version=${2#linux-}
    [ "$version" = 6.1 ] || machine="$machine --profile $2"
    shift 2
    ;;
--arch)
    [ $# -ge 2 ] || die "--arch takes a name"
    case $2 in x86_64 | i386 | riscv64 | riscv64i) ;; *) die "there is no architecture $2" ;; esac
    machine="--arch $2 --cpus 2"
    shift 2
    ;;
--image | --kernel-kprobes)
    [ -e "${2-}" ] || die "$1 takes a kernel's file or package"
    machine="--image $(readlink -f -- "$2")"
    [ "$1" = --image ] || machine="--kprobes kernel $machine"
    shift 2
    if [ "${1-}" = --profile ]; then
        machine="$machine --profile ${2?--profile takes a name}"
        shift 2
    fi
    ;;
esac
if [ -n "${1-}" ] && [ -e "$1/ftracetest" ]; then
    selftests=$(readlink -f -- "$1")
    shift
else
    selftests=$(fetch)
fi
case $selftests in /tmp | /tmp/*) die "$selftests: the mount's scratch/ covers /tmp; take another place" ;; esac
# In a PID namespace of their own: they compare counts of forks, which those of the whole host would change.
exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc "$here/ftracetest.sh" --inside "$machine" "$selftests" "$@"
