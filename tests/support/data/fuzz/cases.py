"""All cases of the fuzz, by name. A family of formats adds its own here."""

from tests.support.data.fuzz import arrays, images, records, tables

CASES = {case.name: case for family in (arrays, tables, records, images) for case in family.CASES}
