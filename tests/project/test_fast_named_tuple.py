"""NamedTuple of emulated_kernel, compared with typing.NamedTuple."""

from __future__ import annotations

import copy
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.util.fast_named_tuple import NamedTuple


class Span(NamedTuple):
    """A range of addresses."""

    start: int
    size: int = 8
    name: str = "span"

    @property
    def end(self) -> int:
        return self.start + self.size

    def __str__(self) -> str:
        return f"{super().__str__()} to {self.end}"


class LibrarySpan(typing.NamedTuple):
    """A range of addresses."""

    start: int
    size: int = 8
    name: str = "span"


class Nothing(NamedTuple):
    """A tuple without items."""


def test_objects_behave_as_those_of_the_library() -> None:
    ours = Span(3, name="text")
    library = LibrarySpan(3, name="text")
    assert tuple(ours) == library == (3, 8, "text")
    assert hash(ours) == hash(library)
    assert repr(ours) == repr(library).removeprefix("Library")
    assert tuple(ours._replace(size=1)) == library._replace(size=1)
    assert ours._asdict() == library._asdict()
    assert tuple(Span._make([1, 2, "x"])) == LibrarySpan._make([1, 2, "x"])
    assert (ours.start, ours.size, ours.name) == tuple(ours)
    assert tuple(Nothing()) == ()
    assert repr(Nothing()) == "Nothing()"


def test_classes_have_the_attributes_of_the_library() -> None:
    for name in ("_fields", "_field_defaults", "__match_args__", "__doc__", "__module__"):
        assert getattr(Span, name) == getattr(LibrarySpan, name)
    assert typing.get_type_hints(Span) == typing.get_type_hints(LibrarySpan)
    assert Span.__qualname__ == "Span"


def test_methods_of_the_class_are_kept() -> None:
    assert Span(4).end == 12
    assert str(Span(4)) == "Span(start=4, size=8, name='span') to 12"


def test_patterns_match_by_position() -> None:
    match Span(5, 6):
        case Span(start, size):
            assert (start, size) == (5, 6)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_equal(copied: Callable[[Span], Span]) -> None:
    assert copied(Span(1, 2)) == Span(1, 2)
    assert type(copied(Span(1, 2))) is Span


@pytest.mark.parametrize(
    "wrong",
    [
        lambda of: of(),
        lambda of: of(1, 2, "x", 4),
        lambda of: of(1, start=2),
        lambda of: of(1, other=2),
        lambda of: of._make([1]),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[Any], object]) -> None:
    for each in (Span, LibrarySpan):
        with pytest.raises(TypeError):
            wrong(each)


def test_unknown_names_are_refused() -> None:
    given: Any
    for given in (Span(1), LibrarySpan(1)):
        with pytest.raises(ValueError, match="unexpected field names"):
            given._replace(other=2)
        with pytest.raises(AttributeError):
            given.other = 2


def test_a_default_before_a_field_without_one_is_refused() -> None:
    for module in ("typing", "emulated_kernel.util.fast_named_tuple"):
        text = f"from {module} import NamedTuple\nclass Wrong(NamedTuple):\n first: int = 1\n second: int\n"
        with pytest.raises(TypeError, match="default"):
            exec(text, {"__name__": __name__})
