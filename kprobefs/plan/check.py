"""Checks of probe definitions: a kernel's answers to the lines of a definitions file, and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from emulated_kernel.image.kallsyms import Location
from emulated_kernel.image.linux.btf_declaration import prototype
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.probes.definition import MAX_EVENT_NAME_LEN
from emulated_kernel.trace.probes.trace_kprobe import TraceKprobe
from emulated_kernel.trace.text.chars import argv_split
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.similar_names import similar_names_hint
from kprobefs.common.errors import CliError
from kprobefs.common.similar_symbols import nearest_symbols
from kprobefs.definitions.syntax import (
    DEFINITION,
    NOT_A_LINE,
    SETTING,
    Line,
    advice,
    is_definition,
    word_column,
)
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.answer import PENDING, REMOVED, UNCHECKED, Answer, Finding
from kprobefs.plan.argument_types import follow, readings
from kprobefs.plan.arguments import changed_parameters
from kprobefs.plan.check_settings import SettingChecks
from kprobefs.plan.clones import calls_of_clones
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.offline_engine import OfflineEngine
from kprobefs.plan.place import (
    Place,
    module_name,
    nearest_in_module,
    passed_symbol,
    place_in_any_boot,
)
from kprobefs.plan.planned_kernel import ONLY_COUNTED, UNGUARDED, PlannedKernel

_OTHER_KINDS = {
    "s": (None, "synth_event_delete"),
    "e": (InterfaceRule.EVENT_PROBES, "__trace_eprobe_create"),
    "f": (InterfaceRule.FPROBE_EVENTS, "trace_fprobe_show"),
    "t": (InterfaceRule.TRACEPOINT_EVENTS, "trace_fprobe_show"),
}
"""Letter of an event kind other than kprobe events -> (InterfaceRule, kernel's function) that it needs.

The rule is None if the tracefs interfaces of all versions have the kind. A kernel without the function was
built without the kind.
"""
_PARAMETER = re.compile(r"\$arg([0-9]+)\b")
"""Pattern for a parameter of the function in a fetch argument."""
_MODULE = re.compile(r"[A-Za-z_]\w*")
"""Pattern for the name of a module, as the kernel has it."""
_STUB = "__probestub_"
"""Prefix of the name of a tracepoint's stub, a function that has the tracepoint's parameters."""


def check_lines(kernel: PlannedKernel, lines: Iterable[Line]) -> list[Answer]:
    """Return a kernel's answers to lines, as if they were written to its kprobe_events in this order.

    The lines that write a value to another file (FILE = VALUE) are checked in part.

    If a definition's place is in a module (MODULE:SYMBOL) that comes with the kernel, the answers are for the
    kernel with this module loaded. An answer also contains the outcome without such modules, if that is
    another one.
    """
    known = list(lines)
    answers = _answers(kernel, known)
    modules, missing = _modules(kernel, known)
    if modules:
        before = answers
        loaded = kernel.with_modules(modules)
        answers = _answers(loaded, known)
        kernel.remark(loaded.remarks)
        for answer, unloaded in zip(answers, before, strict=True):
            module = _place(answer.line).partition(":")[0]
            _compare(answer, unloaded, module if module in modules else ", ".join(modules))
    for answer in answers:
        if why := missing.get(_place(answer.line)):
            if answer.is_error and _is_accepted_at_entry(kernel, answer.line):
                answer.outcome, answer.unloaded = UNCHECKED, answer.outcome
                answer.findings = [_refused_until_loaded(each, "") for each in answer.findings]
            answer.findings.append(Finding("no-module", False, why, word_column(answer.line.text, 1)))
    return answers


def _is_accepted_at_entry(kernel: PlannedKernel, line: Line) -> bool:
    """Return True if the kernel would accept `line` if its place were the entry of a loaded function.

    The real place is a function of a module that cannot be read. Without the module, the kernel cannot know
    that the place is an entry, and refuses parameters.
    """
    place = _place(line)
    functions = (kernel.tables.kallsyms.lookup(site) for site in kernel.tables.mcount)
    names = (each.symbol.name for each in functions if each is not None)
    entry = next((name for name in names if kernel.tables.kallsyms.count_name(name) == 1), None)
    if entry is None or "+" in place:
        return False
    text = line.text.replace(place, entry + "%return" * place.endswith("%return"), 1)
    return not _answers(kernel, [Line(line.file, line.number, text)])[0].is_error


def _modules(kernel: PlannedKernel, lines: Iterable[Line]) -> tuple[list[str], dict[str, str]]:
    """Return (loadable modules that the lines' places name, map place -> why its module can't be loaded)."""
    found: dict[str, None] = {}
    missing: dict[str, str] = {}
    for place in dict.fromkeys(map(_place, lines)):
        module, colon, rest = place.partition(":")
        if not colon or kernel.image is None or _MODULE.fullmatch(module) is None or module in found:
            continue
        try:
            kernel.with_module_of(module, re.split("[+%]", rest, maxsplit=1)[0])
        except CliError as error:
            missing[place] = str(error).removeprefix(f"{kernel.image}: ")
        else:
            found[module] = None
    return [*found], missing


def _place(line: Line) -> str:
    """Return the place of a kprobe's or return probe's definition, or "" for other lines."""
    found = DEFINITION.match(line.text)
    if found is None or found["kind"] not in "pr" or not found["rest"]:
        return ""
    return found["rest"].split(maxsplit=1)[0]


def _compare(answer: Answer, unloaded: Answer, modules: str) -> None:
    """Add to `answer` the outcome without `modules`, and a warning if the kernel then refuses the line.

    `unloaded`: the answer while the modules are not loaded. `modules`: their names, for the warning. If both
    answers have the same outcome, add nothing.
    """
    if answer.outcome == unloaded.outcome:
        return
    answer.unloaded = unloaded.outcome
    refused = next((finding for finding in unloaded.findings if finding.is_error), None)
    if refused is not None:
        answer.findings.append(_refused_until_loaded(refused, f" ({modules})"))


def _refused_until_loaded(error: Finding, modules: str) -> Finding:
    """Return a warning that the kernel refuses the line with `error` while the module is not loaded.

    `modules`: names of the modules in parentheses, after a blank; "" to name none.
    """
    message = f"refused while the module is not loaded{modules}: {error.message}"
    return Finding("needs-module", False, message, error.column)


def _answers(kernel: PlannedKernel, lines: Iterable[Line]) -> list[Answer]:
    engine = OfflineEngine(kernel)
    settings = SettingChecks(kernel, engine)
    answers = [_answer(kernel, engine, settings, line) for line in lines]
    left = set(engine.kprobe_events.probes())
    _find_taken_jumps([answer for answer in answers if answer.probe in left])
    return answers


def _answer(kernel: PlannedKernel, engine: OfflineEngine, settings: SettingChecks, line: Line) -> Answer:
    if SETTING.match(line.text):
        return settings.answer(line)
    if _is_foreign(line.text, kernel):
        settings.named(line.text)
        return Answer(line, UNCHECKED, findings=[*_of_foreign(kernel, line)])
    events = engine.kprobe_events
    before = events.count
    engine.error_log.last = None
    try:
        events.write(line.text.encode("utf-8", "surrogateescape") + b"\n")
    except KernelError as error:
        settings.named(line.text)
        return _refused(kernel, engine, line, error)
    if events.count <= before:
        return Answer(line, REMOVED)
    return _created(kernel, line, events.newest)


def _is_foreign(text: str, kernel: PlannedKernel) -> bool:
    """Return True if a line defines an event of another kind than kprobes, such as a uprobe.

    Return False if the kernel lacks events of this kind. Uprobes are not looked for: each kernel counts as
    having them.
    """
    found = DEFINITION.match(text)
    if found is None:
        return False
    kind = found["kind"]
    if kind in _OTHER_KINDS:
        rule, function = _OTHER_KINDS[kind]
        return (rule is None or rule in kernel.interface) and kernel.has_feature(function)
    # Linux: a place with "/" and ":" is a uprobe's, and an offset follows the last ":".
    place = found["rest"].split(maxsplit=1)[0] if found["rest"] else ""
    return kind in "pr" and "/" in place and place.rpartition(":")[2][:1].isdigit()


def _of_foreign(kernel: PlannedKernel, line: Line) -> Iterator[Finding]:
    """Yield warnings about a line that defines an event of another kind; see _is_foreign().

    The fetch arguments of fprobe events and tracepoint events are checked, those of other kinds are not.
    """
    yield from _no_place(line)
    words = argv_split(line.text)
    if len(words) < 2 or line.text[0] not in "ft":
        return
    name = words[1].partition("%")[0]
    is_point = line.text[0] == "t"
    count = None
    with suppress(KernelError):
        if kernel.btf is not None:
            # The first parameter of a tracepoint's stub is the data of its user.
            found = prototype(kernel.btf, f"{_STUB}{name}" if is_point else name)
            count = found.words(kernel.whole.judge.arch.word_size)
    yield from _no_parameter(line, name, count, int(is_point))


def _refused(kernel: PlannedKernel, engine: OfflineEngine, line: Line, error: KernelError) -> Answer:
    number = error.name
    logged = engine.error_log.last
    if logged is None:
        found = DEFINITION.match(line.text)
        why = error.strerror
        if not is_definition(line.text):
            why = advice(line.text) or NOT_A_LINE
        elif found is not None and found["kind"] not in "prj":
            why = f"this kernel has no events of kind {found['kind']}"
        message = f"{number}: {why}"
        return Answer(line, number, findings=[Finding(number, True, message)])
    rule = logged.error.name
    message = f"{number}: {logged.text}{_hint(kernel, line, rule, error)}"
    column = _column(line.text, logged.column)
    return Answer(line, number, findings=[Finding(rule, True, message, column)])


def _hint(kernel: PlannedKernel, line: Line, rule: str, error: KernelError) -> str:
    """Return a hint to append to an error's message, or "" if there is no hint.

    `rule`: name of the rule that the line has violated. Examples of hints: advice about a missing place, the
    addresses of an ambiguous symbol, symbols similar to an unknown one.
    """
    if remedy := advice(line.text):
        return f"; {remedy}"
    words = argv_split(line.text)
    is_at_return = line.text.startswith("r") or any("%return" in word for word in words[1:2])
    if rule == ProbeError.BAD_VAR.name and is_at_return and _PARAMETER.search(line.text):
        has = InterfaceRule.ENTRY_ARGS in kernel.interface
        return "" if has else f"; Linux has $argN at a return since {InterfaceRule.ENTRY_ARGS.since}"
    if rule == ProbeError.BAD_STRING.name and re.search(r"\+u[^\s]*\[\d+\]", line.text):
        return "; an array has no +u: write +0(...), which also reads the memory of the user"
    place = words[1] if len(words) > 1 else ""
    symbol = re.split(r"[+%-]", place, maxsplit=1)[0]
    kallsyms = kernel.tables.kallsyms
    if rule == ProbeError.NON_UNIQ_SYMBOL.name:
        found = ", ".join(place_in_any_boot(each.address, kallsyms) for each in kallsyms.by_name(symbol))
        return f"; {symbol} is at {found}: give one of these places"
    module, colon, function = place.partition(":")
    if rule == ProbeError.BAD_PROBE_ADDR.name and colon and "-" in module:
        return f"; modules have _ in place of -: {module_name(module)}:{function}"
    if rule == ProbeError.BAD_PROBE_ADDR.name and colon:
        near = nearest_in_module(re.split(r"[+%]", place, maxsplit=1)[0], kernel.tables)
        return similar_names_hint(near)
    if rule == ProbeError.BAD_PROBE_ADDR.name and symbol and not kallsyms.count_name(symbol):
        near = nearest_symbols(symbol, kallsyms)
        known = similar_names_hint(near)
        of_module = f"; for a module's function, write MODULE:{symbol}"
        return known if kernel.image is None else known + of_module
    if rule in (ProbeError.BAD_INSN_BNDRY.name, ProbeError.FAIL_REG_PROBE.name):
        return f" ({error.strerror})"
    return ""


def _created(kernel: PlannedKernel, line: Line, probe: TraceKprobe) -> Answer:
    found = [*_cut_name(line, probe), *_no_place(line)]
    where = kernel.tables.kallsyms.lookup(probe.address) if probe.address else None
    if where is None:
        module = probe.symbol.partition(":")[0]
        text = f"waits for module {module}"
        if not module:
            text = "waits for a module with an empty name; no such module can be loaded"
        return Answer(line, PENDING, text, found)
    found += _other_function(kernel, line, probe, where)
    explained = Explanation(kernel, Place(line.text, where, ()), kernel.whole)
    verdict = explained.verdict
    found += _no_parameter(line, where.name, explained.argument_words)
    found += _not_unique(kernel, line, probe)
    if probe.place.symbol is None and kernel.has_linked_addresses:
        steady = place_in_any_boot(probe.address, kernel.tables.kallsyms)
        message = f"with KASLR, this address is another place at each boot; give {steady}"
        found.append(Finding("boot-address", False, message, word_column(line.text, 1)))
    reads = []
    for reading in readings(kernel, line, probe, explained):
        read, warning = follow(kernel, reading)
        reads.append(read)
        found += [warning] if warning is not None else []
    if probe.place.is_return and explained.never_returns:
        message = f"{where.name} never returns, so the probe is never hit"
        found.append(Finding("never-returns", False, message, word_column(line.text, 1)))
    if explained.clones:
        message = calls_of_clones(where.symbol.name, explained.clones)
        found.append(Finding("other-calls", False, message, word_column(line.text, 1)))
    if verdict.outcome is ProbeOutcome.BREAKPOINT and not kernel.records_breakpoints:
        found.append(Finding("no-records", False, ONLY_COUNTED, word_column(line.text, 1)))
    if explained.is_unguarded:
        found.append(Finding("patched-by-ftrace", False, UNGUARDED, word_column(line.text, 1)))
    replaced = explained.region
    region = range(0) if replaced is None else range(replaced.addr, replaced.end)
    kind = explained.breakpoint_kind
    shown = None if kind is None else kind.value
    answer = Answer(line, verdict.outcome.value, explained.reason, found, region, shown)
    answer.address = probe.address
    answer.traps_at_return = probe.place.is_return and kernel.traps_at_return
    answer.probe = probe
    answer.reads = reads
    if probe.place.offset or probe.place.symbol is None:
        answer.insn = explained.insn_text
    if explained.extended is not None:
        answer.extended = explained.extended.outcome.value
        answer.extended_reason = explained.extended_reason
    return answer


def _find_taken_jumps(answers: Sequence[Answer]) -> None:
    """Set the outcome of each probe to a breakpoint if its jump would cover the probe of another line.

    Add a warning to the answers to both lines.
    Mirrors: arch/x86/kernel/kprobes/opt.c:arch_check_optimized_kprobe (v6.1).
    """
    for answer in answers:
        inside = range(answer.region.start + 1, answer.region.stop)
        other = next((each for each in answers if each.address in inside), None)
        if other is None:
            continue
        answer.outcome = ProbeOutcome.BREAKPOINT.value
        answer.reason = f"the jump would cover the probe of line {other.line.number}"
        message = f"this probe prevents the jump of the probe of line {answer.line.number}"
        answer.findings.append(Finding("takes-jump", False, answer.reason))
        other.findings.append(Finding("takes-jump", False, message))


# Warnings


def _no_place(line: Line) -> Iterator[Finding]:
    if remedy := advice(line.text):
        yield Finding("no-place", False, remedy, word_column(line.text, 1))


def _other_function(
    kernel: PlannedKernel, line: Line, probe: TraceKprobe, where: Location
) -> Iterator[Finding]:
    """Yield a warning if the offset leads out of the function that the line names.

    `where`: symbol and offset of the probe's address.
    """
    passed = passed_symbol(probe.place.symbol or "", where, kernel.tables.kallsyms)
    if passed is not None:
        message = f"the place is outside of {passed.name}, which has {passed.size} bytes: {where}"
        yield Finding("other-function", False, message, word_column(line.text, 1))


def _not_unique(kernel: PlannedKernel, line: Line, probe: TraceKprobe) -> Iterator[Finding]:
    """Yield a warning if a symbol names several functions, of which the kernel takes the first."""
    kallsyms = kernel.tables.kallsyms
    symbols = kallsyms.by_name(probe.place.symbol or "")
    if len(symbols) > 1:
        places = ", ".join(place_in_any_boot(each.address, kallsyms) for each in symbols)
        message = f"{probe.place.symbol} is at {places}, and this kernel probes only the first of them"
        yield Finding("not-unique", False, message, word_column(line.text, 1))


def _cut_name(line: Line, probe: TraceKprobe) -> Iterator[Finding]:
    head = argv_split(line.text)[0]
    name = head.partition(":")[2].rpartition("/")[2]
    if name or len(probe.event.name) < MAX_EVENT_NAME_LEN - 1:
        return
    message = f"the event is named {probe.event.name}, which is cut; name it"
    yield Finding("name-cut", False, message, 0)


def _no_parameter(line: Line, name: str, count: int | None, hidden: int = 0) -> Iterator[Finding]:
    """Yield warnings about each $argN in `line` that may not be parameter N of the function `name`.

    `count`: number of words that the parameters take; None if it is unknown. `hidden`: how many parameters at
    the start $argN does not count (1 for a tracepoint's stub, otherwise 0).
    """
    if why := changed_parameters(name):
        for number, word in enumerate(argv_split(line.text)[2:], 2):
            if _PARAMETER.search(word):
                message = f"{name}: {why}"
                yield Finding("changed-parameters", False, message, word_column(line.text, number))
    if count is None:
        return
    has = f"has {count - hidden} parameter{'s' * (count - hidden != 1)}"
    for number, word in enumerate(argv_split(line.text)[2:], 2):
        for found in _PARAMETER.finditer(word):
            if int(found[1]) > count - hidden:
                message = f"{found[0]} is no parameter: {name} {has}, so the value is undefined"
                yield Finding("no-parameter", False, message, word_column(line.text, number))


# Columns


def _column(text: str, column: int) -> int:
    """Convert a column in error_log's copy of a command to the column in the text of the line.

    The copy has one blank between two words. Both columns count from 0.
    """
    for number, word in enumerate(argv_split(text)):
        if column <= len(word):
            return word_column(text, number) + column
        column -= len(word) + 1
    return len(text)
