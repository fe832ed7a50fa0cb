"""Errors that a user can mend, and the one that a termination signal becomes."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in the user's input: the command line prints it as one line and exits with status 2.

    The message names the key, file or value at fault and what to do about it.
    """


class ConfigError(UserError):
    """Everything that is wrong with a configuration, collected and raised once.

    Args:
        problems: one clear line each; the command line prints each as its own `error:` line.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, so that everything which cleans up after Ctrl-C does so here
    as well."""
