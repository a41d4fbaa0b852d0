"""dataclass(), which creates a class in a fraction of the time that the standard library needs.

The purpose is a faster start-up. A class gets its `__init__` when its first object is created. For most
classes, a mount never creates an object. The standard library's `dataclasses` imports inspect and ast. So
this module imports `dataclasses` only when one of that module's functions is called. Those functions accept
the classes made here, too. ADDRESS is for fields whose values a repr shows in hexadecimal, and immutable() is
for public value objects.
"""

from __future__ import annotations

import sys

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _T = TypeVar("_T")

__all__ = ["ADDRESS", "asdict", "dataclass", "field", "fields", "immutable", "replace"]


def show_address(value: object) -> str:
    """Return an address, or a tuple of addresses, in hexadecimal; return repr() of any other value."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show_address, value))}{',' if len(value) == 1 else ''})"
    return hex(value) if isinstance(value, int) else repr(value)


ADDRESS = {"repr": show_address}
"""Metadata of a field: a guest address, which the repr of its object shows in hexadecimal."""


def immutable(made: type[_T]) -> type[_T]:
    """Make the objects of the frozen dataclass `made` refuse assignments, and return `made`.

    `made` must have no slots. Its `__init__` assigns each field once; further assignments raise
    FrozenInstanceError. Unlike in the standard library, no code is compiled for each class.
    """
    names = frozenset(each.name for each in fields(made))  # type: ignore[arg-type]

    def assign(self: Any, name: str, value: object) -> None:
        values = self.__dict__
        if name in values or name not in names:
            raise _frozen(f"cannot assign to field {name!r}")
        values[name] = value

    def delete(_self: Any, name: str) -> None:
        raise _frozen(f"cannot delete field {name!r}")

    made.__setattr__ = assign  # type: ignore[method-assign]
    made.__delattr__ = delete  # type: ignore[method-assign]
    return made


def _frozen(message: str) -> Exception:
    from dataclasses import FrozenInstanceError

    return FrozenInstanceError(message)


if TYPE_CHECKING:
    from dataclasses import asdict, dataclass, field, fields, replace
else:
    from functools import cache
    from operator import attrgetter
    from reprlib import recursive_repr
    from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType

    _MISSING = object()
    """Marker in place of a default that a field does not have."""
    _NO_METADATA = MappingProxyType({})

    class _Factory:
        """Class of the marker _FACTORY: the default of a parameter whose field has a default_factory."""

        __slots__ = ()

        def __repr__(self):
            return "<factory>"

    _FACTORY = _Factory()

    class Field:
        """A field of a dataclass, with the attributes of the standard library's class."""

        __slots__ = (
            "compare",
            "default",
            "default_factory",
            "hash",
            "init",
            "kw_only",
            "metadata",
            "name",
            "repr",
            "type",
        )

        def __init__(self, default, default_factory, init, repr, hash, compare, metadata, kw_only):
            self.default = default
            self.default_factory = default_factory
            self.init = init
            self.repr = repr
            self.hash = hash
            self.compare = compare
            self.metadata = metadata
            self.kw_only = kw_only

        @property
        def has_default(self):
            return self.default is not _MISSING or self.default_factory is not _MISSING

    def field(
        *,
        default=_MISSING,
        default_factory=_MISSING,
        init=True,
        repr=True,
        hash=None,
        compare=True,
        metadata=_NO_METADATA,
        kw_only=False,
    ):
        """Return the description of a field; the arguments are those of the standard library's function."""
        return Field(default, default_factory, init, repr, hash, compare, metadata, kw_only)

    def fields(made):
        """Return the fields of `made`, a dataclass or an object of a dataclass."""
        return made.__fields__

    def replace(made, /, **changes):
        """Return a new object of the dataclass with the values of `made`, except for `changes`."""
        for each in made.__fields__:
            if not each.init:
                if each.name in changes:
                    raise ValueError(f"field {each.name} is declared with init=False")
            elif each.name not in changes:
                changes[each.name] = getattr(made, each.name)
        return made.__class__(**changes)

    def asdict(made):
        """Return field name -> value for the fields of an object.

        Containers are copied. Nested dataclass objects become dicts.
        """
        return {each.name: _copied(getattr(made, each.name)) for each in made.__fields__}

    def _copied(value):
        if hasattr(type(value), "__fields__"):
            return asdict(value)
        if isinstance(value, dict):
            return {_copied(key): _copied(each) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(_copied, value))
        return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value

    def dataclass(
        made=None, /, *, frozen=False, eq=True, repr=True, slots=False, weakref_slot=False, **unsupported
    ):
        """Create a dataclass as the standard library does; most classes share compiled code.

        Deviates: only mypy checks `frozen`, so that frozen objects are created as fast as mutable ones.
        immutable() adds the check at run time.
        Raises: TypeError (unsupported options, fields without a default after fields with one).
        """
        if unsupported:
            raise TypeError(f"dataclass() of emulated_kernel has no {', '.join(sorted(unsupported))}")

        def make(plain):
            own = vars(plain)
            has_repr = "__repr__" in own
            has_eq = "__eq__" in own
            # Python sets __hash__ to None in a class that defines __eq__; that isn't an explicit choice.
            has_hash = own.get("__hash__") is not None or ("__hash__" in own and not has_eq)
            own_fields = _own_fields(plain)
            inherited = {each.name: each for base in plain.__mro__[:0:-1] for each in _fields_of(base)}
            every = tuple({**inherited, **own_fields}.values())
            made = _with_slots(plain, own_fields, inherited, weakref_slot) if slots else plain
            made.__fields__ = every
            made.__dataclass_fields__ = _LIBRARY_FIELDS
            made.__dataclass_params__ = _LIBRARY_PARAMS
            positional = [each for each in every if each.init and not each.kw_only]
            made.__match_args__ = tuple([each.name for each in positional])
            if "__init__" not in own:
                _check_order(made, positional)
                made.__init__ = _FirstInit(made, every, slots)
            if repr and not has_repr:
                made.__repr__ = _repr
            if eq:
                if any(each.hash is not None for each in every):
                    raise TypeError("dataclass() of emulated_kernel has no field(hash=)")
                key = _key([each.name for each in every if each.compare])
                if not has_eq:
                    made.__eq__ = _eq(key)
                if not has_hash:
                    made.__hash__ = _hash(key) if frozen else None
            return made

        return make if made is None else make(made)

    def _own_fields(plain):
        """Return name -> field for the fields that the class `plain` declares.

        If a class attribute is a Field, replace it by the field's default, or delete it if the field has no
        default.
        """
        found = {}
        for name, annotation in plain.__annotations__.items():
            if _is_class_variable(annotation):
                continue
            given = vars(plain).get(name, _MISSING)
            if type(given) is Field:
                each = given
            elif (library := sys.modules.get("dataclasses")) and isinstance(given, library.Field):
                each = _of_library(given, library.MISSING)
            else:
                default = _MISSING if isinstance(given, MemberDescriptorType) else given
                each = Field(default, _MISSING, True, True, None, True, _NO_METADATA, False)
            if each.default.__class__.__hash__ is None:
                raise ValueError(
                    f"mutable default {type(each.default)} for field {name}: use default_factory"
                )
            each.name = name
            each.type = annotation
            if (
                given is not _MISSING
                and each.default is not given
                and not isinstance(given, MemberDescriptorType)
            ):
                if each.default is _MISSING:
                    delattr(plain, name)
                else:
                    setattr(plain, name, each.default)
            found[name] = each
        return found

    def _is_class_variable(annotation):
        """Return True if an annotation is ClassVar.

        Raises: TypeError (the annotation is InitVar or KW_ONLY).
        """
        text = annotation if isinstance(annotation, str) else str(annotation)
        # Most annotations need no closer look.
        if "Var" not in text and "KW_ONLY" not in text:
            return False
        kind = text.partition("[")[0].rpartition(".")[2]
        if kind in ("InitVar", "KW_ONLY"):
            raise TypeError(f"dataclass() of emulated_kernel has no {kind}")
        return kind == "ClassVar"

    def _of_library(given, missing):
        default, factory = (
            _MISSING if each is missing else each for each in (given.default, given.default_factory)
        )
        return field(
            default=default,
            default_factory=factory,
            init=given.init,
            repr=given.repr,
            hash=given.hash,
            compare=given.compare,
            metadata=given.metadata,
            kw_only=given.kw_only is True,
        )

    def _fields_of(base):
        own = vars(base)
        if "__dataclass_fields__" in own and "__fields__" not in own:
            raise TypeError(f"dataclass() of emulated_kernel: {base.__name__} is a class of the library's")
        return own.get("__fields__", ())

    def _with_slots(plain, own_fields, inherited, weakref_slot):
        """Return a class like `plain` with slots for its own fields, except fields in `inherited`.

        `weakref_slot`: whether objects of the class can have weak references.
        Raises: TypeError (the class has slots already).
        """
        body = dict(vars(plain))
        if "__slots__" in body:
            raise TypeError(f"{plain.__name__} already specifies __slots__")
        names = tuple(name for name in own_fields if name not in inherited)
        if weakref_slot and not plain.__base__.__weakrefoffset__:
            names += ("__weakref__",)
        for name in own_fields:
            body.pop(name, None)
        body.pop("__dict__", None)
        body.pop("__weakref__", None)
        body["__slots__"] = names
        made = type(plain)(plain.__name__, plain.__bases__, body)
        made.__qualname__ = plain.__qualname__
        return made

    def _check_order(made, positional):
        """Raise TypeError if, in `positional`, a field without a default is after one with a default.

        `made`: the class, for the message. `positional`: its fields that are positional parameters.
        """
        has_default = False
        for each in positional:
            if each.has_default:
                has_default = True
            elif has_default:
                raise TypeError(f"{made.__name__}: a field without a default is after a field with a default")

    class _FirstInit:
        """Stand-in for the `__init__` of a new class: its first read creates the function in its place."""

        __slots__ = ("_every", "_made", "_slots")

        def __init__(self, made, every, slots):
            self._made = made
            self._every = every
            self._slots = slots

        def __get__(self, instance, owner):
            init = _init(self._made, self._every, self._slots)
            self._made.__init__ = init
            return init if instance is None else init.__get__(instance)

    def _init(made, every, slots):
        """Return the __init__ of the class `made`, whose fields are `every`.

        `slots`: whether the class has slots. The code is a copy of a template with other names. All classes
        whose fields have the same kinds share the template.
        """
        kinds = "".join(_kind(each, slots) for each in every)
        parameters = [each for each in every if each.init]
        positional = [each for each in parameters if not each.kw_only]
        keywords = [each for each in parameters if each.kw_only]
        template = _template(kinds, hasattr(made, "__post_init__"))
        # The template assigns the fields in their order, and calls __post_init__() last.
        assigned = [each.name for each, kind in zip(every, kinds, strict=True) if kind != "-"]
        code = template.replace(
            co_names=(*assigned, *template.co_names[len(assigned) :]),
            co_varnames=("self", *[each.name for each in positional], *[each.name for each in keywords]),
        )
        init = FunctionType(
            code,
            vars(sys.modules[made.__module__]) if made.__module__ in sys.modules else {},
            "__init__",
            tuple(_default(each) for each in positional if each.has_default),
            tuple(CellType(_free_variable(name, every)) for name in code.co_freevars),
        )
        init.__kwdefaults__ = {each.name: _default(each) for each in keywords if each.has_default}
        init.__annotations__ = {each.name: each.type for each in parameters} | {"return": None}
        init.__qualname__ = f"{made.__qualname__}.__init__"
        init.__module__ = made.__module__
        return init

    def _kind(each, slots):
        """Return a letter for the way in which __init__ sets the field `each`.

        `slots`: whether the class has slots. p: the field gets the value of a positional parameter. k: the
        field gets the value of a keyword-only parameter. P, K: as p and k, but if the parameter is left
        out, the factory makes the value. f: the factory makes the value. d: the field gets its default. -:
        __init__ does not set the field.
        """
        has_factory = each.default_factory is not _MISSING
        if each.init:
            kind = "k" if each.kw_only else "p"
            return kind.upper() if has_factory else kind
        if has_factory:
            return "f"
        return "d" if slots and each.default is not _MISSING else "-"

    def _free_variable(name, every):
        """Return the value of a free variable of a template's code.

        `name` is FACTORY or vN. The value of FACTORY is the marker _FACTORY. The value of vN is the default
        or the default_factory of the field every[N].
        """
        if name == "FACTORY":
            return _FACTORY
        each = every[int(name[1:])]
        return each.default if each.default_factory is _MISSING else each.default_factory

    def _default(each):
        return each.default if each.default_factory is _MISSING else _FACTORY

    @cache
    def _template(kinds, has_post_init):
        """Return the code of an __init__ for fields a0, a1, ... of the `kinds`; see _kind().

        The cells v0, v1, ... of the code's closure hold the defaults and factories of the fields.
        `has_post_init`: whether __init__ calls __post_init__().
        """
        positional = [f"a{number}" for number, kind in enumerate(kinds) if kind in "pP"]
        keywords = [f"a{number}" for number, kind in enumerate(kinds) if kind in "kK"]
        statements = {
            "p": "self.a{0} = a{0}",
            "P": "self.a{0} = v{0}() if a{0} is FACTORY else a{0}",
            "f": "self.a{0} = v{0}()",
            "d": "self.a{0} = v{0}",
            "-": "pass",
        }
        statements |= {"k": statements["p"], "K": statements["P"]}
        body = [statements[kind].format(number) for number, kind in enumerate(kinds)]
        if has_post_init:
            body.append("self.__post_init__()")
        inputs = ", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])
        cells = ", ".join(["FACTORY", *(f"v{number}" for number, kind in enumerate(kinds) if kind in "PKfd")])
        inner = f"def __init__({inputs}):\n  {'; '.join(body or ['pass'])}"
        text = f"def outer({cells}):\n {inner}\n return __init__"
        outer = compile(text, "<dataclass>", "exec").co_consts[0]
        return next(each for each in outer.co_consts if hasattr(each, "co_code"))

    class _LibraryAttribute:
        """A class attribute that the standard library's functions need. The first read creates its value."""

        def __init__(self, name):
            self._name = name

        def __get__(self, made, owner):
            import dataclasses

            described = [(each.name, each.type, _for_library(each, dataclasses)) for each in owner.__fields__]
            found = getattr(dataclasses.make_dataclass(owner.__name__, described), self._name)
            if "__fields__" in vars(owner):
                setattr(owner, self._name, found)
            return found

    _LIBRARY_FIELDS = _LibraryAttribute("__dataclass_fields__")
    _LIBRARY_PARAMS = _LibraryAttribute("__dataclass_params__")

    def _for_library(each, library):
        given = {
            name: getattr(each, name) for name in ("init", "repr", "hash", "compare", "metadata", "kw_only")
        }
        if each.default is not _MISSING:
            given["default"] = each.default
        if each.default_factory is not _MISSING:
            given["default_factory"] = each.default_factory
        return library.field(**given)

    @recursive_repr()
    def _repr(self):
        shown = (each for each in self.__fields__ if each.repr)
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
