"""Holders of mutable torch objects: live runs, managers, loaders, the command line."""
