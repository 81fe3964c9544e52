"""Which nodes a rank computes from its own rows alone."""

from braidax.frame.plan.expressions import is_rowwise, is_scalar, kind_of
from braidax.frame.plan.nodes import Node

_LOCAL_FUNCTIONS = frozenset({"Rename", "Unnest", "Hint", "Explode"})


def is_local(node: Node) -> bool:
    """Returns whether a partition of the result is the result of a partition, in the same order."""
    if len(node.inputs) != 1:
        return node.kind == "Supplied"
    match node.kind:
        case "Filter":
            return is_rowwise(node.fields["predicate"])
        case "HStack":
            return all(map(is_rowwise, node.fields["exprs"]))
        case "Select":
            expressions = node.fields["expr"]
            return all(map(is_rowwise, expressions)) and not all(map(is_scalar, expressions))
        case "MapFunction":
            function = node.fields["function"]
            if kind_of(function) == "OpaquePython":
                return bool(function["OpaquePython"]["streamable"])
            return kind_of(function) in _LOCAL_FUNCTIONS
        case _:
            return False
