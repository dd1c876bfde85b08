"""The laws of metrics, and the rules of their contract. May import `core` and the modules of `properties` above it."""
