"""The config of a run that is there: `--config=mwrobust/run_config.py:RUN`."""

from mwrobust import config as config_lib

get_config = config_lib.load
