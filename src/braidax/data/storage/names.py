"""Names of files that come out of a data file: they lead nowhere but into their folder."""

from urllib.parse import unquote

from braidax.errors import FormatError


def inside(folder: str, name: object, *, told_by: str) -> str:
    """Returns the path or URL of a file that an index, a state or a list inside a data set names.

    What such a file says was written by whoever made the data, and is not trusted with where things lie: a name that is
    absolute, or goes up, is refused. A symbolic link in the folder is followed when the file is read: it was made by
    somebody who may write there, and nothing that a data file says makes one.

    **Arguments:** `folder`: of the data set, a path or URL. `name`: of a file in it, or in folders of it, with slashes.
    `told_by`: the file that names it, for the error.

    **Raises:** `FormatError` for a name that is none, or leads out of the folder.
    """
    if isinstance(name, str):
        is_sent = folder.startswith("http")  # to a server, which undoes %2e and sees no file behind a question mark
        plain, forbidden = (unquote(name), "\0?#") if is_sent else (name, "\0")
        if not set(forbidden) & set(plain) and not {"", ".", ".."} & set(plain.split("/")):
            return f"{folder.rstrip('/')}/{name}"
    raise FormatError(
        f"{told_by}: names the file {name!r}, which does not lie in {folder}; expected a name in that folder, without "
        "'..' and not absolute: move the file there, and correct the name"
    )
