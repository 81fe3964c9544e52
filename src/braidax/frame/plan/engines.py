"""By which engine of Polars a part of the rows is computed."""

from braidax.frame.plan.expressions import Expression, kind_of, walk
from braidax.frame.plan.nodes import Node, topological


def streams_wrong(node: Node) -> bool:
    """Returns whether the streaming engine may give of a part of the rows what it does not give of all.

    It does so of groups in a table of one row whose value is null: seen of Polars 2.1, a standard deviation or variance
    of `ddof=0` is 0 there, and a correlation NaN. Both are null where other rows are beside that.
    """
    return any(_tells_one_row(part) for one in topological(node) if one.kind == "GroupBy" for part in walk(one.fields))


def _tells_one_row(expression: Expression) -> bool:
    if not isinstance(expression, dict):
        return False
    value = expression.get("Agg")
    if isinstance(value, dict) and (spread := value.get("Std", value.get("Var"))) is not None:
        return spread[1] == 0 if isinstance(spread, list) else spread.get("ddof") == 0
    return kind_of(expression) == "Correlation"
