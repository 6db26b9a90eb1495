"""Many runs for one table: what to run, what it costs, and what it shows.

`python -m mwrobust.reproduce` and `python -m mwrobust.search` are the programs.
"""
