"""The cleaner: what is dirty, when it is folded, and the pass that swaps segments. Kafka's `LogCleaner`."""
