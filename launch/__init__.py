"""Runs `mwrobust.main` elsewhere, or many times: `python -m launch.<where>`."""
