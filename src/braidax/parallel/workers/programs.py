"""The programs of a worker, and those by which servers move variables that they have whole."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.compiler_options import CompilerOptions
from braidax.parallel.compute.work import Work
from braidax.parallel.plan.footprint import owners_of
from braidax.parallel.readings import Reading, Readings
from braidax.parallel.served.compiled import Evaluation, ServedPrograms, compiled_gradients
from braidax.parallel.served.feed import ServedFeed
from braidax.parallel.served.on_servers.dense import DenseForm
from braidax.parallel.served.programs import KeptForm, exported, key_form, numbers_to_send
from braidax.program import Program, compile_on, named_leaves, trace
from braidax.program.prune import prune


@final
class WorkerPrograms:
    """Jitted functions of a worker, each compiled at its first call.

    **Arguments:** `work`, `batch_shardings`: in training.

    **Fields:** `rows`: those of tables by rows, where there are some. `gradients`: `(params, fed, variables, key, step,
    batch) -> ((gradients, those of rows), variables, metrics)`, where there are no tables by rows without `fed` and
    the latter. `key`: that of a state, of the one that `init` is given. `next`: `(key, step) -> (key of the step, step
    + 1)`.
    """

    def __init__(self, work: Work, batch_shardings: Any, options: CompilerOptions) -> None:
        held, whole = work.form.shardings, NamedSharding(work.mesh, PartitionSpec())
        feed = work.feed if isinstance(work.feed, ServedFeed) else None
        self.rows = None if feed is None else ServedPrograms(work, feed, batch_shardings, options)
        self._readings: Readings | None = None
        if self.rows is not None:
            self.gradients = self.rows.gradients
        else:
            read = (held.params, whole, held.variables, held.key, held.step)
            self.gradients = compiled_gradients(work, read, batch_shardings, options)
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


class _Flat(NamedTuple):
    """An update of all that servers have whole, as a program of flat lists.

    **Fields:** `program`: `(*carry, *gradients, loss, *sums) -> (*carry, *numbers)`. `carry`: paths in a state.
    `owners`: the variable that each of `carry` belongs to, or "". `gradients`: names of the variables that have some.
    `numbers`, `sums`: of `DenseForm`.
    """

    program: Program
    carry: list[str]
    owners: list[str]
    gradients: list[str]
    numbers: tuple[tuple[str, int], ...]
    sums: tuple[str, ...]


def dense_forms(work: Work, num_servers: int) -> list[DenseForm]:
    """Returns what each server has whole: variables are dealt out, the largest first, to who has least.

    **Raises:** `ArgumentError` where the optimizer moves one variable by what belongs to another that lies elsewhere.
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
    return [_form(work, flat, leaves, set(names), server) for server, names in enumerate(owned)]


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
            given = (gradients, feed.totals(dict(zip(sums, totals, strict=True)))[0])
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


def _form(work: Work, flat: _Flat, leaves: Sequence[Any], names: set[str], server: int) -> DenseForm:
    """Returns what a server has whole. **Arguments:** `leaves`: specs of `flat.carry`. `names`: of its variables."""
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
            f"another: expected one that moves each variable by what belongs to it, such as optax.adam; or one server, "
            f"LocalGang(1)"
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
        begin=exported(*_begun(work, own)),
        update=exported(lambda *given: program(*given), *specs),
    )


def _begun(work: Work, own: Sequence[int]) -> tuple[Any, Any]:
    """Returns what makes the first `carry` of the numbers of a key, and the form of these."""
    data, impl = key_form(work.form.initial.in_specs[0])

    def begin(data: jax.Array) -> list[Any]:
        leaves = jax.tree.leaves(_carry_of(work.form.initial(jax.random.wrap_key_data(data, impl=impl))))
        return [leaves[at] for at in own]

    return begin, data
