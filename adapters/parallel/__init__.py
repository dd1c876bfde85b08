"""The buffers that DistributedDataParallel broadcasts, for a manager that saves them. May import `live` and everything below it.

Sharded modules and optimizers are recognised in `adapters.sharded`.
"""
