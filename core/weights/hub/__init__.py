"""Directories of model hubs, as values: headers of safetensors files, which tensor goes into which file, and what a configuration says. May import what `weights` may."""
