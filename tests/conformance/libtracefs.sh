#!/bin/sh
# Builds libtracefs and its own unit tests from a source tree, and runs them on a mount.
set -eu

usage() {
    cat <<'END'
usage: tests/conformance/libtracefs.sh DIR
DIR has the sources of libtracefs, with utest/; nothing is written there. The mount has the host's number
of CPUs, which the tests ask for. Needs cc, make, pkg-config, CUnit and libtraceevent (libcunit1-dev and
libtraceevent-dev), and what `kprobefs run --as-system` needs.
END
}

here=$(dirname -- "$(readlink -f -- "$0")")
kprobefs=${KPROBEFS_COMMAND:-$(dirname -- "$(dirname -- "$here")")/.venv/bin/kprobefs}

case ${1-} in
-h | --help) usage && exit ;;
'' | -*) usage >&2 && exit 2 ;;
esac
[ -e "$1/utest/tracefs-utest.c" ] || {
    printf 'libtracefs: %s: no utest/tracefs-utest.c in it\n' "$1" >&2
    exit 2
}
# Not below /tmp, where the mount's scratch/ is meanwhile.
work=$(mktemp -d /var/tmp/libtracefs.XXXXXX)
trap 'rm -rf "$work"' EXIT
cp -r "$1/." "$work"
make -s -C "$work" >"$work/log" 2>&1 || {
    tail -n 5 "$work/log" >&2
    exit 2
}
# shellcheck disable=SC2046 # several words
cc -D_GNU_SOURCE -I"$work/include" $(pkg-config --cflags libtraceevent) "$work"/utest/tra*.c \
    "$work/lib/tracefs/libtracefs.a" -lcunit -ltraceevent -lpthread -o "$work/utest-run"
"$kprobefs" run --as-system --cpus "$(getconf _NPROCESSORS_CONF)" -- "$work/utest-run" | tee "$work/log"
# CUnit's status is 0 whatever failed.
awk '$1 == "asserts" { ran = $3; failed = $5 } END { exit !(ran && !failed) }' "$work/log"
