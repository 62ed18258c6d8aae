"""Arguments of the public functions, checked: an error names the argument, what was expected and what
came."""
