"""The programs of a worker, and those by which servers move variables that they have whole."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.compiler_options import CompilerOptions
from braidax.parallel.compute.accumulate import wide
from braidax.parallel.compute.work import Work
from braidax.parallel.plan.footprint import owners_of
from braidax.parallel.readings import Reading, Readings
from braidax.parallel.served.compiled import Evaluation, ServedPrograms, compiled_gradients
from braidax.parallel.served.feed import ServedFeed
from braidax.parallel.served.on_servers.dense import DenseForm, DensePrograms, Excerpts
from braidax.parallel.served.programs import KeptForm, exported, key_form, numbers_to_send
from braidax.program import Program, compile_on, named_leaves, trace
from braidax.program.prune import prune

from .border import Border
from .crossing import Crossings


@final
class WorkerPrograms:
    """Jitted functions of a worker, each compiled at its first call.

    **Arguments:** `work`, `batch_shardings`: in training. `border`: through which what is trained crosses.

    **Fields:** `rows`: those of tables by rows, where there are some. `gradients`: `(params, fed, variables, key, step,
    batch) -> ((gradients, those of rows), variables, metrics)`, where there are no tables by rows without `fed` and
    the latter. `key`: that of a state, of the one that `init` is given. `next`: `(key, step) -> (key of the step, step
    + 1)`.
    """

    def __init__(self, work: Work, batch_shardings: Any, options: CompilerOptions, border: Border) -> None:
        held, whole = work.form.shardings, NamedSharding(work.mesh, PartitionSpec())
        feed = work.feed if isinstance(work.feed, ServedFeed) else None

        def gradients(params: Any, *given: Any) -> Any:
            found, *rest = work.gradients(border.laid_out(params), *given)
            found = border.of(found) if feed is None else (border.of(found[0]), found[1])
            return found, *rest

        crossing = gradients if border.crosses_less else None
        self.rows = None if feed is None else ServedPrograms(work, feed, batch_shardings, options, crossing)
        self._readings: Readings | None = None
        if self.rows is not None:
            self.gradients = self.rows.gradients
        else:
            read = (held.params, whole, held.variables, held.key, held.step)
            self.gradients = compiled_gradients(work, read, batch_shardings, options, crossing)
            self._readings = Readings(work, read, options.apply)
        self.key = compile_on(
            work.mesh, lambda key: work.form.initial(key).key, in_shardings=(whole,), out_shardings=whole
        )
        self.next = compile_on(
            work.mesh,
            lambda key, step: (jax.random.fold_in(key, step), step + 1),
            in_shardings=(whole, whole),
            out_shardings=(whole, whole),
        )

    def evaluation(self, specs: Any) -> Evaluation | Reading:
        """Returns what evaluates batches of a form, with tables by rows or without. **Arguments:** `specs`: of such a
        batch."""
        if self.rows is not None:
            return self.rows.evaluation(specs)
        assert self._readings is not None, "it is made where there are no tables by rows"
        return self._readings.of(None, specs)


def draws_by(key: Any, step: Any, key_of_step: Any, place: tuple[int, int, int]) -> tuple[Any, Any]:
    """Returns what programs draw by in an update: each of several workers as its microbatches of all would.

    **Arguments:** `place`: the worker, of how many, and how many microbatches it has.
    """
    worker, num_workers, count = place
    if num_workers == 1:
        return key, step
    if count == 1:
        return key_of_step, np.int32(worker)
    numbers = np.arange(count, dtype=np.int32) * num_workers + worker
    return jnp.broadcast_to(key_of_step, (count,)), numbers


class _Flat(NamedTuple):
    """An update of all that servers have whole, as a program of flat lists.

    **Fields:** `program`: `(*carry, *gradients, loss, *sums) -> (*carry, *numbers)`, where numbers cross with these
    behind. `carry`: paths in a state. `owners`: the variable that each of `carry` belongs to, or "". `gradients`: names
    of the variables that have some. `numbers`, `sums`: of `DenseForm`.
    """

    program: Program
    carry: list[str]
    owners: list[str]
    gradients: list[str]
    numbers: tuple[tuple[str, int], ...]
    sums: tuple[str, ...]


class ServerForms(NamedTuple):
    """What servers have whole. **Fields:** `forms`: by server. `gathers`: whether they need sums of one another, or the
    norm is wanted, before anything moves."""

    forms: list[DenseForm]
    gathers: bool


def server_forms(work: Work, border: Border, num_servers: int, staleness: int | None) -> ServerForms:
    """Returns what each server has whole: variables are dealt out, the largest first, to who has least.

    Where the optimizer sums over gradients of variables of several servers, each sums over its own, and these numbers
    are put together.

    **Arguments:** `border`: of workers. `staleness`: of the strategy. **Raises:** `ArgumentError` where the optimizer
    moves one variable by more of another that lies elsewhere.
    """
    flat = _flat(work)
    leaves = jax.tree.leaves(_carry_of(work.form.specs))
    sizes = dict.fromkeys((name for name, _ in named_leaves(work.form.specs.params)), 0)
    for owner, leaf in zip(flat.owners, leaves, strict=True):
        if owner in sizes:
            sizes[owner] += leaf.size * leaf.dtype.itemsize
    owned: list[list[str]] = [[] for _ in range(num_servers)]
    held = [0] * num_servers
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        least = min(range(num_servers), key=held.__getitem__)
        owned[least].append(name)
        held[least] += sizes[name]
    crossings = _crossings(flat, owned, staleness) if num_servers > 1 else None
    wants_norm = work.wants_norm
    whole = flat if crossings is None else flat._replace(program=crossings.given())
    forms = [
        _form(work, border, whole, leaves, set(names), server, _parts(flat, crossings, set(names), server, wants_norm))
        for server, names in enumerate(owned)
    ]
    gathers = wants_norm or (num_servers > 1 and bool(flat.sums)) or (crossings is not None and bool(crossings.found))
    return ServerForms(forms, gathers)


def _crossings(flat: _Flat, owned: Sequence[Sequence[str]], staleness: int | None) -> Crossings:
    """Returns the numbers that servers need of one another. Where others may push at any time, such a number is of
    gradients alone: what it is made of besides may have moved when it is used."""
    having = {name: server for server, names in enumerate(owned) for name in names}
    carry = [having.get(owner) for owner in flat.owners]
    inputs = [*carry, *(having.get(name) for name in flat.gradients)]
    closed = flat.program.closed
    inputs += [None] * (len(closed.jaxpr.invars) - len(inputs))
    outputs = [*carry, *[None] * (len(closed.jaxpr.outvars) - len(carry))]
    apart = range(len(carry)) if staleness is None else ()
    return Crossings(flat.program, (inputs, outputs), len(owned), apart)


def _parts(flat: _Flat, crossings: Crossings | None, names: Collection[str], server: int, wants_norm: bool) -> bytes:
    """Returns the program of the numbers of a server that others need, and of squares: see `DensePrograms`."""
    specs = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in flat.program.closed.jaxpr.invars]
    count = len(flat.carry)
    own = [at for at, owner in enumerate(flat.owners) if owner in names or not owner]
    moved = [count + at for at, name in enumerate(flat.gradients) if name in names]
    given = [*own, *moved, count + len(flat.gradients)]

    def parts(*values: Any) -> list[Any]:
        inputs: list[Any] = [None] * len(specs)
        for at, value in zip(given, values, strict=True):
            inputs[at] = value
        found = [] if crossings is None else crossings.of_server(server, inputs)
        if wants_norm:
            squares = [jnp.sum(jnp.square(wide(inputs[at]))) for at in moved]
            found.append(sum(squares, jnp.zeros((), jnp.float32)))
        return found

    told = [specs[at] for at in given]
    return exported(parts, *told) if jax.eval_shape(parts, *told) else b""


def _carry_of(state: Any) -> Any:
    return {"opt_state": state.opt_state, "params": state.params, "step": state.step}


def _flat(work: Work) -> _Flat:
    specs, feed = work.form.specs, work.feed
    gradients = work.form.moved(work.form.dense(specs.params))
    counts: dict[str, int] = {}
    sums = feed.sum_specs if isinstance(feed, ServedFeed) else {}

    def update(carry: Any, gradients: Any, loss: Any, totals: Any) -> Any:
        given = gradients
        if isinstance(feed, ServedFeed):
            given = (gradients, feed.terms_of(dict(zip(sums, totals, strict=True))))
        step, params, opt_state = work.apply(carry["step"], carry["params"], carry["opt_state"], given, loss)
        numbers: list[Any] = []
        if isinstance(feed, ServedFeed):
            for name, kept in opt_state["rows"].items():
                numbers += (told := numbers_to_send(kept) if kept else [])
                counts[name] = len(told)
        return {"opt_state": opt_state, "params": params, "step": step}, numbers

    program = trace(update, _carry_of(specs), gradients, work.loss_spec, [*sums.values()])
    paths = [path for path, _ in named_leaves(_carry_of(specs))]
    names = {name for name, _ in named_leaves(specs.params)}
    of_state = [path.removeprefix("opt_state/") for path in paths]
    pairs = zip(paths, owners_of(of_state, names), strict=True)
    of_all = ("step", "opt_state/rows/")  # what is kept for rows all servers have alike
    owners = ["" if path.startswith(of_all) else owner for path, owner in pairs]
    return _Flat(
        program, paths, owners, [name for name, _ in named_leaves(gradients)], tuple(counts.items()), tuple(sums)
    )


def _form(
    work: Work, border: Border, flat: _Flat, leaves: Sequence[Any], names: set[str], server: int, parts: bytes
) -> DenseForm:
    """Returns what a server has whole. **Arguments:** `leaves`: specs of `flat.carry`. `names`: of its variables.
    `parts`: of its programs."""
    own = [at for at, owner in enumerate(flat.owners) if owner in names or not owner]
    moved = [at for at, name in enumerate(flat.gradients) if name in names]
    count, num_numbers = len(flat.carry), sum(num for _, num in flat.numbers)
    num_inputs = len(flat.program.closed.jaxpr.invars)
    inputs = {*own, *(count + at for at in moved), *range(count + len(flat.gradients), num_inputs)}
    wanted = [at in inputs for at in range(count)] + [True] * num_numbers
    closed, kept = prune(flat.program.closed, wanted, [at not in inputs for at in range(num_inputs)])
    if others := [at for at, one in enumerate(kept) if one and at not in inputs]:
        told = [flat.carry[at] if at < count else f"the gradient of {flat.gradients[at - count]}" for at in others]
        raise ArgumentError(
            f"optimizer moves {sorted(names) or 'tables'} on server {server} by {', '.join(told[:4])}, which lies on "
            f"another: expected one that moves each variable by what belongs to it, or by sums over gradients, such as "
            f"optax.adam behind optax.clip_by_global_norm; or one server, LocalGang(1)"
        )
    specs = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in closed.jaxpr.invars]
    program = Program(
        closed, tuple(specs), [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in closed.jaxpr.outvars]
    )
    carry = [flat.carry[at] for at in own]
    values = [at for at, path in enumerate(carry) if path.startswith("params/") or path == "params"]
    of_values = [flat.owners[own[at]] for at in values]
    return DenseForm(
        names=tuple(of_values),
        values=tuple(values),
        moved=tuple(of_values.index(flat.gradients[at]) for at in moved),
        carry=tuple(KeptForm(flat.carry[at], tuple(leaves[at].shape), str(leaves[at].dtype)) for at in own),
        numbers=flat.numbers,
        sums=flat.sums,
        programs=DensePrograms(
            begin=exported(*_begun(work, own)), update=exported(lambda *given: program(*given), *specs), parts=parts
        ),
        excerpts=Excerpts(
            tuple(border.read[name] for name in of_values), tuple(border.given[flat.gradients[at]] for at in moved)
        ),
    )


def _begun(work: Work, own: Sequence[int]) -> tuple[Any, Any]:
    """Returns what makes the first `carry` of the numbers of a key, and the form of these."""
    data, impl = key_form(work.form.initial.in_specs[0])

    def begin(data: jax.Array) -> list[Any]:
        leaves = jax.tree.leaves(_carry_of(work.form.initial(jax.random.wrap_key_data(data, impl=impl))))
        return [leaves[at] for at in own]

    return begin, data
