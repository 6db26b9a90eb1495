"""Image classifiers that are robust to many adversarial attacks at once."""

__version__ = '0.1.0'
