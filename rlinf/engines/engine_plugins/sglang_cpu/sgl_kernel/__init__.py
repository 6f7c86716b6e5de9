"""Stand-in for ``sgl_kernel`` on a CPU, for which none is published.

Any name may be imported, and raises when it is called, but for the one that SGLang 0.5.23 calls for
Qwen2. It has no submodules: SGLang has other ways where ``sgl_kernel.scalar_type`` is not there.
"""

__version__ = "0.4.10"


def __getattr__(name):  # type: ignore[no-untyped-def]
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing


def assign_req_to_token_pool_cpu(rows, table, starts, ends, places, width):  # type: ignore[no-untyped-def]
    """Write the next ``places`` into ``table[row, start:end]``, row after row."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start
