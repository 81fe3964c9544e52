"""Gangs: where ranks come from. Each starts processes, lets them call functions together, watches and ends them."""

from braidax.gang.gang import Gang as Gang
from braidax.gang.local import LocalGang as LocalGang
