"""Conversions between formats: what a path can supply, and a target that is written while it streams. May import every other room of `backends`."""
