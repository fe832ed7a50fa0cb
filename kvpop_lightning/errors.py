"""Errors that a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the user's input: the command line prints it as one line and exits with status 2.

    The message names the key, file or value at fault and what to do about it.
    """
