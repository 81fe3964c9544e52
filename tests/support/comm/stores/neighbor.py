"""Another process for the tests of stores: does what the lines of its standard input say, a JSON object each.

`open` a store under a name, or `join` JAX's coordination service; `set`, `get`, `add`, `derive_secret`; `leave` the
service.
"""

import json
import ssl
import sys
from typing import Any

import jax

from braidax.comm.stores.jax import JaxStore
from braidax.comm.stores.store import ScopedStore, Store
from braidax.comm.stores.urls import open_store
from braidax.program.coordination import coordination


def main() -> None:
    """Answers each line with one line, after a first one that says that this process is there."""
    stores: dict[str, Store] = {}
    say("ready")
    for line in sys.stdin:
        try:
            say(answer(stores, **json.loads(line)))
        except Exception as error:  # noqa: BLE001  (the test sees it)
            say({"raised": repr(error)})


def say(what: Any) -> None:
    """Writes a line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def answer(stores: dict[str, Store], action: str, name: str, **given: Any) -> Any:
    """Does one thing; `name` is that of the store."""
    if action == "open":
        tls = ssl.create_default_context(cafile=given["authority"]) if given["authority"] else None
        stores[name] = open_store(given["url"], tls=tls)
    elif action == "join":
        jax.distributed.initialize(given["url"], num_processes=given["size"], process_id=given["rank"])
        service = coordination()
        assert service is not None
        stores[name] = JaxStore(service)
    elif action == "leave":
        jax.distributed.shutdown()
    else:
        store = ScopedStore(stores[name], job=given["job"], generation=given["generation"])
        if action == "set":
            store.set(given["key"], bytes.fromhex(given["value"]))
        elif action == "get":
            return store.get(given["key"], timeout_seconds=given["seconds"]).hex()
        elif action == "derive_secret":
            return store.derive_secret(bytes.fromhex(given["seed"])).hex()
        elif action == "add":
            return [store.add(given["key"], given["amount"]) for _ in range(given["times"])]
    return None


if __name__ == "__main__":
    main()
