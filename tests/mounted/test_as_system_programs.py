"""Complete programs from public reports, under `run --as-system`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.harness import needs_fuse
from tests.guests.linux.debian_kernel import lasting_cache
from tests.mounted.debian_files import unpacked
from tests.mounted.linux_source import source
from tests.mounted.system import SOURCES, as_root, as_system, needs

SURFTRACE = "surftrace==0.7.16"
TRACE_WITH_SURFTRACE = """
out=$HOME/out instance=/sys/kernel/tracing/instances/surftrace
PYTHONUNBUFFERED=1 python3 -m surftrace.surftrace "$1" > $out 2>&1 & traces=$!
until [ "$(cat $instance/tracing_on 2> /dev/null)" = 1 ] && grep -q 'echo 1 > .*/tracing_on' $out; do
    kill -0 $traces 2> /dev/null || { cat $out; exit 1; }
    sleep 0.1
done
mkdir "$KPROBEFS"/scratch/a
until grep -q "$2" $out; do
    kill -0 $traces
    sleep 0.1
done
kill -INT $traces; wait $traces || true
grep -c "$2" $out
cat /sys/kernel/tracing/kprobe_events $instance/tracing_on
"""
"""Script that traces the first argument, until a line of output contains the second argument."""

pytestmark = [pytest.mark.mounted, needs_fuse, as_root]


@pytest.fixture(scope="module")
def surftrace() -> Path:
    """Return the directory of surftrace and the packages that surftrace needs. The directory is kept for
    later runs.
    """
    place = lasting_cache("surftrace") / f"{SURFTRACE}-{sys.version_info.major}.{sys.version_info.minor}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=place.parent))
        words = [sys.executable, "-m", "pip", "install", "-q", "--target", new, SURFTRACE]
        try:
            subprocess.run(words, capture_output=True, check=True, timeout=50)
        except (subprocess.SubprocessError, OSError) as error:
            shutil.rmtree(new)
            pytest.skip(f"{SURFTRACE} can't be had: {error}")
        # Another worker may have installed it meanwhile.
        with suppress(OSError):
            new.rename(place)
    return place


@pytest.fixture(scope="module")
def go_cache() -> Path:
    """Return the path of a cache for Go's standard library, which takes seconds to build. The cache is kept
    for later runs.
    """
    return lasting_cache("go")


def test_one_built_with_address_sanitizer(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "a"
    built_it = subprocess.run(["cc", "-fsanitize=address", source, "-o", program], check=False)
    if built_it.returncode:
        pytest.skip("cc has no address sanitizer")
    as_system(str(program), tmp_path)


@needs("busybox")
def test_copies_by_busybox(tmp_path: Path) -> None:
    script = f"""
        cd /sys/kernel/tracing
        busybox cat trace_options | cmp - trace_options
        busybox cp README {tmp_path}/copied; cmp README {tmp_path}/copied && echo same
    """
    assert as_system(script, tmp_path) == "same\n"


@needs("go")
def test_detection_by_go(tmp_path: Path, go_cache: Path) -> None:
    program = tmp_path / "detect"
    environment = {**os.environ, "GOCACHE": str(go_cache), "CGO_ENABLED": "0"}
    subprocess.run(
        ["go", "build", "-o", program, SOURCES / "detect.go"], env=environment, check=True, timeout=300
    )
    assert as_system(f"env -i {program}", tmp_path).splitlines() == [
        "/sys/kernel/tracing /sys/kernel/debug",
        "/sys/kernel/tracing <nil> true",
        "/sys/kernel/debug/tracing <nil> true",
    ]


@needs("go")
def test_a_probe_of_a_library_in_go(tmp_path: Path, go_cache: Path) -> None:
    """A program with the Go library evilsocket/ftrace, on which OpenSnitch is based, defines a probe and
    parses trace_pipe.
    """
    library = unpacked("golang-github-evilsocket-ftrace-dev") / "usr/share/gocode"
    program = tmp_path / "listen"
    paths = {"GO111MODULE": "off", "GOPATH": str(library), "GOCACHE": str(go_cache)}
    subprocess.run(
        ["go", "build", "-o", program, SOURCES / "listen.go"],
        env={**os.environ, **paths, "CGO_ENABLED": "0"},
        check=True,
        timeout=300,
    )
    script = f"{program} $KPROBEFS/scratch/a && cat /sys/kernel/tracing/kprobe_events"
    assert as_system(script, tmp_path) == "true true <nil>\n"


def test_cyclictest_marks_its_threshold(tmp_path: Path) -> None:
    """cyclictest stops tracing at the first latency above a threshold, and writes a marker with both
    numbers.
    """
    program = unpacked("rt-tests") / "usr/bin/cyclictest"
    numa = unpacked("libnuma1")
    script = f"""
        export LD_LIBRARY_PATH=$(echo {numa}/usr/lib/*)
        {program} -q -t1 -i 1000 -l 20000 -b 1 --tracemark --policy=other >/dev/null || exit 1
        cat /sys/kernel/tracing/tracing_on
        grep -c 'tracing_mark_write: hit latency threshold ([0-9]* > 1)' /sys/kernel/tracing/trace
    """
    # A user namespace has no right to the host's scheduler.
    assert as_system(script, tmp_path, "--real-root") == "0\n1\n"


@needs("perf")
def test_perf_ftrace(tmp_path: Path) -> None:
    script = """
        cd $KPROBEFS/scratch; echo hi > file
        perf ftrace trace -T vfs_read -- cat file | grep -c 'cat-.* vfs_read <-ksys_read'
        perf ftrace trace -G vfs_read -m 64K -- cat file | grep -c ' vfs_read() {$'
        perf ftrace latency -T vfs_read -- cat file | awk -F'|' '$2 ~ /[0-9]/ { sum += $2 } END { print sum }'
    """
    if (
        "latency"
        not in subprocess.run(["perf", "ftrace", "-h"], capture_output=True, text=True, check=False).stderr
    ):
        pytest.skip("this perf has no ftrace latency")
    # The file is read twice: its data, and its end.
    assert as_system(script, tmp_path).split() == ["2", "2", "2"]


@needs("stress-ng")
def test_stress_ng(tmp_path: Path) -> None:
    out = as_system(f"cd {tmp_path}; stress-ng --ftrace --get 1 --timeout 2 2>&1", tmp_path)
    assert "skipping" not in out
    assert "successful run completed" in out


@needs("uftrace")
def test_uftrace(tmp_path: Path) -> None:
    """uftrace records functions of the kernel only if mountinfo lists a tracefs."""
    source = tmp_path / "a.c"
    source.write_text('#include <unistd.h>\nint main(void) { return access("/", 0); }\n')
    subprocess.run(["cc", "-pg", source, "-o", tmp_path / "a"], check=True)
    cpus = str(os.sysconf("SC_NPROCESSORS_CONF"))
    out = as_system(f"cd {tmp_path}; uftrace record -k -d out ./a 2>&1; ls out", tmp_path, "--cpus", cpus)
    assert "kernel-cpu0.dat" in out


def test_surftrace_of_an_event(surftrace: Path, tmp_path: Path) -> None:
    script = f"""
        trace() {{ {TRACE_WITH_SURFTRACE}
        }}
        export PYTHONPATH={surftrace}; trace 'e sched/sched_switch' ' sched_switch: '
    """
    hits, on = as_system(script, tmp_path).split()
    assert int(hits) > 0
    assert on == "0"


def test_surftrace_of_a_function(surftrace: Path, tmp_path: Path) -> None:
    """surftrace traces a function, after it has asked a server for the function's type. A stand-in for the
    server runs in a separate network namespace.
    """
    (tmp_path / "trace.sh").write_text(TRACE_WITH_SURFTRACE)
    script = f"""
        export PYTHONPATH={surftrace} LBC_SERVER=127.0.0.1
        unshare -n bash -c '
            ip link set lo up
            python3 {SOURCES}/surftrace_server.py {tmp_path}/asked & server=$!
            until [ -e {tmp_path}/asked ]; do sleep 0.1; done
            bash {tmp_path}/trace.sh "p vfs_mkdir" "p0: (vfs_mkdir"; status=$?
            kill $server; cat {tmp_path}/asked; exit $status'
    """
    assert as_system(script, tmp_path).splitlines() == ["1", "0", "/lbc func vfs_mkdir"]


def test_surftrace_without_its_server(surftrace: Path, tmp_path: Path) -> None:
    """If surftrace cannot reach its server, the error names the server, and no probe is left."""
    script = f"""
        export PYTHONPATH={surftrace}
        unshare -n python3 -m surftrace.surftrace 'p vfs_mkdir' > {tmp_path}/out 2>&1 && exit 1
        grep -q "host='www.foxbeaver.cn', port=80): Max retries" {tmp_path}/out && echo asked
        cat /sys/kernel/tracing/kprobe_events
    """
    assert as_system(script, tmp_path) == "asked\n"


def test_ftrace2bconf(tmp_path: Path) -> None:
    """ftrace2bconf.sh prints the settings of tracefs as a boot configuration.

    The test hides the events of system calls, because there are many, and the script reads files of each
    event.
    """
    script = f"""
        cd /sys/kernel/tracing
        mount -t tmpfs none events/syscalls
        echo 'p:foo vfs_mkdir' > kprobe_events
        echo 1 > events/kprobes/foo/enable; echo 'common_pid > 10' > events/kprobes/foo/filter
        echo 'hist:keys=common_pid' > events/kprobes/foo/trigger
        echo 1 > events/sched/sched_switch/enable
        echo vfs_mkdir > set_ftrace_filter; echo function > current_tracer
        sh {source("tools/bootconfig/scripts/ftrace2bconf.sh")}
    """
    lines = as_system(script, tmp_path).splitlines()
    assert [line for line in lines if ".event." in line or ".tracer" in line] == [
        "ftrace.tracer = function",
        "ftrace.event.kprobes.foo.probes += vfs_mkdir",
        "ftrace.event.kprobes.enable",
        "ftrace.event.kprobes.foo.actions += 'hist:keys=common_pid:vals=hitcount:sort=hitcount:size=2048'",
        "ftrace.event.kprobes.foo.filter = common_pid > 10",
        "ftrace.event.sched.sched_switch.enable",
    ]
    assert {line.split(" = ")[0] for line in lines} >= {
        f"ftrace.{key}" for key in ("options", "buffer_size", "cpumask")
    }
