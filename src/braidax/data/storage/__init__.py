"""Storage: files of one data set, on local disks or in an object store, read at random by many threads."""

from braidax.data.storage.files import Files as Files
from braidax.data.storage.files import Ranges as Ranges
from braidax.data.storage.local import LocalFiles as LocalFiles
