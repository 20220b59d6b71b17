"""The cleaner: what is dirty, when it is compacted, and the pass that swaps segments. Kafka's
`LogCleaner`.
"""
