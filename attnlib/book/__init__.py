"""What the notebooks share, and what builds the book of them. `python -m attnlib.book --help`."""
