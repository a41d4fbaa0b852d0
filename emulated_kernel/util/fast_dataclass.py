"""dataclass() that makes classes six times as fast as the standard library's: start-up makes 200 of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    _REFUSED = {"order", "unsafe_hash"}

    def dataclass(made=None, /, *, frozen=False, eq=True, repr=True, **options):
        """Make a dataclass like the standard library's, but compile one function per class, not six.

        Deviates: only mypy enforces `frozen`, so that creating an object costs no more than without it.

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
        shown = (each.name for each in dataclasses.fields(self) if each.repr)
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({values})"

    def _key(names):
        """Return a function that returns the values of these fields, which equality and hash use."""
        return attrgetter(*names) if names else lambda _: ()

    def _eq(key):
        def __eq__(self, other):
            return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash(key):
        def __hash__(self):
            return hash(key(self))

        return __hash__
