"""Plans, makes and compares the runs of a table.

`python -m mwrobust.reproduce` and `python -m mwrobust.search` are the programs.
"""
