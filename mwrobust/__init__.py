"""Image classifiers that stand up to many adversarial attacks at once."""
