"""Errors of histogram triggers, as error_log shows them."""

from __future__ import annotations

from emulated_kernel.trace.text.error_log import CommandError


class HistError(CommandError):
    """Errors of histogram triggers.

    Mirrors: kernel/trace/trace_events_hist.c:ERRORS (v6.1, v6.12).
    """

    DUPLICATE_VAR = "Variable already defined"
    VAR_NOT_UNIQUE = (
        "Variable name not unique, need to use fully qualified name (subsys.event.var) for variable"
    )
    TOO_MANY_VARS = "Too many variables defined"
    MALFORMED_ASSIGNMENT = "Malformed assignment"
    NAMED_MISMATCH = "Named hist trigger doesn't match existing named trigger (includes variables)"
    TRIGGER_EEXIST = "Hist trigger already exists"
    TRIGGER_ENOENT_CLEAR = "Can't clear or continue a nonexistent hist trigger"
    SET_CLOCK_FAIL = "Couldn't set trace_clock"
    BAD_FIELD_MODIFIER = "Invalid field modifier"
    TOO_MANY_SUBEXPR = "Too many subexpressions (3 max)"
    TIMESTAMP_MISMATCH = "Timestamp units in expression don't match"
    TOO_MANY_FIELD_VARS = "Too many field variables defined"
    EVENT_FILE_NOT_FOUND = "Event file not found"
    HIST_NOT_FOUND = "Matching event histogram not found"
    HIST_CREATE_FAIL = "Couldn't create histogram for field"
    SYNTH_VAR_NOT_FOUND = "Couldn't find synthetic variable"
    SYNTH_EVENT_NOT_FOUND = "Couldn't find synthetic event"
    SYNTH_TYPE_MISMATCH = "Param type doesn't match synthetic event field type"
    SYNTH_COUNT_MISMATCH = "Param count doesn't match synthetic event field count"
    FIELD_VAR_PARSE_FAIL = "Couldn't parse field variable"
    VAR_CREATE_FIND_FAIL = "Couldn't create or find variable"
    ONX_NOT_VAR = "For onmax(x) or onchange(x), x must be a variable"
    ONX_VAR_NOT_FOUND = "Couldn't find onmax or onchange variable"
    ONX_VAR_CREATE_FAIL = "Couldn't create onmax or onchange variable"
    FIELD_VAR_CREATE_FAIL = "Couldn't create field variable"
    TOO_MANY_PARAMS = "Too many action params"
    INVALID_PARAM = "Invalid action param"
    PARAM_NOT_FOUND = "Couldn't find param"
    ACTION_NOT_FOUND = "No action found"
    TOO_MANY_SAVE_ACTIONS = "Can't have more than one save() action per hist"
    ACTION_MISMATCH = "Handler doesn't support action"
    NO_CLOSING_PAREN = "No closing paren found"
    SUBSYS_NOT_FOUND = "Missing subsystem"
    INVALID_SUBSYS_EVENT = "Invalid subsystem or event name"
    INVALID_REF_KEY = "Using variable references in keys not supported"
    VAR_NOT_FOUND = "Couldn't find variable"
    FIELD_NOT_FOUND = "Couldn't find field"
    EMPTY_ASSIGNMENT = "Empty assignment"
    INVALID_SORT_MODIFIER = "Invalid sort modifier"
    EMPTY_SORT_FIELD = "Empty sort field"
    TOO_MANY_SORT_FIELDS = "Too many sort fields (Max = 2)"
    INVALID_SORT_FIELD = "Sort field must be a key or a val"
    INVALID_STR_OPERAND = "String type can not be an operand in expression"
    NEED_NOHC_VAL = "Non-hitcount value is required for 'nohitcount'"
    EXPECT_NUMBER = "Expecting numeric literal"
    UNARY_MINUS_SUBEXPR = "Unary minus not supported in sub-expressions"
    DIVISION_BY_ZERO = "Division by zero"
