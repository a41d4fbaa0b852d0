"""dataclass(), which creates a class in a sixth of the standard library's time, for a faster start-up.

Also ADDRESS, for fields whose values a repr shows in hexadecimal, and immutable(), for public value objects.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["ADDRESS", "dataclass", "immutable"]


_T = TypeVar("_T")


def show_address(value: object) -> str:
    """Return an address, or a tuple of addresses, in hexadecimal; return repr() of any other value."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show_address, value))}{',' if len(value) == 1 else ''})"
    return hex(value) if isinstance(value, int) else repr(value)


ADDRESS = {"repr": show_address}
"""Metadata of a field: a guest address, which the repr of its object shows in hexadecimal."""


def immutable(made: type[_T]) -> type[_T]:
    """Make a frozen dataclass without slots refuse assignments at run time, as the standard library does.

    Each field can be assigned once, which `__init__` does. Unlike in the standard library, no code is
    compiled for each class.
    """
    names = frozenset(each.name for each in dataclasses.fields(made))  # type: ignore[arg-type]

    def assign(self: Any, name: str, value: object) -> None:
        values = self.__dict__
        if name in values or name not in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        values[name] = value

    def delete(_self: Any, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    made.__setattr__ = assign  # type: ignore[method-assign]
    made.__delattr__ = delete  # type: ignore[method-assign]
    return made


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from operator import attrgetter
    from reprlib import recursive_repr

    _REFUSED = {"order", "unsafe_hash"}

    def dataclass(made=None, /, *, frozen=False, eq=True, repr=True, **options):
        """Create a dataclass as the standard library does, but compile one function instead of six.

        Deviates: only mypy checks `frozen`, so that frozen objects are created as fast as mutable ones.
        immutable() adds the check at run time.

        Raises: TypeError (unsupported options).
        """
        refused = sorted(options.keys() & _REFUSED)
        if refused:
            raise TypeError(f"dataclass() of emulated_kernel has no {', '.join(refused)}")

        def make(plain):
            own = vars(plain)
            has_repr = "__repr__" in own
            has_eq = "__eq__" in own
            # Python sets __hash__ to None in a class that defines __eq__; that isn't an explicit choice.
            has_hash = own.get("__hash__") is not None or ("__hash__" in own and not has_eq)
            made = dataclasses.dataclass(plain, repr=False, eq=False, **options)
            if repr and not has_repr:
                made.__repr__ = _repr
            if eq:
                fields = dataclasses.fields(made)
                if any(each.hash is not None for each in fields):
                    raise TypeError("dataclass() of emulated_kernel has no field(hash=)")
                key = _key([each.name for each in fields if each.compare])
                if not has_eq:
                    made.__eq__ = _eq(key)
                if not has_hash:
                    made.__hash__ = _hash(key) if frozen else None
            return made

        return make if made is None else make(made)

    @recursive_repr()
    def _repr(self):
        shown = (each for each in dataclasses.fields(self) if each.repr)
        values = ", ".join(
            f"{each.name}={each.metadata.get('repr', repr)(getattr(self, each.name))}" for each in shown
        )
        return f"{type(self).__qualname__}({values})"

    def _key(names):
        """Return a function that maps an object to the values of its fields `names`, for comparisons."""
        return attrgetter(*names) if names else lambda _: ()

    def _eq(key):
        def __eq__(self, other):
            return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash(key):
        def __hash__(self):
            return hash(key(self))

        return __hash__
