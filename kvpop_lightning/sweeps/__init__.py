"""Searches over settings: one trial is one child process that trains and is measured (docs/sweeps.md)."""
