"""The surroundings of a run: devices, files, metrics, progress, signals."""
