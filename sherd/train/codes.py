"""The exit codes of the command `sherd`: 0, done; those below; 128 + N, a rank was killed by signal N; 1, a crash."""

import signal

BAD_INPUT = 2
"""Told in one line."""

NO_ROOM = 74
"""A checkpoint or record could not be written, as on a full disk; told in one line. EX_IOERR of BSD's sysexits."""

NOT_SAVED = 128 + signal.SIGINT
"""Stopped by SIGTERM, SIGHUP or Ctrl-C, without saving: in the start, or because a rank was stuck."""

STOPPED = 128 + signal.SIGTERM
"""Stopped by SIGTERM, SIGHUP or Ctrl-C, and saved: a scheduler knows that there is more to do."""
