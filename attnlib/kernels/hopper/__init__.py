"""Exact attention in Gluon, for GPUs of compute capability 9.x."""
