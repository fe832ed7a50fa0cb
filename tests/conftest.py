"""What every test relies on."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background leaves SIGINT ignored, and children inherit that: the
# tests of interruption need the usual handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
