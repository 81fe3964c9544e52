"""How nodes are computed in bounded memory, by kind; others are as where there is no limit."""

from collections.abc import Mapping

from braidax.frame.spilling.joining import join
from braidax.frame.spilling.running import SpillingRule

RULES: Mapping[str, SpillingRule] = {
    "Join": join,
}
