"""Fuzzer that chooses files and inputs by a seed, writes the inputs in a session, and collects findings."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.command_file import SPLIT_SIZE
from stress.fuzz.grammar import Mutator
from stress.fuzz.report import Findings, Violation
from stress.fuzz.rules import GRAMMAR, RULES, TOKENS
from stress.fuzz.session import TRACING, Session, time_limit

RESET_EVERY = 250
RESET_SECONDS = 300.0
"""Time limit of a reset, which makes many requests and may record a stack trace for each called function."""
STATE_EVERY = 40
USE_EVERY = 10
CHECK_EVERY = 100
_VOLATILE = frozenset(
    {
        *("trace", "snapshot", "error_log", "hits", "nmissed", "call", "filter", "trace_marker"),
        *("trace_marker_raw", "free_buffer", "buffer_size_kb", "tracing_on", "stack_max_size", "clock"),
    }
)
"""Files whose text can change without a successful write to them.

For example, a trigger that takes a snapshot swaps buffers, which may have different sizes.
Linux: a filter file shows a refused filter, with its error.
"""
_WEIGHTS = {
    **dict.fromkeys(("kprobe_events", "dynamic_events", "trigger"), 10),
    **dict.fromkeys(("synthetic_events", "uprobe_events", "filter", "set_event", "set_ftrace_filter"), 5),
}
"""Kind of file -> weight with which it is chosen. Files with a command language are chosen more often."""
_PARTLY_DONE = frozenset(
    {
        *((kind, "EBUSY") for kind in ("kprobe_events", "dynamic_events", "uprobe_events")),
        *((kind, "EOPNOTSUPP") for kind in ("set_event", "enable")),
    }
)
"""(kind of file, errno) of commands that may have a partial effect.

Linux: if a command names several events, it removes or enables each event for which this is possible.
docs/reference/compatibility.md describes each case.
"""
_WORD_BY_WORD = frozenset(
    {
        *("set_event", "set_ftrace_filter", "set_ftrace_notrace"),
        *("set_graph_function", "set_graph_notrace", "stack_trace_filter"),
    }
)
"""Files in which each word is a command."""
_FLAGS = (
    (os.O_WRONLY,) * 24 + (os.O_RDWR,) * 4 + (os.O_WRONLY | os.O_APPEND,) * 4 + (os.O_WRONLY | os.O_TRUNC,)
)


@dataclass(frozen=True)
class Input:
    """One open file, with the data of each write(2) to it."""

    number: int
    path: str
    parts: tuple[bytes, ...]
    flags: int

    def __str__(self) -> str:
        shown = " + ".join(f"{part[:300]!r}{'...' if len(part) > 300 else ''}" for part in self.parts)
        return f"#{self.number} {self.path} ({self.flags:#x}): {shown}"


def kind_of(path: str) -> str:
    """Return the kind of a file: its name, or `options` for all files of options/."""
    directory, _, name = path.rpartition("/")
    return "options" if directory.endswith("/options") else name


@dataclass
class Fuzzer:
    """Writes inputs to files of the given kinds, or of all kinds if `kinds` is empty."""

    seed: int
    kinds: Collection[str] = ()
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of file, errno) -> number of writes; the errno is "" for success."""
    findings: Findings = field(default_factory=Findings)

    def __post_init__(self) -> None:
        self._mutator = Mutator(TOKENS)
        self._history: deque[Input] = deque(maxlen=300)
        self._session: Session | None = None
        self._paths: dict[str, list[str]] = {}

    def run(self, number: int) -> None:
        """Write the input with the number `number`; record an unexpected error as a finding."""
        random = Random(f"{self.seed}:{number}")
        try:
            with time_limit(RESET_SECONDS):
                session = self._ready(number)
            with time_limit():
                self._run(session, number, random)
        # Every other exception is a finding. The kernel may be broken, so it is not used again.
        except Exception as error:
            self.findings.add(error, tuple(self._history))
            self.close()

    def close(self) -> None:
        """Free the kernel."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ready(self, number: int) -> Session:
        if self._session is not None and self._session.is_spent:
            self.close()
        if self._session is None:
            self._session = Session()
            self._history.clear()
            self._find_files(self._session)
        elif number % RESET_EVERY == 0:
            self._session.reset()
            self._find_files(self._session)
        return self._session

    def _find_files(self, session: Session) -> None:
        self._paths = {"mkdir": [f"{TRACING}/instances"]}
        for path in session.writable():
            self._paths.setdefault(kind_of(path), []).append(path)
        if self.kinds:
            self._paths = {kind: paths for kind, paths in self._paths.items() if kind in self.kinds}
        if not self._paths:
            raise Violation(f"{', '.join(self.kinds)}: there is no such file")

    def _run(self, session: Session, number: int, random: Random) -> None:
        kinds = sorted(self._paths)
        (kind,) = random.choices(kinds, [_WEIGHTS.get(each, 1) for each in kinds])
        chosen = self._input(random, number, kind)
        self._history.append(chosen)
        session.as_client(random.choice((0, 0, 1, 2)))
        if kind == "mkdir":
            self._make(session, chosen)
        else:
            self._write(session, chosen, whole_state=number % STATE_EVERY == 0)
        # `use` may fail with an errno, for example if the client has no permission.
        if number % USE_EVERY == 0:
            self._answer("use", session.use)
        if number % CHECK_EVERY == 0 and not session.is_spent:
            session.check()

    def _input(self, random: Random, number: int, kind: str) -> Input:
        paths = self._paths[kind]
        preferred = [path for path in paths if "/base/" in path or "/syn/" in path]
        path = random.choice(preferred if preferred and random.random() < 0.6 else paths)
        data = GRAMMAR.text(random, RULES.get(kind, "anything")).encode()
        if random.random() < 0.5:
            data = self._mutator.damage(random, data)
        return Input(number, path, _split(random, data), random.choice(_FLAGS))

    def _write(self, session: Session, chosen: Input, *, whole_state: bool) -> None:
        kind = kind_of(chosen.path)
        compares = _is_one_command(chosen) and not chosen.flags & os.O_TRUNC
        watches_text = compares and kind not in _VOLATILE
        text = _text(session, chosen.path) if watches_text else b""
        state = session.state() if compares and whole_state else {}
        answer = self._answer(kind, lambda: session.write(chosen.path, *chosen.parts, flags=chosen.flags))
        if not answer or (kind, answer) in _PARTLY_DONE or session.is_spent:
            return
        now = _text(session, chosen.path) if watches_text else b""
        if now != text and _text(session, chosen.path) == now:
            raise Violation(f"{kind}: refused with {answer}, but was {text[-300:]!r} and is {now[-300:]!r}")
        if state and (after := session.state()) != state:
            changed = {
                name: (state.get(name), after[name]) for name in after if after[name] != state.get(name)
            }
            raise Violation(f"{kind}: refused with {answer}, but the state changed: {changed}")

    def _make(self, session: Session, chosen: Input) -> None:
        """Create a directory with a fuzzed name, and sometimes remove it again."""
        name = chosen.parts[0].decode("utf-8", "surrogateescape").replace("/", "").replace("\0", "")[:255]
        path = f"{chosen.path}/{name or 'made'}"
        self._answer("mkdir", lambda: session.mount.mkdir(session.client, path, 0o755))
        if chosen.number % 3:
            self._answer("rmdir", lambda: session.mount.rmdir(session.client, path))

    def _answer(self, kind: str, action: object) -> str:
        """Call `action`, count the name of its errno, or "" for success, and return the name.

        `kind`: kind of the file, for the count.
        """
        assert callable(action)
        try:
            action()
        except KernelError as error:
            if not error.errno or error.errno < 0:
                raise Violation(f"{kind}: an error without errno: {error!r}") from error
            self.answers[kind, error.name] += 1
            return error.name
        self.answers[kind, ""] += 1
        return ""


def _text(session: Session, path: str) -> bytes:
    """Return the text of a file, or the name of the errno if it cannot be read."""
    try:
        return session.read(path)
    except KernelError as error:
        return error.name.encode()


def _split(random: Random, data: bytes) -> tuple[bytes, ...]:
    """Return the data in one piece, or sometimes in up to four pieces."""
    if random.random() < 0.9 or not data:
        return (data,)
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(1, 3)))
    return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))


def _is_one_command(chosen: Input) -> bool:
    """Return True if the input is a single command.

    If one of several commands is refused, the commands before it have already taken effect.
    """
    data = b"".join(chosen.parts)
    separates = bytes.split if kind_of(chosen.path) in _WORD_BY_WORD else bytes.splitlines
    return len(chosen.parts) == 1 and len(data) < SPLIT_SIZE and len(separates(data)) <= 1


def counts(answers: Counter[tuple[str, str]]) -> Sequence[str]:
    """Return a line for each kind of file: its numbers of writes, successes and errnos."""
    kinds = sorted({kind for kind, _ in answers})
    lines = []
    for kind in kinds:
        errors = {error: n for (own, error), n in answers.items() if own == kind}
        refused = " ".join(f"{error} {n}" for error, n in sorted(errors.items()) if error)
        lines.append(f"{kind:<24} {sum(errors.values()):>8} {errors.get('', 0):>8} ok  {refused}")
    return lines
