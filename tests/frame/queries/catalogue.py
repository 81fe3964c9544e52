"""All queries that are asked of one process and of several ranks."""

from tests.frame.queries.elementwise import ELEMENTWISE
from tests.frame.queries.grouping import GROUPING
from tests.frame.queries.joins import JOINS
from tests.frame.queries.ordering import ORDERING
from tests.frame.queries.query import checked
from tests.frame.queries.reducing import REDUCING
from tests.frame.queries.reshaping import RESHAPING
from tests.frame.queries.scanning import SCANNING
from tests.frame.queries.windows import WINDOWS

CATALOGUE = checked([*ELEMENTWISE, *REDUCING, *WINDOWS, *JOINS, *GROUPING, *ORDERING, *RESHAPING, *SCANNING])
