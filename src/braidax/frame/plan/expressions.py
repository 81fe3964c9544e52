"""Expressions of Polars as data: which of them look at one row alone, and at what others look.

An expression is what Polars writes of it: a dict with one key, its kind, or a word.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from braidax.frame.polars import Schema, msgpack, pl

Expression = Any

_PARTS: dict[str, tuple[str, ...]] = {
    "BinaryExpr": ("left", "right"),
    "Cast": ("expr",),
    "Ternary": ("predicate", "truthy", "falsy"),
    "Function": ("input",),
    "AnonymousFunction": ("input",),
    "RenameAlias": ("expr",),
    "Eval": ("expr",),
    "StructEval": ("expr",),
}
"""Kinds that look at one row alone, as far as their parts do, and the fields where these are."""

_WHOLE_ARGUMENTS = frozenset(
    {"IsIn", "Replace", "ReplaceStrict", "ContainsAny", "ReplaceMany", "ExtractMany", "FindMany"}
)
"""Functions that look at all rows of their further arguments, unless these are literals; Polars does not say so."""

_WRAPPED = ("Alias", "KeepName")
SMALL = ("Sum", "Min", "Max", "Mean", "Count", "CountAll", "NullCount")
"""Aggregations that are aggregations of what parts of the rows gave."""

UNORDERED = frozenset(SMALL) | {"NUnique", "Std", "Var", "Median", "Quantile"}
"""Aggregations that do not depend on the order of rows."""


def kind_of(expression: Expression) -> str:
    """Returns the kind of an expression."""
    return next(iter(expression)) if isinstance(expression, dict) else str(expression)


def column(name: str) -> Expression:
    """Returns the expression of a column."""
    return {"Column": name}


def alias(expression: Expression, name: str) -> Expression:
    """Returns the expression under another name."""
    return {"Alias": [expression, name]}


def written(expression: "pl.Expr") -> Expression:
    """Returns what Polars writes of an expression."""
    return msgpack.decode(expression.meta.serialize())


def polars_of(expression: Expression) -> "pl.Expr":
    """Returns an expression as Polars' own."""
    return pl.Expr.deserialize(msgpack.encode(expression))


def parts(expression: Expression) -> list[Expression]:
    """Returns the expressions of which an elementwise one consists; none for other kinds."""
    kind = kind_of(expression)
    if kind in _WRAPPED:
        value = expression[kind]
        return [value[0] if kind == "Alias" else value]
    found: list[Expression] = []
    for name in _PARTS.get(kind, ()):
        value = expression[kind][name]
        found += value if isinstance(value, list) else [value]
    return found


def with_parts(expression: Expression, new: Sequence[Expression]) -> Expression:
    """Returns an elementwise expression of other parts, as many as `parts` gives."""
    kind = kind_of(expression)
    if kind in _WRAPPED:
        return {kind: [new[0], expression[kind][1]]} if kind == "Alias" else {kind: new[0]}
    left = iter(new)
    fields = dict(expression[kind])
    for name in _PARTS[kind]:
        value = fields[name]
        fields[name] = [next(left) for _ in value] if isinstance(value, list) else next(left)
    return {kind: fields}


def is_rowwise(expression: Expression) -> bool:
    """Returns whether each row of the result depends on the same row of the table alone."""
    return is_rowwise_itself(expression) and all(map(is_rowwise, parts(expression)))


def is_rowwise_itself(expression: Expression) -> bool:
    """Returns whether this is so if it is so for the parts."""
    kind = kind_of(expression)
    match kind:
        case "Column" | "Selector" | "Alias" | "KeepName" | "RenameAlias" | "BinaryExpr" | "Cast" | "Ternary":
            return True
        case "Literal":
            return kind_of(expression[kind]) in ("Dyn", "Scalar")
        case "Function":
            return _asks_rows(expression)
        case "AnonymousFunction":
            return _says_rows(msgpack.encode(expression[kind]["options"]), msgpack.encode(expression[kind]["function"]))
        case "Eval":
            return kind_of(expression[kind]["variant"]) in ("List", "ListAgg", "Array")
        case "StructEval":
            return all(map(is_rowwise, expression[kind]["evaluation"]))
        case "Field":
            return True
        case _:
            return False


def _asks_rows(expression: Expression) -> bool:
    fields = expression["Function"]
    literals = [part if kind_of(part) == "Literal" else None for part in fields["input"]]
    if all(part is not None for part in literals):
        return False  # it makes rows of its own
    name = fields["function"]
    inner = kind_of(name[kind_of(name)]) if isinstance(name, dict) else kind_of(name)
    if inner == "Sample":
        return False  # of lists, by one stream of random numbers for all rows
    if (inner in _WHOLE_ARGUMENTS or kind_of(name) in _WHOLE_ARGUMENTS) and None in literals[1:]:
        return False
    return _function_is_rowwise(msgpack.encode([fields["function"], literals]))


@lru_cache(maxsize=4096)
def _says_rows(options: bytes, function: bytes) -> bool:
    """Returns whether a user's function was said to look at one row alone: Polars' JSON has the flags by name."""
    fields = {"input": [column("x")], "function": msgpack.decode(function), "options": msgpack.decode(options)}
    told = json.loads(polars_of({"AnonymousFunction": fields}).meta.serialize(format="json"))
    return "ROW_SEPARABLE" in told["AnonymousFunction"]["options"]["flags"]


@lru_cache(maxsize=4096)
def _function_is_rowwise(function: bytes) -> bool:
    name, literals = msgpack.decode(function)
    inputs = [column("x") if part is None else part for part in literals]
    try:
        return polars_of({"Function": {"input": inputs, "function": name}}).meta.is_row_separable()
    except pl.exceptions.PolarsError:
        return False


def walk(expression: Expression) -> Iterator[Expression]:
    """Yields everything inside of an expression that looks like one."""
    if isinstance(expression, dict):
        if len(expression) == 1:
            yield expression
        for value in expression.values():
            yield from walk(value)
    elif isinstance(expression, list) and not (expression and isinstance(expression[0], int)):
        for value in expression:
            yield from walk(value)
    elif isinstance(expression, str):
        yield expression


def calls_python(expression: Any) -> bool:
    """Returns whether a user's function is called for it."""
    return any(kind_of(part) in ("AnonymousFunction", "OpaquePython", "AnonymousAgg") for part in walk(expression))


def is_scalar(expression: Expression) -> bool:
    """Returns whether an expression gives one value for all rows."""
    if is_rowwise_itself(expression) and parts(expression):
        return all(map(is_scalar, parts(expression)))
    if kind_of(expression) == "Literal":
        return kind_of(expression["Literal"]) in ("Dyn", "Scalar")
    return _told(expression, lambda meta: meta.is_scalar())


def keeps_length(expression: Expression) -> bool:
    """Returns whether an expression gives a value for each row."""
    return _told(expression, lambda meta: meta.is_length_preserving())


def _told(expression: Expression, ask: Callable[[Any], bool]) -> bool:
    try:
        return ask(polars_of(expression).meta)
    except pl.exceptions.PolarsError:
        return False


def expanded(expression: Expression, schema: Schema) -> list[Expression] | None:
    """Returns an expression for each column that its selectors stand for; None where that cannot be told."""
    selectors = {msgpack.encode(part): part for part in walk(expression) if kind_of(part) == "Selector"}
    if not selectors:
        return [expression]
    columns = [polars_of(part) for part in selectors.values()]
    names = [pl.LazyFrame(schema=schema).select(one).collect_schema().names() for one in columns]
    if len(names) > 1 and len(set(map(tuple, names))) > 1:
        return None
    return [_replaced(expression, "Selector", lambda _, name=name: column(name)) for name in names[0]]


def all_expanded(expressions: Sequence[Expression], schema: Schema) -> list[Expression] | None:
    """Returns the expressions of `expanded`, for several."""
    found: list[Expression] = []
    for one in expressions:
        several = expanded(one, schema)
        if several is None:
            return None
        found += several
    return found


def renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    """Returns an expression without selectors of other columns. **Arguments:** `names`: the new name of each."""
    return _replaced(expression, "Column", lambda one: column(names[one["Column"]]))


def _replaced(value: Any, kind: str, new: Callable[[Expression], Expression]) -> Any:
    """Returns an expression with others in place of its parts of a kind."""
    if isinstance(value, dict):
        if kind_of(value) == kind and len(value) == 1:
            return new(value)
        return {key: _replaced(part, kind, new) for key, part in value.items()}
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return [_replaced(part, kind, new) for part in value]
    return value


def columns_of(expression: Expression) -> list[str]:
    """Returns the columns that an expression without selectors reads."""
    names = [part["Column"] for part in walk(expression) if kind_of(part) == "Column" and isinstance(part, dict)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def names_of(expressions: Sequence[Expression], schema: Schema) -> list[str]:
    """Returns the names of the columns that expressions give. **Raises:** what Polars does for those that cannot be."""
    return list(pl.LazyFrame(schema=schema).select([polars_of(one) for one in expressions]).collect_schema().names())


def aggregation(expression: Expression) -> tuple[str, Expression] | None:
    """Returns the name of an aggregation and what it is taken of; None for what is none."""
    kind = kind_of(expression)
    if kind == "Agg":
        ((name, value),) = expression["Agg"].items()
        if name == "Count":
            return (name if not value["include_nulls"] else "CountAll"), value["input"]
        if name in ("Std", "Var"):
            return name, value[0] if isinstance(value, list) else value.get("input")
        return name, value["input"] if isinstance(value, dict) and "input" in value else value
    if kind == "Function" and expression["Function"]["function"] == "NullCount":
        return "NullCount", expression["Function"]["input"][0]
    return None


def depends_on_order(expression: Expression) -> bool:
    """Returns whether what an aggregation of a group gives may depend on the order of its rows."""
    if kind_of(expression) in ("Len", "Literal"):
        return False
    found = aggregation(expression)
    if found is not None:
        return found[0] not in UNORDERED or not is_rowwise(found[1])
    if not is_rowwise_itself(expression) or not parts(expression):
        return True
    return any(map(depends_on_order, parts(expression)))
