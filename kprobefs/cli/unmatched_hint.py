"""A hint at the end of `kprobefs run`: why the histogram of a synthetic event is empty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from emulated_kernel.util.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    from kprobefs.cli.nothing_hint import Past
    from kprobefs.cli.past_hists import PastHist

HINT = "the histogram of {event} is empty: {why}"
NO_FIRST_HIT = "{first} had no hit that sets a variable"
NO_HIT = "{last} had no hit"
NO_MATCH = "no hit of {last} found a variable that {first} had set for the same key ({keys})"
HINT_LINE = lazy_pattern(r"kprobefs: the histogram of \w+ is empty: .*")
"""Pattern of the line with a hint that `run` prints."""
_KEYS = lazy_pattern(r"\bkeys=([^:]+)")


def unmatched(past: Past) -> Iterator[str]:
    """Yield a hint for each synthetic event in `past` whose histograms are empty in all trace arrays.

    Only synthetic events that hist triggers with onmatch() generate are examined. There is no hint for an
    event if the reason is unknown for at least one of its triggers, for example because the trigger has
    counted a hit.
    """
    if past.has_forgotten_hists:
        return
    hits: Counter[str] = Counter()
    for hist in past.hists:
        hits[hist.synthetic] += hist.hits
    for event in hits:
        if event and not hits[event]:
            causes = re.compile(rf"\bonmatch\((\w+)\.(\w+)\)\.(?:trace\()?{event}\b")
            found = [(hist, cause) for hist in past.hists if (cause := causes.search(hist.trigger))]
            reasons = [_why(past, hist, f"{cause[1]}/{cause[2]}") for hist, cause in found]
            if reasons and all(reasons):
                yield HINT.format(event=event, why=reasons[0])


def _why(past: Past, last: PastHist, first: str) -> str:
    """Return the reason why a hist trigger has not generated its synthetic event; "" if it is unknown.

    `last`: histogram whose trigger generates the synthetic event when the keys match. `first`: event, as
    GROUP/EVENT, whose hist trigger sets the variables that `last` needs.
    """
    setting = [hist.hits for hist in past.hists if (hist.array, hist.event) == (last.array, first)]
    first_name, last_name = (event.partition("/")[2] for event in (first, last.event))
    # Linux does not count hits that miss a variable.
    if last.hits or not setting:
        return ""
    if not any(setting):
        return NO_FIRST_HIT.format(first=first_name)
    if any(event.event == last.event and not event.hits for event in past.events):
        return NO_HIT.format(last=last_name)
    keys = _KEYS.search(last.trigger)
    return NO_MATCH.format(last=last_name, first=first_name, keys=keys[1] if keys else "")
