"""Makes Spark find the data source `keyfold`, in an installed package and in an editable install.

Spark imports every top-level package named `pyspark_…` on Python's path and looks for `DefaultSource` in it.
"""

from keyfold.streaming.source import KeyfoldSource as DefaultSource

__all__ = ["DefaultSource"]
