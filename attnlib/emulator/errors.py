"""What the emulator finds."""


class Race(RuntimeError):
    """Memory was used while something else could still write it, or written while it could be read."""


class Deadlock(RuntimeError):
    """No partition can go on, and nothing is under way."""
