"""Installs the import hook when the interpreter starts, before anything imports Megatron-Core."""

import cpu_import_hook

cpu_import_hook.install_import_hook()
