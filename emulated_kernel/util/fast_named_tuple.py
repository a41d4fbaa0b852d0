"""NamedTuple, which creates a class in a quarter of the time that typing.NamedTuple needs.

The purpose is a faster start-up. typing.NamedTuple creates an object for each annotation, and compiles a
function for each class.
"""

from __future__ import annotations

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False

__all__ = ["NamedTuple"]

if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from collections import _tuplegetter
    from functools import cache
    from types import FunctionType

    class _Methods(tuple):
        """The methods that collections.namedtuple() gives to a class."""

        __slots__ = ()

        @classmethod
        def _make(cls, values):
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **changes):
            made = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {list(changes)!r}")
            return made

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            shown = (f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({', '.join(shown)})"

        def __getnewargs__(self):
            return tuple(self)

    class _Maker(type):
        """Metaclass of NamedTuple: turns a declared subclass into a class of the metaclass `type`."""

        def __new__(maker, name, bases, body):
            if not bases:
                return super().__new__(maker, name, bases, body)
            fields = tuple(body.get("__annotations__", ()))
            defaults = {field: body.pop(field) for field in fields if field in body}
            if tuple(defaults) != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name}: a field without a default is after a field with a default")
            members = {field: _tuplegetter(at, None) for at, field in enumerate(fields)}
            facts = {"_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
            new = _new(fields, tuple(defaults.values()), f"{name}.__new__")
            return type(name, (_Methods,), {"__slots__": (), "__new__": new, **facts, **members, **body})

    def _new(fields, defaults, name):
        """Return the __new__ of a class; its qualified name is `name`.

        `fields`: names of the fields. `defaults`: defaults of the last fields. All classes with the same
        number of fields share a template.
        """
        template = _template(len(fields))
        code = template.replace(co_varnames=("cls", *fields), co_qualname=name)
        return FunctionType(code, {"new": tuple.__new__}, "__new__", defaults)

    @cache
    def _template(count):
        values = "".join(f"a{number}, " for number in range(count))
        text = f"lambda cls, {values}: new(cls, ({values}))"
        return compile(text, "<named tuple>", "eval").co_consts[0]

    class NamedTuple(metaclass=_Maker):
        """Base class in declarations of named tuples, like typing.NamedTuple."""
