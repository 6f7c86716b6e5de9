"""Run Megatron-Core 0.16 without a GPU: an import hook changes its modules when they are imported.

Megatron's source names the CUDA device about a hundred times. The hook rewrites syntax trees before
they are compiled: ``torch.cuda`` becomes the module ``torch_cuda_stub`` beside this one, the device
``"cuda"`` becomes the CPU, tensors of CUDA types become CPU tensors, and transfers to a GPU do
nothing. Neither torch nor any file is changed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGE = "megatron.core"
STUB_MODULE = "torch_cuda_stub"
_STUB_NAME = "_rlinf_no_cuda"
"""Global name of the stub in a rewritten module."""


class _CpuRewriter(ast.NodeTransformer):
    """Rewrites expressions that name the device."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_STUB_NAME, node.ctx), node)
        if node.attr == "is_cuda":
            return ast.copy_location(ast.Constant(True), node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.module == "torch.cuda" and not node.level:
            node.module = STUB_MODULE
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        self.generic_visit(node)
        if method == "cuda" and isinstance(node.func, ast.Attribute):
            node.func.attr, node.args, node.keywords = "cpu", [], []
        elif method == "record_stream":
            return ast.copy_location(ast.Constant(None), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        if node.arg == "device" and value == "cuda":
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value.startswith("torch.cuda."):
            node.value = node.value.replace("torch.cuda.", "torch.")
        return node


def rewrite_for_cpu(source: str, path: str = "<source>") -> types.CodeType:
    """Return a module's code, compiled for the CPU."""
    tree = _CpuRewriter().visit(ast.parse(source, path))
    code: types.CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    return code


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        # Most modules need no change and use their compiled files.
        return rewrite_for_cpu(source, path) if "cuda" in source else super().get_code(fullname)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[_STUB_NAME] = importlib.import_module(STUB_MODULE)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install_import_hook() -> None:
    """Make Megatron-Core compute on the CPU, for modules that are imported later."""
    sys.meta_path.insert(0, _Finder())
