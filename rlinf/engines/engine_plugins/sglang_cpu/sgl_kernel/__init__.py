"""A stub of ``sgl_kernel``, of which no version for CPUs is published.

Every name can be imported, but only the function that SGLang 0.5.23 calls for Qwen2 is implemented;
the others raise. There are no submodules: SGLang runs without ``sgl_kernel.scalar_type``.
"""

__version__ = "0.4.10"


def __getattr__(name):  # type: ignore[no-untyped-def]
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing


def assign_req_to_token_pool_cpu(rows, table, starts, ends, places, width):  # type: ignore[no-untyped-def]
    """Write the next ``places`` (slots of the KV cache) into ``table[row, start:end]`` per row."""
    offset = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[offset : offset + end - start].to(table.dtype)
        offset += end - start
