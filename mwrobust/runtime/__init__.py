"""Utilities of a run: devices, files, metrics, progress and signals."""
