"""The config of an existing run: `--config=mwrobust/run_config.py:RUN`."""

from mwrobust import config as config_lib

get_config = config_lib.load
