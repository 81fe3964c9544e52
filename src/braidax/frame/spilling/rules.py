"""How nodes are computed in bounded memory, by kind; others are as where there is no limit."""

from collections.abc import Mapping

from braidax.frame.spilling.grouping import group
from braidax.frame.spilling.joining import join
from braidax.frame.spilling.running import SpillingRule
from braidax.frame.spilling.sorting import sort
from braidax.frame.spilling.stacking import function, union
from braidax.frame.spilling.uniqueness import distinct

RULES: Mapping[str, SpillingRule] = {
    "Distinct": distinct,
    "GroupBy": group,
    "Join": join,
    "MapFunction": function,
    "Sort": sort,
    "Union": union,
}
