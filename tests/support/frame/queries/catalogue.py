"""All queries that are asked of one process and of several ranks."""

from tests.support.frame.queries.elementwise import ELEMENTWISE
from tests.support.frame.queries.grouping import GROUPING
from tests.support.frame.queries.joins import JOINS
from tests.support.frame.queries.ordering import ORDERING
from tests.support.frame.queries.query import checked
from tests.support.frame.queries.reducing import REDUCING
from tests.support.frame.queries.reshaping import RESHAPING
from tests.support.frame.queries.scanning import SCANNING
from tests.support.frame.queries.windows import WINDOWS

CATALOGUE = checked([*ELEMENTWISE, *REDUCING, *WINDOWS, *JOINS, *GROUPING, *ORDERING, *RESHAPING, *SCANNING])
