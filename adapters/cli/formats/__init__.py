"""Commands on checkpoints of any format: conversions and links, and what `inspect`, `diff` and `verify` do with those of others. May import what shows results, and backends."""
