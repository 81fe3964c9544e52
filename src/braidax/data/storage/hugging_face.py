"""Repositories of the Hugging Face Hub: at which commit they are read, what they hold, and which server has it."""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from braidax.errors import FormatError, import_extra

_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model", None: "model"}
_REPOSITORY = re.compile(
    r"hf://(?:(?P<kind>datasets|models|spaces)/)?(?P<id>(?!(?:datasets|models|spaces)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/|$)"
)


def repository_address(url: str) -> tuple[str, str]:
    """Returns the repository of a URL, and the path in it, as `braidax.objects.address`.

    **Raises:** `FormatError` for a URL that names no repository.
    """
    found = _REPOSITORY.match(url)
    if found is None:
        raise FormatError(
            f"{url}: names no repository; expected hf://datasets/USER/NAME/PATH, or hf://datasets/USER/NAME@REVISION/PATH"
        )
    return found[0].rstrip("/"), url[found.end() :]


class Repository(NamedTuple):
    """A repository at one commit.

    **Fields:** `url`: of the folder that its files are in. `headers`: of each request. `api`, `named`: of the library.
    """

    url: str
    headers: Mapping[str, str]
    api: Any
    named: Mapping[str, str]

    def below(self, folder: str, *, is_deep: bool) -> tuple[dict[str, int], list[str]]:
        """Returns the sizes of files in a folder, by paths, and its folders. **Raises:** what the library does."""
        sizes, folders = dict[str, int](), list[str]()
        for item in self.api.list_repo_tree(path_in_repo=folder or None, recursive=is_deep, **self.named):
            if hasattr(item, "size"):
                sizes[item.path] = item.size
            else:
                folders.append(item.path)
        return sizes, folders


def find_repository(root: str, *, timeout_seconds: float) -> Repository:
    """Finds out at which commit a repository is now: all of it is read from there.

    **Arguments:** `root`: as `repository_address` returns it. The server is that of `HF_ENDPOINT`, and the token that
    of `HF_TOKEN` or of `hf auth login`.

    **Raises:** `MissingExtra`, `FormatError` for one that is not there, or not for everybody.
    """
    library: Any = import_extra("huggingface_hub", "hub", purpose="reading hf:// URLs")
    found = _REPOSITORY.match(root)
    assert found is not None
    token = library.get_token()
    api = library.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token or False)
    named = {"repo_id": found["id"], "repo_type": _KINDS[found["kind"]]}
    revision = (found["revision"] or "main").replace("%2F", "/")
    try:
        commit = api.repo_info(**named, revision=revision, timeout=timeout_seconds).sha
    except Exception as error:
        raise not_told(root, error) from error
    kind = "" if named["repo_type"] == "model" else f"{named['repo_type']}s/"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{api.endpoint.rstrip('/')}/{kind}{found['id']}/resolve/{commit}"
    return Repository(url, headers, api, {**named, "revision": commit})


def not_told(url: str, error: Exception) -> FormatError:
    """Returns what to raise for something that the Hub does not tell."""
    why = (str(error).strip().splitlines() or [""])[0]
    return FormatError(
        f"{url}: cannot be found on the Hub ({type(error).__name__}: {why}); check the name, the revision and the "
        "network, and set HF_TOKEN for what is not for everybody"
    )
