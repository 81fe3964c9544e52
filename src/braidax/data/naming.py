"""The names of classes, of which the samples of a source have the numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from braidax.data.leaves import listed
from braidax.data.source import Source
from braidax.errors import ArgumentError


@runtime_checkable
class Named(Protocol):
    """A source that knows the names of its classes, or that they are lost."""

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """By leaf of class numbers, the name of each number from 0 on."""
        ...


def class_names(source: Source, leaf: str = "label") -> list[str]:
    """Returns the names of the classes that a leaf numbers: of an image folder in their order, of CIFAR as it has them.

    Slices, parts, filters, and sources whose images are decoded, resized or augmented have those of the source inside.
    What `map`, `mapped` and `open(transform=)` have made has none, since its numbers may be others.

    **Arguments:** `source`: as `braidax.open` returns it, or made of such a one. `leaf`: of class numbers.

    **Returns:** a name for each number, from 0 on: `class_names(source)[label]`.

    **Raises:** `ArgumentError` for a leaf that has no names.
    """
    spec = source.sample_spec
    there = list(spec) if isinstance(spec, Mapping) else []
    found = _names(source) if leaf in there else {}
    if leaf not in found:
        named = [name for name in there if name in _names(source)]
        raise ArgumentError(
            f"leaf={leaf!r}: samples have the leaves {listed(there)}, and {named or 'none'} with names; expected one "
            "of an image folder with a folder for each class, or of CIFAR: ask the source that was opened, before "
            "map, mapped or transform="
        )
    return list(found[leaf])


def _names(source: Any) -> Mapping[str, Sequence[str]]:
    if isinstance(source, Named):
        return source.class_names
    inside = [one for one in (getattr(source, "source", None), *getattr(source, "sources", ())) if one is not None]
    found = [_names(one) for one in inside if isinstance(one, Source)]
    if not found:
        return {}
    first = {leaf: list(names) for leaf, names in found[0].items()}
    return {leaf: names for leaf, names in first.items() if all(list(one.get(leaf, ())) == names for one in found)}
