"""What Spark finds by itself: it imports every package named `pyspark_…` and looks for `DefaultSource` in it.

Installed as `pyspark_keyfold`.
"""

from keyfold.streaming.source import KeyfoldSource as DefaultSource

__all__ = ["DefaultSource"]
