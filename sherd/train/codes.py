"""The exit codes of the command `sherd`: 0, done; the two below; anything else, a crash with its traceback."""

import signal

BAD_INPUT = 2
"""Told in one line."""

STOPPED = 128 + signal.SIGTERM
"""Stopped by SIGTERM or Ctrl-C, and saved: a scheduler knows that there is more to do."""
