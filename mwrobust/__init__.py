"""Image classifiers that stand up to many adversarial attacks at once."""

__version__ = '0.1.0'
