"""Operations of a plan in words."""

from braidax.frame.plan.expressions import columns_of, is_rowwise, kind_of, polars_of
from braidax.frame.plan.nodes import Node


def words(node: Node) -> str:
    """Says in a line what a node does, in Polars' own words."""
    match node.kind:
        case "Supplied":
            return f"table {node.fields['table'].name}: {', '.join(node.fields['table'].schema)}"
        case "Filter":
            return f"Filter {polars_of(node.fields['predicate'])}"
        case "Select" | "HStack":
            expressions = node.fields["expr" if node.kind == "Select" else "exprs"]
            shown = [str(polars_of(one)) for one in expressions if not _is_null(one)]
            hidden = len(expressions) - len(shown)
            return f"{node.kind} {', '.join(shown)}" + (f" ({hidden} columns are not needed)" if hidden else "")
        case "GroupBy":
            return f"GroupBy {', '.join(str(polars_of(key)) for key in node.fields['keys'])}"
        case "Sort":
            return f"Sort {', '.join(str(polars_of(key)) for key in node.fields['by_column'])}"
        case "Join":
            args, condition = node.fields["options"]["args"], node.fields["condition"]
            keys = condition["Equi"]["left_on"] if kind_of(condition) == "Equi" else []
            return f"Join {kind_of(args['how'])} {', '.join(str(polars_of(key)) for key in keys)}".rstrip()
        case "Slice":
            return f"Slice {node.fields['offset']}, {node.fields['len']}"
        case "MapFunction":
            return f"MapFunction {kind_of(node.fields['function'])}"
        case "Scan":
            return f"Scan {kind_of(node.fields['scan_type'])}"
        case _:
            return node.kind


def _is_null(expression: object) -> bool:
    return is_rowwise(expression) and not columns_of(expression) and "null" in str(polars_of(expression))
