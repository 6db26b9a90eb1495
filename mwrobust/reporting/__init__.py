"""Writes reports: an HTML page, the same in Markdown, and a summary.

  from mwrobust import evaluation, reporting

  outcomes = evaluation.evaluate(logits_fn, images, labels, threats)
  reporting.write(outcomes, 'my_network')  # report.html and report.md

Several protocols are shown side by side, and the first is the main one. A curve
is an evaluation at several radii:

  paper = evaluation.evaluate(..., protocol='paper')
  curve = evaluation.evaluate(..., protocol='fast', radii=evaluation.RADII)
  reporting.write([outcomes, paper], 'my_network', curve=curve)

For training runs, `reporting.write_runs([reporting.load(workdir), ...], ...)`.
This package only reads saved files, so it needs neither Flax nor Orbax.
"""

from mwrobust.reporting.runs import Run, load
from mwrobust.reporting.writing import write, write_run, write_runs

__all__ = ['Run', 'load', 'write', 'write_run', 'write_runs']
