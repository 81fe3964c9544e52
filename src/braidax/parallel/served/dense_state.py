"""States of a step with served tables, and those of single-device training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from braidax.parallel.compute.state_form import StateForm, load_tree
from braidax.parallel.state import State
from braidax.program import named_leaves

from .feed import ServedFeed
from .programs import TableForm, TablePart
from .servers import Servers


def dense_of(
    state: State, form: StateForm, feed: ServedFeed, servers: Servers, forms: Mapping[str, TableForm]
) -> State:
    """Returns a state as single-device training has it, with all tables, on the host; all processes call it.

    **Arguments:** `form`: of states of the step. `feed`: its tables, which `servers` have in these `forms`.
    """
    read = {name: servers.whole.read(name, 0, spec.shape[0]) for name, spec in feed.tables.items()}
    host = jax.tree.map(lambda leaf: leaf if _is_key(leaf) else np.asarray(leaf), state)
    values = {name: one.values.reshape(feed.tables[name].shape) for name, one in read.items()}
    dense = load_tree(form.of_params, form.dense(host.params))
    of_dense = load_tree(form.of_state, host.opt_state["dense"])
    kept = {
        name: {form.name: leaf for form, leaf in zip(forms[name].kept, one.kept, strict=True)}
        for name, one in read.items()
    }
    params, opt_state = form.joined(dense, values), feed.joined(of_dense, kept)
    return replace(host, params=params, opt_state=opt_state, padded=(), shapes=())


def write_dense(state: State, feed: ServedFeed, servers: Servers, forms: Mapping[str, TableForm]) -> None:
    """Brings the tables of a state of single-device training to the servers; all processes call it."""
    params = dict(named_leaves(state.params))
    servers.brought()  # others may read what was there before
    for name, (kept, shared) in feed.kept_rows(state.opt_state).items():
        form, (first, last) = forms[name], servers.own_rows(name)
        own = [np.asarray(kept[one.name]).reshape(form.shape[0], *one.shape)[first:last] for one in form.kept]
        values = np.asarray(params[name]).reshape(form.shape[0], form.width)[first:last]
        servers.write(name, TablePart(first, values, own, [np.asarray(one) for one in shared]), int(state.step))
    servers.meet()


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
