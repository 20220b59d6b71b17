"""Key-value stores with the interface of Samza's `KeyValueStore`: on bytes, or typed through serdes."""
