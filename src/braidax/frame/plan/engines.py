"""By which engine of Polars a part of the rows is computed."""

from typing import Literal

from braidax.frame.plan.expressions import Expression, kind_of, walk
from braidax.frame.plan.nodes import Node, topological

Engine = Literal["auto", "streaming", "in-memory"]


def engine_of(node: Node) -> Literal["auto", "in-memory"]:
    """Returns the engine that gives of a part of the rows what it gives of all: as a rule what Polars takes by itself.

    Its streaming engine does not of groups in a table of one row whose value is null: seen of Polars 2.1, a standard
    deviation or variance of `ddof=0` is 0 there, and a correlation NaN. Both are null where other rows are beside that.
    """
    tells = (_tells_one_row(part) for one in topological(node) if one.kind == "GroupBy" for part in walk(one.fields))
    return "in-memory" if any(tells) else "auto"


def _tells_one_row(expression: Expression) -> bool:
    if not isinstance(expression, dict):
        return False
    value = expression.get("Agg")
    if isinstance(value, dict) and (spread := value.get("Std", value.get("Var"))) is not None:
        return spread[1] == 0 if isinstance(spread, list) else spread.get("ddof") == 0
    return kind_of(expression) == "Correlation"
