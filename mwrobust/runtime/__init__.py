"""Around a run: devices, files, metrics, progress, signals."""
