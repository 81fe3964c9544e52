"""The learning rates of a step, taken from its state where `optax.inject_hyperparams` keeps them."""

from collections.abc import Sequence
from typing import Any, final

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from braidax.report.ends import taken

_NAME = "learning_rate"
_KEPT_IN = "hyperparams"


@final
class LearningRates:
    """Takes from states, at once, the learning rates of the updates that made them, without keeping the states.

    One is named `learning_rate`; of several each has behind it what tells its place in the state from the others'.
    There is none where the optimizer was given a schedule itself, and where it lies on no device of this process. All
    states are like the first one.
    """

    def __init__(self) -> None:
        self._paths: dict[str, Sequence[Any]] | None = None

    def of(self, state: Any) -> dict[str, jax.Array]:
        """Returns arrays of one element on one device each."""
        tree = getattr(state, "opt_state", state)
        if self._paths is None:
            self._paths = _paths(tree)
        found = {name: _followed(tree, path) for name, path in self._paths.items()}
        return {
            name: taken(leaf) for name, leaf in found.items() if isinstance(leaf, jax.Array) and leaf.addressable_shards
        }


def _paths(tree: Any) -> dict[str, Sequence[Any]]:
    """Returns the paths of all learning rates, by name."""
    all_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    paths = [path for path in all_paths if [_word(key) for key in path[-2:]] == [_KEPT_IN, _NAME]]
    words = [[_word(key) for key in path[:-2]] for path in paths]
    if len(paths) == 1:
        return {_NAME: paths[0]}
    return {"/".join([_NAME, *_own(own, words)]): path for own, path in zip(words, paths, strict=True)}


def _own(path: Sequence[str], paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns the words of a path that are not at their place in all paths."""
    return [word for at, word in enumerate(path) if any(at >= len(other) or other[at] != word for other in paths)]


def _followed(tree: Any, path: Sequence[Any]) -> Any:
    """Returns what lies at a path, None where the tree is another."""
    for key in path:
        try:
            tree = getattr(tree, key.name) if isinstance(key, GetAttrKey) else tree[_index(key)]
        except (AttributeError, LookupError, TypeError):
            return None
    return tree


def _index(key: Any) -> Any:
    return key.key if isinstance(key, DictKey) else key.idx if isinstance(key, SequenceKey) else None


def _word(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
