"""Plans, predictions and reports."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a machine that does other things too is no error
settings.load_profile("unhurried")
