"""Measuring: timing, peers, records, power, roofline, machine code. `python -m attnlib.bench --help`."""
