"""Where the equations of a traced program are."""

from jax.extend.core import Jaxpr

from braidax.program import Path, bodies


def paths(jaxpr: Jaxpr, name: str | None = None) -> list[Path]:
    """The paths of all equations, at any depth, that hold no others; or of those of one primitive."""
    found: list[Path] = []
    for index, equation in enumerate(jaxpr.eqns):
        inner = bodies(equation)
        if equation.primitive.name == name or (name is None and not inner):
            found.append((index,))
        for which, body in enumerate(inner):
            found += [(index, which, *path) for path in paths(body.jaxpr, name)]
    return found
