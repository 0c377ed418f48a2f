"""The one exception for a user's mistake.

A command prints its text as one line and exits with a non-zero code; nothing else of the engine's
exceptions is meant for people. The text says what was found, what is allowed and the nearest legal
value.
"""


class UserError(ValueError):
    """Bad input: the message is one line that a user can act on."""
