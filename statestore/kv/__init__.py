"""Key-value stores in the terms of Samza's `KeyValueStore`: on bytes, and typed through serdes."""
