"""How ranks train one model: what DistributedDataParallel and FSDP2 do to its gradients and buffers, and the windows of an attached loop.

May import `sharded` and `core`; `live` and every room above it may import it.
"""
