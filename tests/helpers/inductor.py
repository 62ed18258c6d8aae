"""Whether PyTorch's own compiler has what it needs here."""


def can_run_inductor() -> bool:
    """On a CPU, where it writes C++."""
    from torch._inductor import cpp_builder

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except Exception:  # of several kinds: no compiler here
        return False
