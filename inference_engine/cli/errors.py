"""What ends a run beside a user's mistake."""


class OutputError(Exception):
    """The output cannot be written, and not because its reader went away."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"the output cannot be written ({cause.strerror or cause})")
