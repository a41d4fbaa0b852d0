"""Views of trace events that live as long as what they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from emulated_kernel.trace.event import TraceEvent

E = TypeVar("E", bound=TraceEvent)
V = TypeVar("V")

_FEW = 64


class EventViews(Generic[E, V]):
    """The same view for the same event; those of removed events are forgotten now and then."""

    def __init__(self, make: Callable[[E], V]) -> None:
        self._make = make
        self._views: dict[E, V] = {}
        self._limit = _FEW

    def of(self, event: E) -> V:
        """The event's view, made when first asked for."""
        view = self._views.get(event)
        if view is None:
            self._forget_removed()
            view = self._views[event] = self._make(event)
        return view

    def _forget_removed(self) -> None:
        if len(self._views) < self._limit:
            return
        self._views = {event: view for event, view in self._views.items() if not event.is_removed}
        self._limit = max(_FEW, 2 * len(self._views))
