"""What was saved in another form than it is wanted in, because a plan has changed since: how it comes back."""

import glob
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from braidax.checkpoint.format.manifest import Entry
from braidax.checkpoint.snapshot.leaves import leaves_of, saved_leaves

# JAX leaves some of itself unannotated.
_jax: Any = jax


@runtime_checkable
class Replanned(Protocol):
    """A node of a tree whose leaves depend on a plan, and which knows the way from those that another plan gave."""

    def saved_as(
        self, saved: Mapping[str, int | None], notes: Mapping[str, str]
    ) -> tuple[Any, Callable[[Any], Any], str] | str | None:
        """Returns the form in which this node was saved.

        **Arguments:** `saved`: the paths of the leaves that a checkpoint has below this node, each with its V if it is
        a table by rows, padded. `notes`: that were kept with it.

        **Returns:** such a node, with abstract arrays, what makes one of this form from it once it is restored, and
        in words what has changed; nothing has if these are empty, and then the way brings up what is put off, for those
        who restore a part. Words alone where there is no way, None where there is nothing to do.
        """
        ...


class Way(NamedTuple):
    """From the form in which a tree was saved to the one that is wanted.

    **Fields:** `like`: the former. `only`: the patterns of what is restored of it, None for all. `said`: what has
    changed, in words, empty if nothing has. `back`: makes of the restored tree the one that is wanted.
    """

    like: Any
    only: Sequence[str] | None
    said: str
    back: Callable[[Any], Any]


def way_from(
    entries: Mapping[str, Entry], notes: Mapping[str, str], like: Any, only: Sequence[str] | None
) -> Way | str:
    """Finds how what is in a checkpoint becomes what is wanted, or says why it cannot.

    **Arguments:** `entries`, `notes`: of the checkpoint. `like`, `only`: as `Checkpointer.restore` takes them.
    """
    flat, structure = _jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda node: isinstance(node, Replanned))
    nodes = [node for _, node in flat]
    ways: dict[int, Callable[[Any], Any]] = {}
    changes: list[str] = []
    inside: list[str] = []
    for number, (path, node) in enumerate(flat):
        if not isinstance(node, Replanned):
            continue
        prefix = f"{_name(path)}/" if path else ""
        saved = {
            name.removeprefix(prefix): entry.padded_rows for name, entry in entries.items() if name.startswith(prefix)
        }
        form = node.saved_as(saved, notes) if saved else None
        leaves = saved_leaves(node)
        chosen = [name for name in leaves if _is_chosen(f"{prefix}{name}", only)]
        if form is None or not chosen:
            continue
        if isinstance(form, str):
            return form
        if form[2] or len(chosen) < len(leaves):
            nodes[number], ways[number] = form[:2]
            inside.append(prefix)
            changes += [form[2]] if form[2] else []
    if not ways:
        return Way(like, only, "", lambda tree: tree)

    def back(tree: Any) -> Any:
        found = structure.flatten_up_to(tree)
        for number, way in ways.items():
            path, node = flat[number]
            found[number] = _part(way(found[number]), node, f"{_name(path)}/" if path else "", only)
        return structure.unflatten(found)

    return Way(structure.unflatten(nodes), _outside(inside, only, like), "; ".join(changes), back)


def _part(restored: Any, like: Any, prefix: str, only: Sequence[str] | None) -> Any:
    """Returns the chosen leaves of what was restored, the others of `like`."""
    pairs = zip(saved_leaves(restored).items(), saved_leaves(like).values(), strict=True)
    values = [value if _is_chosen(f"{prefix}{name}", only) else other for (name, value), other in pairs]
    return _jax.tree.unflatten(_jax.tree.structure(like), [leaf for value in values for leaf in leaves_of(value)])


def _outside(inside: Sequence[str], only: Sequence[str] | None, like: Any) -> Sequence[str] | None:
    """Returns patterns of all that is below some nodes, and of what else was asked for."""
    if only is None:
        return None
    others = [name for name in saved_leaves(like) if not name.startswith(tuple(inside))]
    kept = [pattern for pattern in only if any(fnmatchcase(name, pattern) for name in others)]
    return [*kept, *(f"{glob.escape(prefix)}*" for prefix in inside)]


def _is_chosen(name: str, only: Sequence[str] | None) -> bool:
    return only is None or any(fnmatchcase(name, pattern) for pattern in only)


def _name(path: Any) -> str:
    return _jax.tree_util.keystr(path, simple=True, separator="/")
