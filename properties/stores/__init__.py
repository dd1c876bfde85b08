"""The rules of the contract of stores. May import `core`, the protocol of stores, and the modules of `properties` above it."""
