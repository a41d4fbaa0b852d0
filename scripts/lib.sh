# shellcheck shell=sh
# Set-up functions of scripts/run and scripts/test: distribution packages, .venv, /dev/fuse.
#
# The sourcing script sets $root to the absolute path of the checkout. All functions can be run again
# at any time. They keep existing installations, so that a second run needs no network.
: "${root:?scripts/lib.sh needs the path of the checkout}"

venv=$root/.venv
python=${PYTHON:-python3}
unset PYTHONHOME PYTHONPATH

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Programs that tests use if they are installed: unmodified tracing tools, compilers, groff, a terminal
# multiplexer, a wrong clock, a shell linter, gawk and debuggers.
test_tools="perf-tools-unstable linux-perf trace-cmd bpftrace gcc gcc-riscv64-linux-gnu groff tmux faketime \
shellcheck gawk stress-ng uftrace busybox-static rpm gdb crash e2fsprogs"
# Packages of PyPI that tests use if they are installed; only wheels, which need no compiler.
test_wheels="drgn>=0.3,<0.4"

# setup_python: makes $venv with the project and its test requirements. It needs only Python and a network.
setup_python() {
    check_python
    venv_is_sound || make_venv
    install_project test
}

# setup run|package|test: makes $venv/bin/kprobefs work, and builds and tests too; "test" also installs the
# tools of tests.
setup() {
    venv_is_sound || venv_is_missing=1
    packages=$(missing_packages)
    # shellcheck disable=SC2086 # package names are words
    [ -z "$packages" ] || install_packages $packages
    check_python
    [ -z "${venv_is_missing:-}" ] || make_venv
    if [ "$1" = run ]; then install_project run; else install_project test; fi
    [ "$1" != test ] || install_test_tools
    [ "$1" != test ] || install_test_wheels
}

# --- distribution packages ----------------------------------------------------------------------

missing_packages() {
    command -v "$python" >/dev/null 2>&1 || echo python3
    if [ -n "${venv_is_missing:-}" ]; then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    fi
    has_library libfuse.so.2 || libfuse_package
    command -v fusermount >/dev/null 2>&1 || command -v fusermount3 >/dev/null 2>&1 || echo fuse3
}

has_library() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | grep -qF "$1"; }

# Prints the name of the libfuse package, which the 64-bit time_t transition changed.
libfuse_package() (
    # shellcheck disable=SC1090
    [ ! -r "${OS_RELEASE:=/etc/os-release}" ] || . "$OS_RELEASE"
    case ${ID:-}:${VERSION_ID:-} in
    debian:1[0-2] | ubuntu:1?.* | ubuntu:2[0-3].*) echo libfuse2 ;;
    *) echo libfuse2t64 ;;
    esac
)

install_packages() {
    can_be_root || die "install these packages first (no root and no sudo here): $*"
    command -v apt-get >/dev/null 2>&1 || die "install these packages first (no apt-get here): $*"
    say "installing $*"
    log=$(mktemp)
    if ! apt_install "$@" >"$log" 2>&1; then
        say "refreshing the package lists"
        as_root apt-get update -qq >"$log" 2>&1 || fail_with_log "apt-get update failed"
        apt_install "$@" >"$log" 2>&1 || fail_with_log "apt-get could not install $*"
    fi
    rm -f "$log"
}

# Tries once to install each test tool. If that fails, the tests of the tool are skipped.
install_test_tools() (
    stamp=$venv/.test-tools
    [ "$(cat "$stamp" 2>/dev/null)" != "$test_tools" ] || return 0
    can_be_root && command -v apt-get >/dev/null 2>&1 || return 0
    for package in $test_tools; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' && continue
        say "installing $package for its tests"
        apt_install "$package" >/dev/null 2>&1 || say "$package: not available; its tests are skipped"
    done
    printf '%s\n' "$test_tools" >"$stamp"
)

# Tries once to install each wheel into the venv. If that fails, the tests of the package are skipped.
install_test_wheels() (
    stamp=$venv/.test-wheels
    [ "$(cat "$stamp" 2>/dev/null)" != "$test_wheels" ] || return 0
    for wheel in $test_wheels; do
        "$venv/bin/python" -m pip install -q --only-binary :all: "$wheel" >/dev/null 2>&1 ||
            say "$wheel: not available; its tests are skipped"
    done
    printf '%s\n' "$test_wheels" >"$stamp"
)

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get install -y -qq \
        --no-install-recommends -o DPkg::Lock::Timeout=120 "$@"
}

can_be_root() {
    [ "$(id -u)" -eq 0 ] && return
    command -v sudo >/dev/null 2>&1 || return
    sudo -n true 2>/dev/null || [ -t 0 ]
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -- "$@"; fi
}

# Prints the last lines of $log, then the one-line reason.
fail_with_log() {
    tail -n 5 "$log" >&2
    rm -f "$log"
    die "$*"
}

# --- python -------------------------------------------------------------------------------------

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

check_python() {
    version=$(python_version "$python") || die "$python: does not run; set PYTHON=... to another Python"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python 3.11 or newer is needed, $python is $version (PYTHON=... names another one)"
}

# A venv works only at its original path and with the Python that made it.
venv_identity() { printf 'python %s at %s\n' "$(python_version "$python")" "$venv"; }

venv_is_sound() {
    [ "$(cat "$venv/.made-for" 2>/dev/null)" = "$(venv_identity)" ] &&
        "$venv/bin/python" -c 'import pip' 2>/dev/null
}

make_venv() {
    # The directory of a link is another checkout's: it can be in use, and imports the other checkout.
    [ ! -L "$venv" ] || die "$venv: is a symbolic link; remove it to get a .venv of this checkout"
    say "making .venv (Python $version)"
    log=$(mktemp)
    rm -rf "$venv"
    "$python" -m venv "$venv" >"$log" 2>&1 || fail_with_log "python3 -m venv failed"
    rm -f "$log"
    venv_identity >"$venv/.made-for"
}

# The stamp contains the hash of the installed pyproject.toml. The extra "test" includes "run".
install_project() {
    hash=$(sha256sum <"$root/pyproject.toml")
    [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$hash" ] && return
    say "installing kprobefs and its requirements into .venv"
    log=$(mktemp)
    extras=
    [ "$1" = run ] || extras="[$1,docs]"
    # fusepy has no wheel: --use-pep517 builds it in isolation, without setuptools in the venv.
    (cd "$root" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --use-pep517 --editable ".$extras") </dev/null >"$log" 2>&1 ||
        fail_with_log "pip could not install kprobefs into .venv"
    rm -f "$log"
    for part in run "$1"; do printf '%s\n' "$hash" >"$venv/.installed-$part"; done
}

# --- /dev/fuse ----------------------------------------------------------------------------------

# fuse_problem: prints one line if mounting cannot work, otherwise nothing. If root can create the missing
# device (in a chroot or container), the function creates it.
fuse_problem() {
    if [ ! -e /dev/fuse ] && [ "$(id -u)" -eq 0 ]; then
        modprobe fuse 2>/dev/null || :
        [ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229 2>/dev/null || :
    fi
    if [ ! -e /dev/fuse ]; then
        echo "/dev/fuse: missing; run 'modprobe fuse' as root, or start the container with '--device /dev/fuse'"
    elif ! [ -r /dev/fuse ] || ! [ -w /dev/fuse ]; then
        echo "/dev/fuse: no access for $(id -un); run 'chmod 666 /dev/fuse' as root"
    elif ! (: <>/dev/fuse) 2>/dev/null; then
        echo "/dev/fuse: cannot open; run 'modprobe fuse' as root, or start the container with '--device /dev/fuse'"
    fi
}
