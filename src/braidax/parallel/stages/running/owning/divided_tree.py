"""Parameters as a pipeline keeps them: the user's PyTree, in which rows of one leaf may be several."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from braidax.parallel.plan.plan import follow
from braidax.program import named_leaves

from .ownership import Ownership, Piece


@final
class DividedTree:
    """The form of a PyTree in which a leaf that several stages own by rows is a tuple of its pieces.

    **Arguments:** `tree`: of specs, the parameters.
    """

    def __init__(self, tree: Any, ownership: Ownership) -> None:
        self._tree, self._ownership = jax.tree.structure(tree), ownership
        owners: list[list[tuple[int, Piece, int]]] = [[] for _ in range(self._tree.num_leaves)]
        for stage, own in enumerate(ownership.pieces):
            for one in own:
                owners[one.leaf].append((0 if one.rows is None else one.rows[0], one, stage))
        self._pieces = [[(one, stage) for _, one, stage in sorted(found)] for found in owners]
        self.stages = [stage for found in self._pieces for _, stage in found]
        """Of each leaf of the divided tree, which stage owns it."""
        self.leaves = [one.leaf for found in self._pieces for one, _ in found]
        """Of each leaf of the divided tree, of which leaf of the whole one it is."""
        self.cut = [at for at, found in enumerate(self._pieces) if len(found) > 1]
        """The leaves of the whole tree that are divided."""

    def of_pieces(self, pieces: Sequence[Sequence[Any]]) -> Any:
        """Returns the divided tree of what stages own."""
        known = {
            (stage, one): value
            for stage, (own, values) in enumerate(zip(self._ownership.pieces, pieces, strict=True))
            for one, value in zip(own, values, strict=True)
        }
        return self._made([[known[stage, one] for one, stage in found] for found in self._pieces])

    def pieces(self, tree: Any) -> list[list[Any]]:
        """Undoes `of_pieces`."""
        order = [(stage, one) for found in self._pieces for one, stage in found]
        known = dict(zip(order, jax.tree.leaves(tree), strict=True))
        return [[known[stage, one] for one in own] for stage, own in enumerate(self._ownership.pieces)]

    def divide(self, tree: Any) -> Any:
        """Returns the divided tree of a whole one."""
        return self.of_pieces(self._ownership.divide(jax.tree.leaves(tree)))

    def join(self, tree: Any) -> Any:
        """Undoes `divide`, for arrays in one place."""
        return jax.tree.unflatten(self._tree, self._ownership.join(self.pieces(tree), self._tree.num_leaves))

    def whole_shapes(
        self, params: Any, opt_state: Any, moved: Callable[[Any], Any]
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns of what is a tuple of rows in a state the path and the shape of the whole, of the optimizer's, too.

        **Arguments:** `params`: a divided tree of specs. `moved`: gives what is trained of such a tree. `opt_state`: of
        the optimizer for that.
        """
        divided = self._made([[len(found) > 1] * len(found) for found in self._pieces])
        trees = {
            "params": (params, divided),
            "opt_state": (opt_state, follow(moved(params), moved(divided), opt_state, lambda _: False)),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (tree, marks) in trees.items():
            for (path, spec), is_divided in zip(named_leaves(tree, name), jax.tree.leaves(marks), strict=True):
                if is_divided:
                    whole = path.rpartition("/")[0]
                    num_rows = shapes[whole][0] if whole in shapes else 0
                    shapes[whole] = (num_rows + spec.shape[0], *spec.shape[1:])
        return tuple(shapes.items())

    def _made(self, found: Sequence[Sequence[Any]]) -> Any:
        return jax.tree.unflatten(self._tree, [one[0] if len(one) == 1 else tuple(one) for one in found])
