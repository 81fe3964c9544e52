"""Makes the description that a package index shows of the README, with links that hold there, and the project's URLs.

The repository is where the release is built: `BRAIDAX_REPOSITORY`, such as https://example.org/owner/braidax. Links
lead to the tag of the version there. Without it a build has no URLs, and links to files are words.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "BRAIDAX_REPOSITORY"
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\((?![a-z]+:)([^)\s]*)\)")  # not to another host
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


class DescriptionHook(MetadataHookInterface):
    """Sets what `dynamic` in pyproject.toml leaves to it."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `readme` and `urls`. A source distribution has its own already."""
        root = Path(self.root)
        version = VERSION.search((root / "src" / "braidax" / "__init__.py").read_text())
        if version is None:
            raise ValueError("src/braidax/__init__.py has no __version__")
        repository = checked(os.environ.get(VARIABLE))
        text = described((root / "README.md").read_text(), repository, version[1])
        metadata.setdefault("readme", {"content-type": "text/markdown", "text": text})
        metadata.setdefault("urls", urls(repository, version[1]))


def checked(repository: str | None) -> str | None:
    """Returns the repository, or None without one. **Raises:** `ValueError` for what is no URL."""
    if repository and not repository.startswith("https://"):
        raise ValueError(f"{VARIABLE}={repository!r}: expected a URL such as https://example.org/owner/braidax")
    return repository.rstrip("/") if repository else None


def described(readme: str, repository: str | None, version: str) -> str:
    """Returns the README for an index.

    **Arguments:** `readme`: in Markdown. `repository`: the URL, if known. `version`: whose tag links lead to.
    """

    def led(match: re.Match[str]) -> str:
        text, target = match.groups()
        if repository is None or target.startswith("#"):
            return text
        return f"[{text}]({repository}/blob/v{version}/{target})"

    parts = FENCE.split(readme)
    return "".join(part if number % 2 else LINK.sub(led, part) for number, part in enumerate(parts))


def urls(repository: str | None, version: str) -> dict[str, str]:
    """Returns the project's URLs by name, none where the repository is not known."""
    if repository is None:
        return {}
    tag = f"{repository}/blob/v{version}"
    return {
        "Source": repository,
        "Documentation": f"{tag}/README.md#where-to-read-on",
        "Changelog": f"{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
