"""Frames: plans of Polars that are written for one process and computed by many."""

from braidax.frame.collecting import collect as collect
from braidax.frame.collecting import collect_partition as collect_partition
from braidax.frame.explaining import explain as explain
from braidax.frame.frame import Frame as Frame
from braidax.frame.frame import concat as concat
from braidax.frame.frame import from_polars as from_polars
from braidax.frame.frame import scan_csv as scan_csv
from braidax.frame.frame import scan_ipc as scan_ipc
from braidax.frame.frame import scan_ndjson as scan_ndjson
from braidax.frame.frame import scan_parquet as scan_parquet
