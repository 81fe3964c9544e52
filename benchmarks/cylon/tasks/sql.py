"""Every task as SQL; the operations of the paper name what they read `left_` and `right_`."""

from collections.abc import Mapping

from benchmarks.cylon.tasks.sql_tpch import QUERIES

PAPER: Mapping[str, str] = {
    "join": "select l.k as k, l.a as a, r.b as b from left_ l join right_ r on l.k = r.k",
    "groupby": "select k, sum(a) as a from left_ group by k",
    "sort": "select k, a from left_ order by k",
    "pipeline": """
select k, sum(a) + 1 as a, sum(b) + 1 as b
from (select l.k as k, l.a as a, r.b as b from left_ l join right_ r on l.k = r.k) as joined
group by k
order by k
""",
}

_LARGEST_TWO = """
select id6, v3 as largest2_v3
from (select id6, v3, row_number() over (partition by id6 order by v3 desc) as place from x) as ranked
where place <= 2
"""
GROUP_BYS: Mapping[str, str] = {
    "g1": "select id1, sum(v1) as v1 from x group by id1",
    "g2": "select id1, id2, sum(v1) as v1 from x group by id1, id2",
    "g3": "select id3, sum(v1) as v1, avg(v3) as v3 from x group by id3",
    "g4": "select id4, avg(v1) as v1, avg(v2) as v2, avg(v3) as v3 from x group by id4",
    "g5": "select id6, sum(v1) as v1, sum(v2) as v2, sum(v3) as v3 from x group by id6",
    "g6": "select id4, id5, median(v3) as median_v3, stddev(v3) as sd_v3 from x group by id4, id5",
    "g7": "select id3, max(v1) - min(v2) as range_v1_v2 from x group by id3",
    "g8": _LARGEST_TWO,
    "g9": "select id2, id4, power(corr(v1, v2), 2) as r2 from x group by id2, id4",
    "g10": """
select id1, id2, id3, id4, id5, id6, sum(v3) as v3, count(*) as number
from x group by id1, id2, id3, id4, id5, id6
""",
}
JOINS: Mapping[str, str] = {
    "j1": "select x.*, small.w as w from x join small on x.id1 = small.id1",
    "j2": "select x.*, medium.w as w from x join medium on x.id2 = medium.id2",
    "j3": "select x.*, medium.w as w from x left join medium on x.id2 = medium.id2",
    "j4": "select x.*, medium.w as w from x join medium on x.id5 = medium.id5",
    "j5": "select x.*, big.w as w from x join big on x.id3 = big.id3",
}
TASKS: Mapping[str, str] = {**PAPER, **GROUP_BYS, **JOINS, **QUERIES}
NAMES: Mapping[str, str] = {"left": "left_", "right": "right_"}
"""What a table is called where its own name is a word of SQL."""


def text_of(task: str, scale: float) -> str:
    """Returns the SQL of a task. **Arguments:** `scale`: the factor of TPC-H, on which its query 11 depends."""
    return TASKS[task].replace("{share}", f"{0.0001 / scale:.12f}")
