"""Storage: files of one data set, on local disks or in an object store, read at random by many threads."""

from braidax.data.storage.files import Files as Files
from braidax.data.storage.files import Ranges as Ranges
from braidax.data.storage.local import LocalFiles as LocalFiles
from braidax.data.storage.options import Remote as Remote
from braidax.data.storage.places import list_files as list_files
from braidax.data.storage.places import open_files as open_files
